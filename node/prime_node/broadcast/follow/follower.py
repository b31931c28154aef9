"""Follows the head: fetch, verify, decode, stage. For workers, validators and everybody else.

Who waits for whom: `follow` polls the sources and stages the newest policy; `wait_newer` and `weights` wait
for it. One policy is decoded at a time. A source that is away, slow or lying costs time and a line in the
log, never the task; what ends it is a fault of this machine, such as a full disk.

The way to a policy is the cheapest in bytes from what is held or from nothing (ways.py). A delta is applied to a
shadow copy. Nothing is staged before heads.py has verified its manifest, and then: (4) every blob's digest; (5) every
chunk's and every tensor's, and with them the base's (CheckpointDecoder).

Healing: a held policy that is no longer what its root says (a flipped bit in memory) is noticed when the next delta
is taken against it, and dropped; an encoding that is gone or does not decode is closed. Either way the next cheapest
way is taken. A policy is given up only when every way to it was published broken.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from prime_node.broadcast.follow.heads import Heads
from prime_node.broadcast.follow.ways import UpdateStep, Ways
from prime_node.broadcast.swarm.download import Download
from prime_node.broadcast.swarm.holdings import Holdings
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.ports.clock import Clock
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import open_index
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, LocalError, PeerError
from prime_protocol.manifest import Encoding, PartEntry, SignedManifest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights, num_bytes, root_of

log = logging.getLogger(__name__)

_T = TypeVar("_T")
HEAD_WAIT_S = 10.0
"""A source that can may hold the question for the newest policy this long."""
PAUSE_S_MAX = 15.0
"""Between attempts at a policy that nobody gives."""
DISK_SHARE_MAX = 2.0
"""Bytes kept on the disk for one policy, as a share of its weights."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A verified set of weights."""

    signed: SignedManifest
    weights: Weights
    blobs: tuple[PartEntry, ...] = ()
    """What leads to it from nothing, as far as that is worth its room: on the disk as long as it is held."""

    @property
    def version(self) -> int:
        return self.signed.manifest.policy_version


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """Of one download. Example: DownloadProgress(policy_version=41, bytes_done=5_000_000, bytes_total=9_000_000)."""

    policy_version: int
    bytes_done: int
    """Verified, from the disk or from a source."""
    bytes_total: int


class Follower:
    """One machine's view of the published policies. `folder` is its own and survives restarts."""

    def __init__(
        self,
        run: PinnedRun,
        sources: Sequence[tuple[str, CheckpointSource]],
        folder: Path,
        *,
        clock: Clock,
        poll_s: float = 1.0,
        policies_kept: int = 2,
        memory_bytes_max: int = 64 * 2**20,
        parts_bytes_max: int = 64 * 2**30,
        on_progress: Callable[[DownloadProgress], None] = lambda _: None,
        rng: random.Random | None = None,
    ) -> None:
        """`sources` are (name, source) pairs, the preferred one first. Raises LocalError if the folder is
        unusable."""
        self.run = run
        self.holdings = Holdings()
        """What can be given to peers."""
        self.received: dict[str, int] = {}
        """Bytes of pieces so far, by source."""
        self._rng = rng or random.Random()
        self.pool = SourcePool(sources, clock=clock, rng=self._rng)
        self._folder = folder
        self._clock = clock
        self._poll_s = poll_s
        self._policies_kept = max(2, policies_kept)  # the newest, and one that somebody asks for
        self._memory_bytes_max = memory_bytes_max
        self._on_progress = on_progress
        self._policies: dict[int, Policy] = {}  # the least recently used first
        self._broken: dict[int, str] = {}
        self._bad: dict[tuple[int, int | None], str] = {}
        """Encodings, by policy and base, whose bytes are the signed ones and do not decode to their policy."""
        self._newest = -1
        self._decoding = asyncio.Lock()
        self._changed = asyncio.Condition()
        try:
            self.parts = PartStore(folder / "parts", bytes_max=parts_bytes_max)
            self.heads = Heads(run, self.pool, folder)
            self._ways = Ways(self.heads, on_disk=self.parts.has)
        except OSError as error:
            raise LocalError(f"checkpoint folder {folder}: {error}") from None

    # What others ask

    def latest(self) -> Policy | None:
        """The newest staged policy."""
        return self._policies.get(self._newest)

    def versions(self) -> tuple[int, ...]:
        """Policies at hand without a download, oldest first."""
        return tuple(sorted(self._policies))

    def manifest_at_hand(self, policy_version: int) -> Envelope | None:
        """A verified manifest, where it is held: to be shown to peers."""
        signed = self.heads.chain.recent(policy_version) or self._ways.at_hand(policy_version)
        return None if signed is None else signed.envelope

    async def wait_newer(self, policy_version: int) -> Policy:
        """The newest staged policy, as soon as it is newer than `policy_version`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newest > policy_version and self._newest in self._policies)
            return self._policies[self._newest]

    async def weights(self, policy_version: int) -> Weights:
        """Verified weights of one policy, fetched if they are not at hand.

        Waits as long as it takes (for a policy that is not published yet, for a source that is away): the
        caller has the deadline. Raises PeerError only where the policy's bytes are not what its signed
        manifest says.
        """
        return (await self.policy(policy_version)).weights

    async def policy(self, policy_version: int) -> Policy:
        """As `weights`, with the manifest."""
        pause_s = self._poll_s
        while policy_version not in self._policies:
            if policy_version in self._broken:
                raise PeerError(ErrorCode.CHAIN_BROKEN, self._broken[policy_version])
            try:
                if policy_version > self.heads.newest:
                    await self.heads.look()
                if policy_version <= self.heads.newest:
                    await self._take(await self.heads.manifest(policy_version))
                    continue
            except (PeerError, Unreachable) as error:
                log.warning("policy %d: %s; trying again", policy_version, error)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            await self._clock.sleep(pause_s)
        policy = self._policies.pop(policy_version)
        self._policies[policy_version] = policy
        return policy

    async def fetch(self, policy_version: int) -> Policy:
        """As `policy`, but one attempt. Raises PeerError where nobody has it or it was published broken, or Unreachable."""
        if policy_version not in self._policies:
            await self._take(await self.heads.manifest(policy_version))
        return self._policies[policy_version]

    async def follow(self) -> NoReturn:
        """Keep the newest policy staged, for ever. Cancel it to stop."""
        started: int | None = None
        pause_s = self._poll_s
        while True:
            asked_s = self._clock.monotonic_s()
            await self.heads.look(wait_s=HEAD_WAIT_S if self._target(started) is None else 0.0)
            started = self._target(started)
            if started is None:
                # A source that held the question has waited for us; one that cannot is asked again after a pause.
                await self._clock.sleep(max(0.0, self._poll_s - (self._clock.monotonic_s() - asked_s)))
                continue
            try:
                await self._take(await self.heads.manifest(started))
                started, pause_s = None, self._poll_s
            except (PeerError, Unreachable) as error:
                log.warning("policy %d: %s; looking for the head again", started, error)
                if isinstance(error, PeerError):
                    started = None
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    # The bytes

    def _target(self, started: int | None) -> int | None:
        """The version to download next, or None. One that was begun is finished while it is still of use."""
        head = self.heads.newest
        if started is not None and started > self._newest and head - started < max(1, self.run.spec.async_level):
            return started
        return head if head > self._newest and head not in self._broken else None

    async def _take(self, signed: SignedManifest) -> None:
        """Download, verify, decode and stage one policy by the cheapest way, and by the next cheapest where that fails."""
        async with self._decoding:
            version = signed.manifest.policy_version
            gone: set[tuple[int, int | None]] = set()
            while version not in self._policies:
                try:
                    way = await self._ways.find(signed, held=self._policies, closed=gone | self._bad.keys())
                except PeerError:
                    if any((version, one.base_version) not in self._bad for one in signed.manifest.encodings):
                        raise
                    raise self._give_up(version) from None
                try:
                    await self._stage(await self._walk(way, version))
                except _ClosedError as closed:
                    log.warning("policy %d: %s; looking for another way", version, closed)
                    if closed.for_good:
                        self._bad[closed.step.name] = str(closed)
                    gone.add(closed.step.name)
                except _WrongBaseError as wrong:
                    log.error("policy %d is not what it was when it was verified; it is dropped", wrong.policy_version)
                    self._policies.pop(wrong.policy_version, None)

    async def _walk(self, way: Sequence[UpdateStep], version: int) -> Policy:
        """Apply one encoding after another."""
        progress = _Counter(version, sum(step.encoding.sent_bytes for step in way), self._on_progress)
        first = way[0].encoding.base_version
        base = None if first is None else self._policies[first]
        blobs, root = () if base is None else base.blobs, None
        for step in way:
            weights = await self._decode(step, base, root, progress)
            root = step.signed.manifest.state_root  # just decoded: what was held since earlier is hashed first
            blobs = _worth_keeping(blobs, step.encoding, num_bytes(weights))
            base = Policy(step.signed, weights, blobs)
        assert base is not None
        return base

    async def _decode(self, step: UpdateStep, base: Policy | None, root: str | None, progress: _Counter) -> Weights:
        """Fetch and decode all parts, several at once. Raises Unreachable, _ClosedError or _WrongBaseError."""
        manifest, encoding = step.signed.manifest, step.encoding
        try:
            index = open_index(await self._blob(encoding.index), encoding, manifest.tensors)
            progress.add(encoding.index.size)
            weights = None if base is None else base.weights
            decoder = await asyncio.to_thread(CheckpointDecoder, manifest, encoding, index, weights, base_root=root)
            download = Download(
                encoding,
                index,
                decoder.feed_chunks,
                self.pool,
                self.parts,
                self.holdings,
                self._clock,
                self._rng,
                self._memory_bytes_max,
                on_bytes=progress.add,
                received=self.received,
            )
            await self._on_disk(download.run())
            return await asyncio.to_thread(decoder.finish)
        except PeerError as error:
            if base is not None and await asyncio.to_thread(root_of, base.weights) != base.signed.manifest.state_root:
                raise _WrongBaseError(base.version) from None
            # All other bytes are the signed ones: no source can do better.
            raise _ClosedError(step, error, for_good=error.code is not ErrorCode.NOT_FOUND) from None

    async def _blob(self, entry: PartEntry) -> bytes:
        """From the disk, or from a source and then on the disk."""
        data = await self._local(self.parts.read, entry)
        if data is None:
            data = await self.pool.fetch_blob(entry)
            await self._local(self.parts.write, entry.digest, data)
        return data

    def _give_up(self, version: int) -> PeerError:
        """Every encoding was published broken, so no source is asked again."""
        reasons = "; ".join(reason for (broken, _), reason in self._bad.items() if broken == version)
        self._broken[version] = f"policy {version} was published broken: {reasons}"
        log.error("%s; waiting for the next one", self._broken[version])
        return PeerError(ErrorCode.CHAIN_BROKEN, self._broken[version])

    async def _stage(self, policy: Policy) -> None:
        self._policies[policy.version] = policy
        self._newest = max(self._newest, policy.version)
        while len(self._policies) > self._policies_kept:
            oldest = next(version for version in self._policies if version not in (self._newest, policy.version))
            del self._policies[oldest]
        kept = {blob.digest for held in self._policies.values() for blob in held.blobs}
        self.holdings.keep_only(kept)
        self.holdings.staged(self._newest)
        await self._local(self.parts.keep_only, kept)
        async with self._changed:
            self._changed.notify_all()

    # The disk

    async def _local(self, call: Callable[..., _T], *arguments: object) -> _T:
        """A blocking call beside the event loop. Raises LocalError."""
        return await self._on_disk(asyncio.to_thread(call, *arguments))

    async def _on_disk(self, work: Awaitable[_T]) -> _T:
        """Raises LocalError for what the disk says."""
        try:
            return await work
        except OSError as error:
            raise LocalError(f"checkpoint folder {self._folder}: {error}; free some space and start again") from None


def _worth_keeping(before: tuple[PartEntry, ...], encoding: Encoding, raw_bytes: int) -> tuple[PartEntry, ...]:
    """What to keep on the disk for a restart: the whole way from nothing, as long as that is not too much."""
    if encoding.base is None:
        return encoding.blobs
    whole = before + encoding.blobs
    return whole if sum(blob.size for blob in whole) <= DISK_SHARE_MAX * raw_bytes else encoding.blobs


class _ClosedError(Exception):
    """An encoding that leads nowhere: its bytes are gone, or they are the signed ones and do not decode to the policy."""

    def __init__(self, step: UpdateStep, error: PeerError, *, for_good: bool) -> None:
        super().__init__(error.detail)
        self.step = step
        self.for_good = for_good


class _WrongBaseError(Exception):
    """A policy in memory does not have its root any more."""

    def __init__(self, policy_version: int) -> None:
        super().__init__(policy_version)
        self.policy_version = policy_version


class _Counter:
    """Adds up the bytes of one download and tells."""

    def __init__(self, policy_version: int, bytes_total: int, tell: Callable[[DownloadProgress], None]) -> None:
        self._policy_version = policy_version
        self._bytes_total = bytes_total
        self._bytes_done = 0
        self._tell = tell
        self.add(0)

    def add(self, num_bytes: int) -> None:
        self._bytes_done += num_bytes
        self._tell(DownloadProgress(self._policy_version, self._bytes_done, self._bytes_total))
