"""Keep this machine's knowledge of its run current: key rings, timestamps and amendments, from several sources.

Waiting: `follow` asks every source at intervals; nothing waits for it except callers of `refresh`. Like a TUF client, it
follows the key rings to the last before it reads the timestamp, because a ring may name another key for it.

An amendment of the calibration is fetched when a timestamp names it. No new work waits for one: without it a validator judges by
the version that it knows, and says so.

Invariant: rings and amendments only grow and the timestamp only moves forward, over restarts too, because all are on disk
before they count. One that a wrong clock took is replaced once the clock is right. An unreachable, lagging or dishonest source
costs a log line. Two timestamps of which the later contradicts the earlier convict the coordinator's key, and two key rings of
one version the root: both are kept in `evidence`. Linked peers are asked too, so that the coordinator cannot tell us one thing
and them another. A peer's timestamp counts only if its key ring is known here and the peer shows the manifest that it names,
signed by the trainer: so a stolen coordinator key cannot stop machines that have an honest source. A key ring that replaces the
signer of the newest timestamp voids it. A ring that this machine knew and has lost is waited for (`newest_ring_kept`): no
timestamp counts until a source shows it again. When no source shows a fresh timestamp, `fault` says so, and roles that take new
work must wait: the run may have continued, and the sources may show an old state.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from prime_node.broadcast.follow.pinned import is_by_unknown_key, newest_ring_kept
from prime_node.files import disk_faults, read_or_begin, write_durably
from prime_node.inside import place
from prime_node.patience import without_numbers
from prime_node.ports.clock import Clock
from prime_node.ports.documents import TIMESTAMP_NAME, amendment_name, key_ring_name
from prime_node.ports.transport import StatementSource, TimestampSource, Unreachable
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.key_ring import ChainPoint, KeyChain
from prime_protocol.manifest import open_manifest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import Timestamp, check_follows, check_fresh, open_timestamp, require_named

log = logging.getLogger(__name__)

T = TypeVar("T")
PEERS_ASKED_MAX = 2
"""Linked peers whose timestamp is compared with ours in one refresh."""
ANSWER_S_MAX = 10.0
"""Seconds that a source has for one statement, and a peer for everything."""
MANIFEST_S_MAX = 60.0
"""Seconds that a source has for the last policy's manifest, which is the longest answer."""
EVIDENCE_FILES_MAX = 16
POLL_S_MIN, POLL_S_MAX = 2.0, 30.0
"""Seconds between requests: the shortest for the first ones without a fresh timestamp, the longest while there is one or none
comes."""


LinkedPeers = Callable[[], Sequence[tuple[str, TimestampSource]]]
"""Function that returns the currently linked peers, by name."""


class Trust:
    """Keys and newest timestamp of a run.

    `folder` belongs to this machine alone and survives restarts; `run` learns the rings found.
    """

    def __init__(
        self,
        run: PinnedRun,
        sources: Sequence[tuple[str, StatementSource]],
        folder: Path,
        *,
        clock: Clock,
        rng: random.Random | None = None,
        peers: LinkedPeers = tuple,
    ) -> None:
        """Start from what was known last time. Raises LocalError if the folder is unusable."""
        self._fault_s = POLL_S_MIN
        self.newest: Timestamp | None = None
        self._newest_envelope: Envelope | None = None
        self.peers = peers
        """Function that returns the currently linked peers."""
        self.run = run
        self._sources = sources
        self._folder = folder
        self._clock = clock
        self._rng = rng or random.Random()
        self._is_over = False
        """Whether the last policy's manifest was seen: then nothing newer can be hidden."""
        self._reasons: dict[str, str] = {}
        self._ring_kept = 0
        """Version of the newest key ring of which there was a file at the start, also a damaged one."""
        self._orphan: Envelope | None = None
        """The stored timestamp, while its signer's key ring is lost."""
        self._rings_compared: dict[str, int] = {}
        """Version of the key ring that each source was found to share."""
        self._said = ""
        with disk_faults(f"folder {folder}"):
            for name in ("keys", "calibrations"):
                place(folder, name).mkdir(parents=True, exist_ok=True)
            self._ring_kept = newest_ring_kept(place(folder, "keys"), run)
            self._restore()

    def fault(self) -> str:
        """Return why no new work may be accepted from these sources; empty if there is no reason.

        A run that has published its last policy cannot be frozen.
        """
        stamp = self.newest
        if lost := self.lost_ring():
            return f"key ring {lost} was known here, its file is damaged or missing, and no source shows it"
        if stamp is None:
            return "no source says which policy is the newest"
        if self._is_over:
            return ""
        if stamp.key_ring > self.run.keys.version:
            return f"key ring {stamp.key_ring} is in force, and no source shows it"
        try:
            check_fresh(stamp, self._clock.now_ms())
        except RemoteError as error:
            return error.detail
        return ""

    def why_not_newest(self, policy_version: int) -> str:
        """Return why a newer policy than this one may exist; empty if there is no reason."""
        if self.newest is not None and self.newest.policy_version > policy_version:
            return f"policy {self.newest.policy_version} is published"
        return self.fault()

    def lost_ring(self) -> int:
        """Return the version of the first key ring that this machine knew and has lost; 0 if there is none."""
        version = self.run.keys.version + 1
        is_lost = self._orphan is not None or version <= self._ring_kept
        return version if is_lost else 0

    async def start(self) -> None:
        """Ask every source once, and again until no key ring is lost: former keys verify nothing. Raises LocalError."""
        await self.refresh()
        while self.lost_ring():
            await self._pause()
            await self.refresh()

    async def refresh(self) -> None:
        """Ask every source once, concurrently. Raises LocalError for the disk."""
        await asyncio.gather(*(self._ask(name, source) for name, source in self._sources))
        peers = list(self.peers())
        chosen = self._rng.sample(peers, min(PEERS_ASKED_MAX, len(peers)))
        await asyncio.gather(*(self._ask_peer(name, peer) for name, peer in chosen))
        fault = self.fault()
        if without_numbers(fault) != self._said:
            log.warning("%s", f"{fault}; waiting" if fault else "the newest policy is known again")
        self._said = without_numbers(fault)

    async def verified(self, check: Callable[[], T]) -> T:
        """Return the result of `check`; retry it with the newest keys if no known key made a signature.

        Raises what `check` raises, and LocalError.
        """
        try:
            return check()
        except RemoteError as error:
            if error.code not in (ErrorCode.BAD_SIGNATURE, ErrorCode.REVOKED):
                raise
        await self.refresh()
        return check()

    async def follow(self) -> NoReturn:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await self._pause()

    async def _pause(self) -> None:
        """Pause until the next refresh: twice as long each time while there is no fresh timestamp."""
        if self.newest is None or self.fault():
            pause_s, self._fault_s = self._fault_s, min(2 * self._fault_s, POLL_S_MAX)
        else:
            left_s = (self.newest.expires_at_ms - self._clock.now_ms()) / 1_000
            pause_s, self._fault_s = min(POLL_S_MAX, max(POLL_S_MIN, left_s / 4)), POLL_S_MIN
        await self._clock.sleep(pause_s * self._rng.uniform(0.5, 1.0))

    async def _ask(self, name: str, source: StatementSource) -> None:
        reason = ""
        try:
            await self._follow_rings(source)
            await self._compare_ring(name, source)
            async with asyncio.timeout(ANSWER_S_MAX):
                self._take_timestamp(await source.timestamp())
            if (last := self._unseen_last()) is not None:
                async with asyncio.timeout(MANIFEST_S_MAX):
                    self._is_over = await self._is_shown(last, source) or self._is_over
            await self._follow_calibrations(source)
        except (RemoteError, Unreachable, TimeoutError) as error:
            reason = str(error) or f"no whole answer within {ANSWER_S_MAX:g} s"
            if without_numbers(reason) != self._reasons.get(name):
                log.warning("source %s: %s", name, reason)
        self._reasons[name] = without_numbers(reason)

    async def _ask_peer(self, name: str, peer: TimestampSource) -> None:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                envelope = await peer.timestamp()
                stamp = self._compared(envelope)
                if stamp is None or stamp.key_ring > self.run.keys.version:
                    return
                known = None if self.newest is None else self.newest.head
                if stamp.head is None or stamp.head == known or await self._is_shown(stamp.head, peer):
                    self._take_timestamp(envelope)  # compared again: a newer one may have arrived meanwhile
        except (RemoteError, Unreachable, TimeoutError) as error:
            log.debug("peer %s shows no timestamp that counts: %s", name, error)

    async def _follow_rings(self, source: StatementSource) -> None:
        """Take the key rings that the source knows. Their number is bounded, as KeyRing.version is."""
        keys = self.run.keys
        while keys.version < limits.KEY_RINGS_MAX:
            version = keys.version + 1
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    envelope = await source.key_ring(version)
            except RemoteError as error:
                if error.code is ErrorCode.NOT_FOUND:
                    return
                raise
            if keys.version >= version:  # another source was faster
                continue
            ring = keys.check(envelope)
            self._write(key_ring_name(version), envelope)
            keys.add(envelope)
            self._restore_after(ring.version)
            self._void_if_revoked()
            log.warning("key ring %d of the run's root is in force: %s", version, ring.reason or "no reason given")

    async def _compare_ring(self, name: str, source: StatementSource) -> None:
        """Compare the newest key ring with the source's, once. Keep both and raise RemoteError(FORK) if the root signed both."""
        keys, version = self.run.keys, self.run.keys.version
        if not version or self._rings_compared.get(name) == version:
            return
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                shown = await source.key_ring(version)
        except RemoteError as error:
            if error.code is ErrorCode.NOT_FOUND:  # it lags
                return
            raise
        known = keys.rings[version - 1][1]
        if shown.payload != known.payload:
            KeyChain(keys.run, keys.first, keys.rings[: version - 1]).check(shown)
            fork = RemoteError(
                ErrorCode.FORK, f"the run's root has signed two key rings {version}: ask the run's creator"
            )
            self._keep_evidence("key-ring", "root", fork, shown, known)
            raise fork
        self._rings_compared[name] = version

    async def _follow_calibrations(self, source: StatementSource) -> None:
        """Take the amendments up to the one that the newest timestamp names, if the source has all of them.

        Keys of a former root may have signed some, and may be stolen: only the timestamp's digest says which are the run's.
        """
        stamp, shown = self.newest, self.run.calibrations.copy()
        while stamp is not None and shown.version < stamp.calibration:
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    shown.add(await source.calibration(shown.version + 1))
            except RemoteError as error:
                if error.code is ErrorCode.NOT_FOUND:  # the source lags behind the timestamp of another one
                    return
                raise
        known = self.run.calibrations
        if stamp is None or known.version >= shown.version:  # another source was faster
            return
        require_named(shown, stamp)
        for amendment, envelope in shown.amendments[known.version :]:
            self._write(amendment_name(amendment.version), envelope)
            known.add(envelope)
            classes = ", ".join(sorted({pair.worker for pair in amendment.pairs}))
            log.warning("calibration %d is in force: the run now knows the noise of %s", amendment.version, classes)

    async def _is_shown(self, head: ChainPoint, source: TimestampSource) -> bool:
        """Return whether the source shows this manifest, signed by the trainer. Raises RemoteError and Unreachable."""
        envelope = await source.manifest(head.policy_version)
        signed = await asyncio.to_thread(open_manifest, envelope, self.run)
        return signed.point == head

    def _unseen_last(self) -> ChainPoint | None:
        """Return the run's last policy if the timestamp names it and its manifest was not seen yet."""
        if self._is_over or self.newest is None or self.newest.policy_version != self.run.spec.max_steps:
            return None
        return self.newest.head

    def _compared(self, envelope: Envelope) -> Timestamp | None:
        """Return a timestamp that is newer than the known one, else None. Raises RemoteError; keeps evidence."""
        stamp = open_timestamp(envelope, self.run)
        if lost := self.lost_ring():
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN, f"it shows a timestamp, but not key ring {lost}, which was known here"
            )
        try:
            return stamp if self.newest is None or check_follows(stamp, self.newest, self._clock.now_ms()) else None
        except RemoteError as error:
            if error.code is not ErrorCode.EXPIRED:
                earlier = [] if self._newest_envelope is None else [self._newest_envelope]
                self._keep_evidence("timestamp", "coordinator", error, envelope, *earlier)
            raise

    def _take_timestamp(self, envelope: Envelope) -> None:
        """Take a timestamp if it is newer than the known one. Raises RemoteError; keeps evidence."""
        if (stamp := self._compared(envelope)) is not None:
            check_fresh(stamp, self._clock.now_ms())
            self._write(TIMESTAMP_NAME, envelope)
            self.newest, self._newest_envelope = stamp, envelope

    def _void_if_revoked(self) -> None:
        """Forget the newest timestamp if its signer has lost its role. A restart does not read it again (`_restore`)."""
        if self._newest_envelope is None:
            return
        try:
            open_timestamp(self._newest_envelope, self.run)
        except RemoteError as error:
            log.warning("the newest timestamp is void: %s; asking for another", error)
            self.newest = self._newest_envelope = None

    def _keep_evidence(self, kind: str, signer: str, error: RemoteError, *statements: Envelope) -> None:
        """Keep statements that contradict each other, all signed by the keys of one role."""
        folder = self._folder / "evidence"
        evidence = [one.to_bytes() for one in statements]
        try:
            folder.mkdir(exist_ok=True)
            for data in evidence:
                path = place(folder, f"{kind}-{digest_of(data)[:16]}.json")
                if not path.exists() and len(list(folder.glob(f"{kind}-*"))) < EVIDENCE_FILES_MAX:
                    write_durably(path, data)
                    log.error("the %s contradicts itself (%s); evidence in %s", signer, error.detail, path)
        except OSError as failed:
            log.error(
                "the %s contradicts itself (%s), and the evidence cannot be kept: %s", signer, error.detail, failed
            )

    def _restore(self) -> None:
        """Load and verify what was known when this machine stopped. A damaged file does not stop the machine."""
        self._restore_rings()
        path = self._folder / TIMESTAMP_NAME
        if not path.exists():
            return
        try:
            envelope = open_envelope(read_or_begin(path))
            self._orphan = envelope if is_by_unknown_key(envelope, self.run) else None
            self.newest, self._newest_envelope = open_timestamp(envelope, self.run), envelope
        except RemoteError as error:  # or its signer's time is over
            log.warning("%s: %s; asking for it again", path, error)
        if self.newest is not None:
            self._restore_amendments(self.newest)

    def _restore_rings(self) -> None:
        """Take the stored key rings up to the first damaged one, which stays as the trace of what was known."""
        keys = self.run.keys
        while (path := place(self._folder, key_ring_name(keys.version + 1))).exists():
            try:
                keys.add(open_envelope(read_or_begin(path)))
            except RemoteError as error:
                log.warning("%s: %s; asking for it again", path, error)
                return

    def _restore_after(self, version: int) -> None:
        """Take what was stored after a key ring that was lost, now that a source has shown it."""
        if self._orphan is None and version >= self._ring_kept:
            return
        with disk_faults(f"folder {self._folder}"):
            self._restore()

    def _restore_amendments(self, stamp: Timestamp) -> None:
        """Take the stored amendments if the stored timestamp names them. If not, the sources are asked again.

        Keys of a former root may have signed those on the disk.
        """
        shown = self.run.calibrations.copy()
        path = self._folder
        try:
            while shown.version < stamp.calibration:
                path = place(self._folder, amendment_name(shown.version + 1))
                if not path.exists():
                    return
                shown.add(open_envelope(read_or_begin(path)))
            require_named(shown, stamp)
        except RemoteError as error:
            log.warning("%s: %s; asking for it again", path, error)
            return
        for _, envelope in shown.amendments:
            self.run.calibrations.add(envelope)

    def _write(self, name: str, envelope: Envelope) -> None:
        path = place(self._folder, name)
        with disk_faults(f"folder {self._folder}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, envelope.to_bytes())
