"""The trainer's feed: the batch of step n, and the next one prefetched.

Concurrency: `take` waits for the coordinator, which holds the request open until workers and validators have completed
the batch. While the trainer trains, the feed fetches and prepares the next batch and its bundles. It waits for an
unreachable coordinator without a deadline, with the reason in the log; `close` or cancelling `take` ends every wait.

The trainer keeps copies of the bundles that it may have to train on again after a kill: those of the steps since its checkpoint.
A step is computed again exactly, so the same bundles must be there, and those that were left out must be left out again. If the
coordinator's disk damages one meanwhile, the copy is used. A copy is not synced: after a power loss it may be empty, and the
coordinator's is fetched. So what marks a bundle as left out is not an empty file.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from prime_node import files
from prime_node.files import read_or_begin
from prime_node.patience import ask_until_answered, at_once, cancel_all
from prime_node.ports.clock import Clock
from prime_node.ports.train_samples import Group
from prime_node.ports.transport import BatchPort
from prime_node.training_data.bundles import Bundle, groups_of, open_batch, open_trained_bundle, with_logprobs
from prime_protocol.digest import digest_of, is_digest
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import BatchGroup, NotYet
from prime_protocol.requests import BatchRequest, BundleRequest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import HeldOutFigures

_LEFT_OUT = b"left out\n"
"""Content of the file of a bundle that was left out."""

log = logging.getLogger(__name__)
NO_ANSWER = "the coordinator's answer"


class KeptBundles:
    """Copies in a folder. Several threads may use it, for different bundles."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._step_of: dict[str, int | None] = {path.name: None for path in folder.iterdir() if is_digest(path.name)}
        """Newest step that uses a copy; None for one of an earlier process that no step has asked for."""
        self._is_full = False

    def read(self, digest: str, step: int) -> bytes | None:
        """Return a bundle, empty if it was left out; None if there is no intact copy."""
        if digest not in self._step_of:
            return None
        self._step_of[digest] = step
        data = read_or_begin(self._folder / digest)
        if data == _LEFT_OUT:
            return b""
        if digest_of(data) != digest:
            log.warning("the copy %s is damaged: it is fetched again", self._folder / digest)
            return None
        return data

    def keep(self, digest: str, data: bytes, step: int) -> None:
        """Keep a copy of a bundle; empty `data` marks one that is left out. Without room, only the coordinator has it."""
        try:
            files.replace(self._folder / digest, data or _LEFT_OUT)
        except OSError as error:
            if not self._is_full:
                log.warning("bundles are not kept in %s: %s", self._folder, error)
            self._is_full = True
            return
        self._step_of[digest] = step

    def forget(self, durable_step: int, step: int) -> None:
        """Delete the copies of the steps before `durable_step`, when `step` is trained. Idempotent."""
        for digest, used in list(self._step_of.items()):
            if used is None:  # asked for by no step until now: older than the checkpoint, or of a step still to come
                self._step_of[digest] = step
            elif used < durable_step:
                (self._folder / digest).unlink(missing_ok=True)
                del self._step_of[digest]


FETCHES_MAX = 8
"""Bundles that are fetched at once."""
DAMAGED_FETCHES = 3
"""Fetches of a bundle before its bytes count as damaged where they are stored, and not on their way."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Data of one step, or of a part of it."""

    step: int
    part: int
    digest: str
    """Digest of the signed batch, for the manifest's provenance."""
    groups: tuple[Group, ...]
    num_left_out: int = 0
    """Groups of the signed batch whose data cannot be used (bundles.py)."""
    made: Any = None
    """Result of `Feed.work_ahead`'s function for this batch."""


async def _at_once(check: Callable[[], Any]) -> Any:
    return check()


class Feed:
    """Batches in the order of the steps, one prefetched."""

    def __init__(
        self,
        coordinator: BatchPort,
        run: PinnedRun,
        *,
        clock: Clock,
        wait_seconds: float = 10.0,
        verified: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None,
        kept: bool = False,
        copies: KeptBundles | None = None,
    ) -> None:
        """Set up the feed.

        `wait_seconds`: how long the coordinator may hold a request.
        `verified`: wrapper for signature checks when keys may have changed (broadcast.trust). `kept`: the batches are those of
        published policies, so former coordinator keys may have signed them; nothing is prefetched.
        `copies`: the bundles since the checkpoint; without them, only the coordinator has these.
        """
        self._coordinator = coordinator
        self._run = run
        self._clock = clock
        self._wait_seconds = wait_seconds
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._ahead: dict[tuple[int, int], asyncio.Task[StepBatch]] = {}
        self._verified = verified or _at_once
        self._kept = kept
        self._copies = copies
        self._durable_step = 0
        self._train_ms: int | None = None
        self.held_out: deque[HeldOutFigures] = deque()
        """Held-out figures that the coordinator has not received. Each request carries the oldest."""
        self.waits_for = NO_ANSWER
        """What the coordinator waited for when it was asked last."""
        self._work: Callable[[StepBatch], Any] | None = None

    def work_ahead(self, work: Callable[[StepBatch], Any]) -> None:
        """Run `work` on each batch in a thread as soon as it arrives; its result becomes `StepBatch.made`."""
        self._work = work

    async def take(
        self, step: int, part: int = 0, *, durable_step: int = 0, train_seconds: float | None = None
    ) -> StepBatch:
        """Return batch number `part` of `step`. A repeated call returns the same batch. Raises RemoteError.

        `durable_step`: where the trainer would resume if it were killed now; the coordinator may delete older batches.
        `train_seconds`: duration of the newest finished step, for the coordinator's metrics.
        """
        self._durable_step = durable_step
        if self._copies is not None:
            await asyncio.to_thread(self._copies.forget, durable_step, step)
        self._train_ms = None if train_seconds is None else round(train_seconds * 1_000)
        fetching = self._ahead.pop((step, part), None) or asyncio.create_task(self._fetch(step, part))
        try:
            batch = await fetching
        except asyncio.CancelledError:
            fetching.cancel()
            raise
        spec = self._run.spec
        following = (step, part + 1) if part + 1 < spec.schedule.batches_per_step else (step + 1, 0)
        if not self._kept and following[0] < spec.max_steps and following not in self._ahead:
            self._ahead[following] = asyncio.create_task(self._fetch(*following, previous=batch))
        return batch

    async def report(self) -> None:
        """Send the held-out figures that are left after the run's last batch, with requests for that batch."""
        spec = self._run.spec
        while self.held_out:
            await ask_until_answered(
                lambda: self._ask_for(spec.max_steps - 1, spec.schedule.batches_per_step - 1),
                what="the last batch",
                clock=self._clock,
            )

    async def close(self) -> None:
        """Stop all fetching. Idempotent."""
        tasks = list(self._ahead.values())
        self._ahead.clear()
        await cancel_all(*tasks)

    async def _fetch(self, step: int, part: int, *, previous: StepBatch | None = None) -> StepBatch:
        envelope = await self._batch(step, part)
        batch = await self._verified(lambda: open_batch(envelope, self._run, step=step, part=part, kept=self._kept))
        if previous is not None and batch.previous != (previous.digest if part else None):
            raise RemoteError(ErrorCode.CHAIN_BROKEN, f"batch {part} of step {step} does not follow the one before it")
        bundles = await self._bundles(batch.groups, step)
        groups = tuple(groups_of(batch, bundles, self._run))
        found = StepBatch(step, part, envelope.digest, groups, num_left_out=len(batch.groups) - len(groups))
        return found if self._work is None else replace(found, made=await asyncio.to_thread(self._work, found))

    async def _batch(self, step: int, part: int) -> Envelope:
        self.waits_for = NO_ANSWER
        while True:
            answer = await ask_until_answered(
                lambda: self._ask_for(step, part), what=f"batch {step}", clock=self._clock
            )
            if isinstance(answer, Envelope):
                return answer
            self.waits_for = answer.reason
            await self._clock.sleep(answer.retry_after_s)

    async def _ask_for(self, step: int, part: int) -> Envelope | NotYet:
        request = BatchRequest(
            step=step,
            part=part,
            durable_step=self._durable_step,
            wait_s=self._wait_seconds,
            train_ms=self._train_ms,
            held_out=self.held_out[0] if self.held_out else None,
        )
        answer = await self._coordinator.batch(request)
        if self.held_out and self.held_out[0] is request.held_out:
            self.held_out.popleft()
        return answer

    async def _bundles(self, groups: Iterable[BatchGroup], step: int) -> dict[str, Bundle]:
        """Fetch each bundle once, several concurrently. If one fails, all are cancelled."""
        entries = {group.bundle: group for group in groups}
        work = [partial(self._bundle, digest, entry, step) for digest, entry in entries.items()]
        return dict(zip(entries, await at_once(work, most=len(work)), strict=True))

    async def _bundle(self, digest: str, entry: BatchGroup, step: int) -> Bundle:
        """Fetch a bundle, with the validator's logprobs if it was audited."""
        async with self._fetches:
            parcel = await self._parcel(digest, step)
            bundle = open_trained_bundle(parcel, digest=digest, worker=entry.worker, run=self._run)
            if entry.logprobs is None or bundle.header is None:
                return bundle
            judged = await self._parcel(entry.logprobs, step)
        return cast(
            "Bundle",
            await self._verified(
                lambda: with_logprobs(bundle, judged, digest=digest, logprobs=entry.logprobs or "", run=self._run)
            ),
        )

    async def _parcel(self, digest: str, step: int) -> bytes:
        """Return the bytes of a bundle as they were the first time, also if that was before a restart."""
        if self._copies is None:
            return await self._fetch_parcel(digest)
        if (kept := await asyncio.to_thread(self._copies.read, digest, step)) is not None:
            return kept
        parcel = await self._fetch_parcel(digest)
        await asyncio.to_thread(self._copies.keep, digest, parcel, step)
        return parcel

    async def _fetch_parcel(self, digest: str) -> bytes:
        """Return the bytes that the coordinator has under a digest; none if they are lost or damaged."""
        for _ in range(DAMAGED_FETCHES):
            try:
                return await ask_until_answered(
                    lambda: self._coordinator.bundle(BundleRequest(bundle=digest)),
                    what=f"bundle {digest[:12]}",
                    clock=self._clock,
                )
            except RemoteError as error:
                if error.code is ErrorCode.NOT_FOUND:
                    break
                if error.code is not ErrorCode.DIGEST_MISMATCH:
                    raise
        return b""
