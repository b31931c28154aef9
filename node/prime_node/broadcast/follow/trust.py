"""Keeps what a machine knows about its run's keys and newest policy current: key rings and timestamps, from several sources.

Who waits for whom: `follow` asks every source now and then; nobody waits for it but who asks `refresh` himself. As a TUF client
does, it follows the key rings to their end before it reads the timestamp, for a ring may say that another key signs it.

Invariant: rings only grow and the timestamp only moves forward, over restarts too, because both are on the disk before they
count. A source that is away, lags or lies costs a line in the log. Two timestamps of which the later takes back what the earlier
said convict the coordinator's key: both are kept in `evidence`. Linked peers are asked too, so that it cannot tell us one
thing and them another. When no source shows a timestamp that holds, `fault` says so,
and who takes new work must wait: the run may have gone on without us, and be shown to us as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from prime_node.files import write_durably
from prime_node.inside import place
from prime_node.ports.clock import Clock
from prime_node.ports.transport import StatementSource, TimestampSource, Unreachable
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import ErrorCode, LocalError, PeerError
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import Timestamp, check_follows, check_fresh, open_timestamp

log = logging.getLogger(__name__)

T = TypeVar("T")
PEERS_ASKED_MAX = 2
"""Linked peers whose timestamp is compared with ours at one look."""
PEER_S_MAX = 10.0
EVIDENCE_FILES_MAX = 16
POLL_S_MIN, POLL_S_MAX = 2.0, 30.0
"""Between questions: while there is no timestamp that holds, and while there is one."""


class Trust:
    """`folder` is this machine's own and survives restarts; `run` learns the rings that are found."""

    def __init__(
        self,
        run: PinnedRun,
        sources: Sequence[tuple[str, StatementSource]],
        folder: Path,
        *,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        """Takes up what was known the last time. Raises LocalError if the folder is unusable."""
        self.newest: Timestamp | None = None
        self.peers: Callable[[], Sequence[tuple[str, TimestampSource]]] = lambda: ()
        """Peers that are linked now."""
        self.run = run
        self._sources = sources
        self._folder = folder
        self._clock = clock
        self._rng = rng or random.Random()
        self._reasons: dict[str, str] = {}
        self._said = ""
        try:
            (folder / "keys").mkdir(parents=True, exist_ok=True)
            self._restore()
        except OSError as error:
            raise LocalError(f"folder {folder}: {error.strerror}; choose another folder") from None

    def fault(self) -> str:
        """Why no new work must be taken on the word of these sources; empty where there is no reason.

        A run that has published its last policy cannot be frozen.
        """
        stamp = self.newest
        if stamp is None:
            return "no source says which policy is the newest"
        if stamp.policy_version == self.run.spec.max_steps:
            return ""
        if stamp.key_ring > self.run.keys.version:
            return f"key ring {stamp.key_ring} is in force, and no source shows it"
        try:
            check_fresh(stamp, self._clock.now_ms())
        except PeerError as error:
            return error.detail
        return ""

    async def refresh(self) -> None:
        """Ask every source once, all at the same time. Raises LocalError for the disk."""
        await asyncio.gather(*(self._ask(name, source) for name, source in self._sources))
        peers = list(self.peers())
        for name, peer in self._rng.sample(peers, min(PEERS_ASKED_MAX, len(peers))):
            await self._ask_peer(name, peer)
        fault = self.fault()
        if fault != self._said:
            log.warning("%s", f"{fault}; waiting" if fault else "the newest policy is known again")
        self._said = fault

    async def verified(self, check: Callable[[], T]) -> T:
        """The result of `check`, tried again with the newest keys where it finds a signature by none that is known.

        Raises what `check` raises, and LocalError.
        """
        try:
            return check()
        except PeerError as error:
            if error.code not in (ErrorCode.BAD_SIGNATURE, ErrorCode.REVOKED):
                raise
        await self.refresh()
        return check()

    async def follow(self) -> NoReturn:
        """For ever. Cancel it to stop."""
        while True:
            await self.refresh()
            await self._clock.sleep(self._pause_s() * self._rng.uniform(0.5, 1.0))

    def _pause_s(self) -> float:
        if self.newest is None or self.fault():
            return POLL_S_MIN
        left_s = (self.newest.expires_at_ms - self._clock.now_ms()) / 1_000
        return min(POLL_S_MAX, max(POLL_S_MIN, left_s / 4))

    async def _ask(self, name: str, source: StatementSource) -> None:
        reason = ""
        try:
            await self._follow_rings(source)
            await self._take_timestamp(await source.timestamp())
        except (PeerError, Unreachable) as error:
            reason = str(error)
            if reason != self._reasons.get(name):
                log.warning("source %s: %s", name, error)
        self._reasons[name] = reason

    async def _ask_peer(self, name: str, peer: TimestampSource) -> None:
        try:
            async with asyncio.timeout(PEER_S_MAX):
                envelope = await peer.timestamp()
            await self._take_timestamp(envelope)
        except (PeerError, Unreachable, TimeoutError) as error:
            log.debug("peer %s shows no timestamp that counts: %s", name, error)

    async def _follow_rings(self, source: StatementSource) -> None:
        """As far as the source knows them. Their number is bounded: KeyRing.version is."""
        keys = self.run.keys
        while keys.version < limits.KEY_RINGS_MAX:
            version = keys.version + 1
            try:
                envelope = await source.key_ring(version)
            except PeerError as error:
                if error.code is ErrorCode.NOT_FOUND:
                    return
                raise
            if keys.version >= version:  # another source was faster
                continue
            ring = keys.check(envelope)
            self._write(f"keys/{version:04d}.json", envelope)
            keys.add(envelope)
            log.warning("key ring %d of the run's root is in force: %s", version, ring.reason or "no reason given")

    async def _take_timestamp(self, envelope: Envelope) -> None:
        stamp = open_timestamp(envelope, self.run)
        try:
            is_newer = self.newest is None or check_follows(stamp, self.newest)
        except PeerError as error:
            self._keep_evidence(envelope, error)
            raise
        if is_newer:
            check_fresh(stamp, self._clock.now_ms())
            self._write("timestamp.json", envelope)
            self.newest = stamp

    def _keep_evidence(self, envelope: Envelope, error: PeerError) -> None:
        """What the coordinator says now and what it said before, both signed by its key."""
        folder = self._folder / "evidence"
        said = [envelope.to_bytes()]
        with contextlib.suppress(OSError):
            said.append((self._folder / "timestamp.json").read_bytes())
        try:
            folder.mkdir(exist_ok=True)
            for data in said:
                path = place(folder, f"timestamp-{digest_of(data)[:16]}.json")
                if not path.exists() and len(list(folder.iterdir())) < EVIDENCE_FILES_MAX:
                    write_durably(path, data)
                    log.error("the coordinator contradicts itself (%s); evidence in %s", error.detail, path)
        except OSError as failed:
            log.error(
                "the coordinator contradicts itself (%s), and the evidence cannot be kept: %s", error.detail, failed
            )

    def _restore(self) -> None:
        """What was known when this machine stopped, verified again. A damaged file is no reason to stop."""
        keys = self.run.keys
        while (path := place(self._folder, f"keys/{keys.version + 1:04d}.json")).exists():
            try:
                keys.add(open_envelope(path.read_bytes()))
            except PeerError as error:
                log.warning("%s: %s; asking for it again", path, error)
                path.unlink()
        path = self._folder / "timestamp.json"
        if path.exists():
            try:
                self.newest = open_timestamp(open_envelope(path.read_bytes()), self.run)
            except PeerError as error:  # or its signer's time is over
                log.warning("%s: %s; asking for it again", path, error)

    def _write(self, name: str, envelope: Envelope) -> None:
        try:
            write_durably(place(self._folder, name), envelope.to_bytes())
        except OSError as error:
            raise LocalError(f"folder {self._folder}: {error.strerror}; free some space and start again") from None
