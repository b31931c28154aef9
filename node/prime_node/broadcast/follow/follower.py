"""Follow the head: fetch, verify, decode, stage. For workers, validators and all other followers.

Waiting: `follow` polls the sources and stages the newest policy; `wait_newer` and `weights` wait for it. One policy is
decoded at a time. An unreachable, slow or dishonest source costs time and a log line, never the task. A fault of this
machine, such as a full disk, ends it.

The update path to a policy is the cheapest in bytes from what is held, or from nothing (update_paths.py). A delta is applied to a
shadow copy. Nothing is staged before heads.py has verified its manifest, then (4) every blob's digest, and (5) the digests of
every chunk and tensor and, through them, of the base (CheckpointDecoder).

Self-repair: a held policy that no longer matches its root (a flipped bit in memory) is detected when the next delta is
applied to it, and dropped. An encoding that is deleted or does not decode is excluded. Either way the next cheapest path is
taken. A policy is given up only when every path to it was published broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from prime_node.broadcast.follow.heads import Heads
from prime_node.broadcast.follow.update_paths import UpdatePaths, UpdateStep
from prime_node.broadcast.swarm.download import DownloadPlan, Downloads, NoPeers
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.piece_decoder import Decode
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.files import disk_faults
from prime_node.memory import MachineMemory, raw_bytes, require_room, return_free_memory, until_room
from prime_node.patience import RateLimit, unless
from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_node.traces import of_step, spanned
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import ChunkIndex
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Encoding, Manifest, PartEntry, SignedManifest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights, num_bytes, root_of

log = logging.getLogger(__name__)

HEAD_WAIT_S = 10.0
"""Seconds for which a source that supports long polling may hold a request for the newest policy."""
PAUSE_S_MAX = 15.0
"""Longest pause in seconds between attempts at a policy that no source gives."""
LARGE_BYTES = 2**26
"""Size from which a dropped policy's memory is returned to the system at once. A small one's serves the next."""
DISK_SHARE_MAX = 2.0
"""Bytes kept on disk for one policy, as a share of its weights."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A verified set of weights."""

    signed: SignedManifest
    weights: Weights
    blobs: tuple[PartEntry, ...] = ()
    """Encodings that lead to it from nothing, if worth their room; on disk as long as the policy is held."""

    @property
    def version(self) -> int:
        """Version of the policy."""
        return self.signed.manifest.policy_version


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """Progress of one download. Example: DownloadProgress(policy_version=41, bytes_done=5_000_000, bytes_total=9_000_000)."""

    policy_version: int
    bytes_done: int
    """Verified bytes, from the disk or from a source."""
    bytes_total: int


class Follower:
    """One machine's view of the published policies. `folder` belongs to it alone and survives restarts."""

    def __init__(
        self,
        run: PinnedRun,
        pool: SourcePool,
        folder: Path,
        *,
        clock: Clock,
        poll_s: float = 1.0,
        policies_kept: int = 2,
        policies_bytes_max: int | None = None,
        parts_bytes_max: int = 64 * 2**30,
        on_progress: Callable[[DownloadProgress], None] = lambda _: None,
        rng: random.Random | None = None,
        plan: DownloadPlan | None = None,
        rate: RateLimit | None = None,
        measured: Callable[[], MachineMemory] | None = None,
    ) -> None:
        """Follow what the sources of `pool` publish. `plan` is that of the links to peers; `rate` bounds downloads.

        `policies_bytes_max` bounds the memory of decoded policies; None: what is available when one is decoded, by `measured`.
        Raises LocalError if the folder is unusable.
        """
        self.run = run
        self.have_set = HaveSet()
        """Have-set that peers can fetch from."""
        self.pool = pool
        self._folder = folder
        self._clock = clock
        self._poll_s = poll_s
        self._policies_kept = max(2, policies_kept)  # the newest, and one on request
        self._policies_bytes_max = policies_bytes_max
        self._measured = measured
        self._on_progress = on_progress
        self.download: DownloadProgress | None = None
        """Download in progress, if there is one."""
        self._policies: dict[int, Policy] = {}  # the least recently used first
        self._broken: dict[int, str] = {}
        self._bad: dict[tuple[int, int | None], str] = {}
        """Encodings, by policy and base, whose bytes are the signed ones but do not decode to their policy."""
        self._newest = -1
        self._decoding = asyncio.Lock()
        self._changed = asyncio.Condition()
        self.rate = rate or RateLimit(0.0, clock)
        """Rate of all downloads; its owner may change it."""
        with disk_faults(f"checkpoint folder {folder}"):
            self.parts = PartStore(folder / "parts", bytes_max=parts_bytes_max)
            self._downloads = Downloads(
                pool,
                self.parts,
                self.have_set,
                clock,
                rng or random.Random(),
                plan=plan or NoPeers(),
                rate=self.rate,
            )
            self.heads = Heads(run, pool, folder, on_head=self.have_set.advance_head)
            self.update_paths = UpdatePaths(self.heads, on_disk=self.parts.has)

    # Queries

    @property
    def received(self) -> Mapping[str, int]:
        """Bytes of pieces received so far, by source."""
        return self._downloads.received

    def latest(self) -> Policy | None:
        """Return the newest staged policy, or None."""
        return self._policies.get(self._newest)

    def versions(self) -> tuple[int, ...]:
        """Return the policies available without a download, oldest first."""
        return tuple(sorted(self._policies))

    def manifest_at_hand(self, policy_version: int) -> Envelope | None:
        """Return a verified manifest to serve to peers, or None if it is not held."""
        signed = self.heads.chain.recent(policy_version) or self.update_paths.at_hand(policy_version)
        return None if signed is None else signed.envelope

    async def wait_newer(self, policy_version: int) -> Policy:
        """Wait for a staged policy newer than `policy_version` and return it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newest > policy_version and self._newest in self._policies)
            return self._policies[self._newest]

    async def weights(self, policy_version: int) -> Weights:
        """Return verified weights of one policy, fetched if they are not held.

        It waits as long as it takes (for a policy that is not published yet, for an unreachable source): the caller sets the
        deadline. Raises RemoteError only if the policy's bytes are not what its signed manifest says.
        """
        return (await self.policy(policy_version)).weights

    async def policy(self, policy_version: int) -> Policy:
        """Return what `weights` returns, with the manifest."""
        pause_s = self._poll_s
        while policy_version not in self._policies:
            if policy_version in self._broken:
                raise RemoteError(ErrorCode.CHAIN_BROKEN, self._broken[policy_version])
            try:
                if policy_version > self.heads.newest:
                    await self.heads.look()
                if policy_version <= self.heads.newest:
                    await self._take(await self.heads.manifest(policy_version))
                    continue
            except (RemoteError, Unreachable) as error:
                log.warning("policy %d: %s; trying again", policy_version, error)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            await self._clock.sleep(pause_s)
        policy = self._policies.pop(policy_version)
        self._policies[policy_version] = policy
        return policy

    async def fetch(self, policy_version: int) -> Policy:
        """Return what `policy` returns, in one attempt.

        Raises RemoteError if no source has it or it was published broken, or Unreachable.
        """
        if policy_version not in self._policies:
            await self._take(await self.heads.manifest(policy_version))
        return self._policies[policy_version]

    async def follow(self) -> NoReturn:
        """Keep the newest policy staged until cancelled."""
        with contextlib.closing(self.heads):
            await self._follow()
        raise AssertionError("following does not end")

    async def _follow(self) -> NoReturn:
        started: int | None = None
        pause_s = self._poll_s
        while True:
            asked_s = self._clock.monotonic_s()
            await self.heads.look(wait_s=HEAD_WAIT_S if self._target(started) is None else 0.0)
            started = self._target(started)
            if started is None:
                # A source that held the request has waited already; one that cannot is asked again after a pause.
                pause_s = max(0.0, self._poll_s - (self._clock.monotonic_s() - asked_s))
                await unless(self.heads.hinted(), self._clock.sleep(pause_s))
                continue
            try:
                with spanned("follow", of_step(started - 1), policy_version=started):
                    await self._take(await self.heads.manifest(started))
                started, pause_s = None, self._poll_s
            except (RemoteError, Unreachable) as error:
                log.warning("policy %d: %s; fetching the head again", started, error)
                if isinstance(error, RemoteError):
                    started = None
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    # Download

    def _target(self, started: int | None) -> int | None:
        """Return the version to download next, or None. A download that was begun is finished while it is still useful."""
        head = self.heads.newest
        if started is not None and started > self._newest and head - started < max(1, self.run.spec.async_level):
            return started
        return head if head > self._newest and head not in self._broken else None

    async def _take(self, signed: SignedManifest) -> None:
        """Download, verify, decode and stage one policy by the cheapest path, and by the next cheapest if that fails."""
        async with self._decoding:
            version = signed.manifest.policy_version
            gone: set[tuple[int, int | None]] = set()
            while version not in self._policies:
                try:
                    way = await self.update_paths.find(signed, held=self._policies, closed=gone | self._bad.keys())
                except RemoteError:
                    if any((version, one.base_version) not in self._bad for one in signed.manifest.encodings):
                        raise
                    raise self._give_up(version) from None
                try:
                    await self._stage(await self._walk(way, version))
                except _ClosedError as closed:
                    log.warning("policy %d: %s; trying another update path", version, closed)
                    if closed.for_good:
                        self._bad[closed.step.name] = str(closed)
                    gone.add(closed.step.name)
                except _WrongBaseError as wrong:
                    log.error("policy %d has changed since its verification; it is deleted", wrong.policy_version)
                    self._policies.pop(wrong.policy_version, None)
                finally:
                    self.download = None

    async def _walk(self, way: Sequence[UpdateStep], version: int) -> Policy:
        """Apply one encoding after another."""
        progress = _Counter(version, sum(step.encoding.sent_bytes for step in way), self._progressed)
        first = way[0].encoding.base_version
        base = None if first is None else self._policies[first]
        blobs, root = () if base is None else base.blobs, None
        for step in way:
            weights = await self._decode(step, base, root, progress)
            root = step.signed.manifest.state_root  # just decoded; a policy held since earlier is hashed first
            blobs = _worth_keeping(blobs, step.encoding, num_bytes(weights))
            base = Policy(step.signed, weights, blobs)
        assert base is not None
        return base

    def _progressed(self, progress: DownloadProgress) -> None:
        self.download = progress if progress.bytes_done < progress.bytes_total else None
        self._on_progress(progress)

    async def _decode(self, step: UpdateStep, base: Policy | None, root: str | None, progress: _Counter) -> Weights:
        """Fetch and decode all parts, several at once. Raises Unreachable, _ClosedError or _WrongBaseError."""
        manifest, encoding = step.signed.manifest, step.encoding
        decoders: list[CheckpointDecoder] = []

        async def begin(index: ChunkIndex) -> Decode:
            weights = None if base is None else base.weights
            await until_room(lambda: self._require_room(manifest, base), clock=self._clock)
            made = await asyncio.to_thread(CheckpointDecoder, manifest, encoding, index, weights, base_root=root)
            decoders.append(made)
            return made.feed_chunks

        try:
            with disk_faults(f"checkpoint folder {self._folder}"):
                await self._downloads.fetch(manifest, encoding, begin, on_bytes=progress.add)
            return await asyncio.to_thread(decoders[0].finish)
        except RemoteError as error:
            if base is not None and await asyncio.to_thread(root_of, base.weights) != base.signed.manifest.state_root:
                raise _WrongBaseError(base.version) from None
            # All other bytes are the signed ones: no source can do better.
            raise _ClosedError(step, error, for_good=error.code is not ErrorCode.NOT_FOUND) from None

    def _require_room(self, manifest: Manifest, base: Policy | None) -> None:
        held = {id(policy): policy for policy in (*self._policies.values(), *([] if base is None else [base]))}
        require_room(
            f"policy {manifest.policy_version}",
            raw_bytes(manifest.tensors),
            held_bytes=sum(num_bytes(policy.weights) for policy in held.values()),
            bytes_max=self._policies_bytes_max,
            setting="policies_bytes_max",
            measured=self._measured,
        )

    def _give_up(self, version: int) -> RemoteError:
        """Record that every encoding was published broken, so no source is asked again."""
        reasons = "; ".join(reason for (broken, _), reason in self._bad.items() if broken == version)
        self._broken[version] = f"policy {version} was published damaged: {reasons}"
        log.error("%s; waiting for the next policy", self._broken[version])
        return RemoteError(ErrorCode.CHAIN_BROKEN, self._broken[version])

    async def _stage(self, policy: Policy) -> None:
        self._policies[policy.version] = policy
        self._newest = max(self._newest, policy.version)
        while len(self._policies) > self._policies_kept:
            oldest = next(version for version in self._policies if version not in (self._newest, policy.version))
            del self._policies[oldest]
            if num_bytes(policy.weights) >= LARGE_BYTES:
                await asyncio.to_thread(return_free_memory)
        kept = {blob.digest for held in self._policies.values() for blob in held.blobs}
        self.have_set.keep_only(kept)
        with disk_faults(f"checkpoint folder {self._folder}"):
            await asyncio.to_thread(self.parts.keep_only, kept)
        async with self._changed:
            self._changed.notify_all()


def _worth_keeping(before: tuple[PartEntry, ...], encoding: Encoding, raw_bytes: int) -> tuple[PartEntry, ...]:
    """Return the encodings to keep on disk for a restart: the whole path from nothing, unless it is too large."""
    if encoding.base is None:
        return encoding.blobs
    whole = before + encoding.blobs
    return whole if sum(blob.size for blob in whole) <= DISK_SHARE_MAX * raw_bytes else encoding.blobs


class _ClosedError(Exception):
    """An encoding that cannot be used: its bytes are missing, or they are the signed ones and do not decode to the policy."""

    def __init__(self, step: UpdateStep, error: RemoteError, *, for_good: bool) -> None:
        super().__init__(error.detail)
        self.step = step
        self.for_good = for_good


class _WrongBaseError(Exception):
    """A policy in memory that no longer matches its root."""

    def __init__(self, policy_version: int) -> None:
        super().__init__(policy_version)
        self.policy_version = policy_version


class _Counter:
    """Counter of one download's bytes that reports its progress."""

    def __init__(self, policy_version: int, bytes_total: int, tell: Callable[[DownloadProgress], None]) -> None:
        self._policy_version = policy_version
        self._bytes_total = bytes_total
        self._bytes_done = 0
        self._tell = tell
        self.add(0)

    def add(self, num_bytes: int) -> None:
        self._bytes_done += num_bytes
        self._tell(DownloadProgress(self._policy_version, self._bytes_done, self._bytes_total))
