"""Keep all encodings of the newest policies and of the update paths to them, without decoding any.

A seeder lends bandwidth and disk to a run.

Waiting: `follow` waits for a new head and downloads it as a follower does, from all sources at once, verified chunk by chunk.
Peers fetch from it meanwhile. An unreachable source costs time but never ends the task; a fault of this machine ends it.
"""

from __future__ import annotations

import contextlib
import logging
import random
from pathlib import Path
from typing import NoReturn

from prime_node.broadcast.follow.heads import Heads
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.follow.update_paths import UpdatePaths, UpdateStep
from prime_node.broadcast.seed.seed_store import SeedStore
from prime_node.broadcast.swarm.download import PIECES_BYTES_MAX, DownloadPlan, Downloads, NoPeers
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.piece_decoder import Decode
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.files import disk_faults
from prime_node.patience import RateLimit, first_of, unless
from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_protocol.chunk_index import ChunkIndex
from prime_protocol.envelope import Envelope
from prime_protocol.errors import RemoteError
from prime_protocol.manifest import Encoding, Manifest, SignedManifest
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

HEAD_WAIT_S = 10.0
POLL_S = 1.0
PAUSE_S = 5.0
"""Pause in seconds after a policy that could not be fetched."""
CHECK_S = 86_400.0
"""Seconds between two comparisons of all stored bytes with their digests: peers that get wrong ones avoid this seeder."""


class Seeder:
    """A follower that stores and serves encodings.

    `folder` belongs to this seeder alone and survives restarts. Raises LocalError if it is unusable.
    """

    def __init__(
        self,
        run: PinnedRun,
        pool: SourcePool,
        folder: Path,
        *,
        clock: Clock,
        rng: random.Random,
        parts_bytes_max: int,
        memory_bytes_max: int = PIECES_BYTES_MAX,
        plan: DownloadPlan | None = None,
        rate: RateLimit | None = None,
        trust: Trust | None = None,
    ) -> None:
        """Keep what the sources of `pool` publish. `plan` is that of the links to peers; `rate` bounds downloads.

        `trust` is followed too, so that new key rings count. Without it, the keys of `run` stay as they are.
        """
        self.have_set = HaveSet()
        self._run, self._trust = run, trust
        self._clock = clock
        self._folder = folder
        with disk_faults(f"folder {folder}"):
            self.parts = PartStore(folder / "parts", bytes_max=parts_bytes_max)
            self._downloads = Downloads(
                pool, self.parts, self.have_set, clock, rng, memory_bytes_max, plan or NoPeers(), rate
            )
            self.heads = Heads(run, pool, folder, on_head=self.have_set.advance_head)
            self._update_paths = UpdatePaths(self.heads, on_disk=self.parts.has)
            self.seed_store = SeedStore(self.parts, self.have_set, folder / "manifests")

    async def follow(self) -> NoReturn:
        """Follow the head until cancelled."""
        with disk_faults(f"folder {self._folder}"):
            await self.seed_store.restore(self._run)
        with contextlib.closing(self.heads):
            await first_of(self._follow(), *([] if self._trust is None else [self._trust.follow()]))
        raise AssertionError("following does not end")

    async def _follow(self) -> NoReturn:
        checked_s = self._clock.monotonic_s()
        while True:
            asked_s = self._clock.monotonic_s()
            if asked_s >= checked_s + CHECK_S:
                with disk_faults(f"folder {self._folder}"):
                    await self.seed_store.check()
                checked_s = asked_s
            self.seed_store.forget_lost()
            await self.heads.look(wait_s=HEAD_WAIT_S if self.heads.newest <= self.seed_store.newest else 0.0)
            if self.heads.newest <= self.seed_store.newest:
                pause_s = max(0.0, POLL_S - (self._clock.monotonic_s() - asked_s))
                await unless(self.heads.hinted(), self._clock.sleep(pause_s))
                continue
            try:
                await self.take(self.heads.newest)
            except (RemoteError, Unreachable) as error:
                log.warning("policy %d: %s; fetching the head again", self.heads.newest, error)
                await self._clock.sleep(PAUSE_S)

    def manifest_at_hand(self, policy_version: int) -> Envelope | None:
        """Return a verified manifest to serve to peers, or None if it is not held."""
        signed = self.heads.chain.recent(policy_version)
        return self.seed_store.manifest_at_hand(policy_version) if signed is None else signed.envelope

    async def take(self, policy_version: int) -> None:
        """Download the update path to a policy from nothing, if there is one, and every encoding of the policy itself.

        Raises RemoteError, Unreachable or LocalError.
        """
        signed = await self.heads.manifest(policy_version)
        with disk_faults(f"folder {self._folder}"):
            await self._take_path(signed)
            for encoding in sorted(signed.manifest.encodings, key=lambda one: one.sent_bytes):
                await self._download(signed.manifest, encoding)
            self.seed_store.put(signed)
        log.info("policy %d is stored, %d encodings", policy_version, len(signed.manifest.encodings))

    async def _take_path(self, signed: SignedManifest) -> None:
        """Download what a newcomer needs before the policy's own encodings, as far as any source still has it."""
        gone: set[tuple[int, int | None]] = set()
        try:
            while missing := [step for step in await self._way(signed, gone) if not self.seed_store.has(*step.name)]:
                try:
                    await self._download(missing[0].signed.manifest, missing[0].encoding)
                except RemoteError:
                    gone.add(missing[0].name)
                else:
                    self.seed_store.add(missing[0].signed, missing[0].encoding)
        except RemoteError as error:
            log.info("policy %d: new peers cannot start from this seeder: %s", signed.manifest.policy_version, error)

    async def _way(self, signed: SignedManifest, gone: set[tuple[int, int | None]]) -> list[UpdateStep]:
        """Return the steps before the policy's own."""
        return (await self._update_paths.find(signed, held=(), closed=gone))[:-1]

    async def _download(self, manifest: Manifest, encoding: Encoding) -> None:
        async def begin(index: ChunkIndex) -> Decode:
            return lambda chunks, data: None

        await self._downloads.fetch(manifest, encoding, begin)
