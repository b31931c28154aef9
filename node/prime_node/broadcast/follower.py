"""Follows the head: fetch, verify, decode, stage. For workers, validators and everybody else.

Who waits for whom: `follow` polls the sources and stages the newest policy; `wait_newer` and `weights` wait
for it. One policy is decoded at a time. A source that is away, slow or lying costs time and a line in the
log, never the task; what ends it is a fault of this machine, such as a full disk.

Nothing is staged before heads.py has verified its manifest, and then: (4) every part's digest; (5) every
chunk's and every tensor's, and with them the base's (CheckpointDecoder). Only the newest policy matters:
intermediate ones are linked, not downloaded, unless `weights` asks for one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from prime_node.broadcast.heads import Heads
from prime_node.broadcast.part_store import PartStore
from prime_node.broadcast.sources import SourcePool
from prime_node.ports.clock import Clock
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.errors import ErrorCode, LocalError, PeerError
from prime_protocol.manifest import SignedManifest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

_T = TypeVar("_T")
HEAD_WAIT_S = 10.0
"""A source that can may hold the question for the newest policy this long."""
PAUSE_S_MAX = 15.0
"""Between attempts at a policy that nobody gives."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A verified set of weights."""

    signed: SignedManifest
    weights: Weights

    @property
    def version(self) -> int:
        return self.signed.manifest.policy_version


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one download. Example: Progress(policy_version=41, bytes_done=5_000_000, bytes_total=9_000_000)."""

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
        parts_at_once: int = 4,
        parts_bytes_max: int = 64 * 2**30,
        on_progress: Callable[[Progress], None] = lambda _: None,
        rng: random.Random | None = None,
    ) -> None:
        """`sources` are (name, source) pairs, the preferred one first. Raises LocalError if the folder is
        unusable."""
        self.run = run
        self._pool = SourcePool(sources, clock=clock, rng=rng or random.Random())
        self._folder = folder
        self._clock = clock
        self._poll_s = poll_s
        self._policies_kept = max(2, policies_kept)  # the newest, and one that somebody asks for
        self._parts_at_once = parts_at_once
        self._on_progress = on_progress
        self._policies: dict[int, Policy] = {}  # the least recently used first
        self._broken: dict[int, str] = {}
        self._newest = -1
        self._decoding = asyncio.Lock()
        self._changed = asyncio.Condition()
        try:
            self._parts = PartStore(folder / "parts", bytes_max=parts_bytes_max)
            self._heads = Heads(run, self._pool, folder)
        except OSError as error:
            raise LocalError(f"checkpoint folder {folder}: {error}") from None

    # What others ask

    def latest(self) -> Policy | None:
        """The newest staged policy."""
        return self._policies.get(self._newest)

    def versions(self) -> tuple[int, ...]:
        """Policies at hand without a download, oldest first."""
        return tuple(sorted(self._policies))

    async def wait_newer(self, policy_version: int) -> Policy:
        """The newest staged policy, as soon as it is newer than `policy_version`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newest > policy_version)
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
                if policy_version > self._heads.newest:
                    await self._heads.look()
                if policy_version <= self._heads.newest:
                    await self._take(await self._heads.manifest(policy_version))
                    continue
            except (PeerError, Unreachable) as error:
                log.warning("policy %d: %s; trying again", policy_version, error)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            await self._clock.sleep(pause_s)
        policy = self._policies.pop(policy_version)
        self._policies[policy_version] = policy
        return policy

    async def follow(self) -> NoReturn:
        """Keep the newest policy staged, for ever. Cancel it to stop."""
        started: int | None = None
        pause_s = self._poll_s
        while True:
            asked_s = self._clock.monotonic_s()
            await self._heads.look(wait_s=HEAD_WAIT_S if self._target(started) is None else 0.0)
            started = self._target(started)
            if started is None:
                # A source that held the question has waited for us; one that cannot is asked again after a pause.
                await self._clock.sleep(max(0.0, self._poll_s - (self._clock.monotonic_s() - asked_s)))
                continue
            try:
                await self._take(await self._heads.manifest(started))
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
        head = self._heads.newest
        if started is not None and started > self._newest and head - started < max(1, self.run.spec.async_level):
            return started
        return head if head > self._newest and head not in self._broken else None

    async def _take(self, signed: SignedManifest) -> None:
        """Download, verify, decode and stage one policy, and what it is a delta of."""
        async with self._decoding:
            version = signed.manifest.policy_version
            if version in self._policies:
                return
            path = await self._path_to(signed)
            total = sum(step.manifest.sent_bytes for step in path)
            progress = _Counter(version, total, self._on_progress)
            base = self._base_of(path[0])
            for step in path:
                base = Policy(step, await self._decode(step, base, progress))
            assert base is not None
            await self._stage(base, path)

    async def _path_to(self, signed: SignedManifest) -> list[SignedManifest]:
        """The publications to apply in turn: from one that needs nothing but what is held, to `signed`."""
        path = [signed]
        while (needed := path[-1].manifest.base) is not None and self._base_of(path[-1]) is None:
            base = await self._heads.manifest(needed.policy_version)
            if base.manifest.state_root != needed.state_root:
                raise PeerError(
                    ErrorCode.CHAIN_BROKEN,
                    f"manifest {signed.manifest.policy_version}: its base has another root",
                )
            path.append(base)
        return path[::-1]

    def _base_of(self, signed: SignedManifest) -> Policy | None:
        """The held policy that a delta is applied to."""
        needed = signed.manifest.base
        held = None if needed is None else self._policies.get(needed.policy_version)
        return held if held and needed and held.signed.manifest.state_root == needed.state_root else None

    async def _decode(self, signed: SignedManifest, base: Policy | None, progress: _Counter) -> Weights:
        """Fetch and decode all parts, several at once. Raises PeerError or Unreachable."""
        base_weights = None if base is None or signed.manifest.base is None else base.weights
        decoder = await asyncio.to_thread(CheckpointDecoder, signed.manifest, base_weights)
        numbers = iter(range(len(signed.manifest.parts)))
        fetchers = [
            asyncio.create_task(self._fetch_parts(signed, numbers, decoder, progress))
            for _ in range(self._parts_at_once)
        ]
        try:
            await asyncio.gather(*fetchers)
        finally:
            for fetcher in fetchers:
                fetcher.cancel()
            await asyncio.gather(*fetchers, return_exceptions=True)
        try:
            return await asyncio.to_thread(decoder.finish)
        except PeerError as error:
            raise self._give_up(signed, error) from None

    async def _fetch_parts(
        self, signed: SignedManifest, numbers: Iterator[int], decoder: CheckpointDecoder, progress: _Counter
    ) -> None:
        """One fetcher: takes the next part that nobody has taken."""
        for number in numbers:
            entry = signed.manifest.parts[number]
            data = await self._local(self._parts.read, entry)
            if data is None:
                data = await self._pool.fetch_part(entry)
                await self._local(self._parts.write, entry.digest, data)
            try:
                await asyncio.to_thread(decoder.feed_part, number, data)
            except PeerError as error:
                raise self._give_up(signed, error) from None
            progress.add(entry.size)

    def _give_up(self, signed: SignedManifest, error: PeerError) -> PeerError:
        """The bytes are the signed ones and still do not decode: no source can do better, so none is asked
        again."""
        version = signed.manifest.policy_version
        self._broken[version] = f"policy {version} was published broken: {error.detail}"
        log.error("%s; waiting for the next one", self._broken[version])
        return PeerError(error.code, self._broken[version])

    async def _stage(self, policy: Policy, path: list[SignedManifest]) -> None:
        self._policies[policy.version] = policy
        self._newest = max(self._newest, policy.version)
        while len(self._policies) > self._policies_kept:
            oldest = next(version for version in self._policies if version not in (self._newest, policy.version))
            del self._policies[oldest]
        kept = [held.signed for held in self._policies.values()] + path
        await self._local(self._parts.keep_only, {part.digest for signed in kept for part in signed.manifest.parts})
        async with self._changed:
            self._changed.notify_all()

    # The disk

    async def _local(self, call: Callable[..., _T], *arguments: object) -> _T:
        """A blocking call beside the event loop. Raises LocalError."""
        try:
            return await asyncio.to_thread(call, *arguments)
        except OSError as error:
            raise LocalError(f"checkpoint folder {self._folder}: {error}; free some space and start again") from None


class _Counter:
    """Adds up the bytes of one download and tells."""

    def __init__(self, policy_version: int, bytes_total: int, tell: Callable[[Progress], None]) -> None:
        self._policy_version = policy_version
        self._bytes_total = bytes_total
        self._bytes_done = 0
        self._tell = tell
        self.add(0)

    def add(self, num_bytes: int) -> None:
        self._bytes_done += num_bytes
        self._tell(Progress(self._policy_version, self._bytes_done, self._bytes_total))
