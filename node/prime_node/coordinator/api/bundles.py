"""Bytes that validators and the trainer exchange, and auditors read later: uploaded bundles, and validators' logprobs of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from prime_node.coordinator.agreement import Agreement
from prime_node.coordinator.api.requests import Caller, RequestGate, require_role
from prime_node.coordinator.check_queue import CheckQueue
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state.records import PendingBundle
from prime_node.patience import at_once
from prime_node.ports.blobs import Blobs, DamagedBlob
from prime_node.ports.clock import Clock
from prime_protocol.copies import share_text
from prime_protocol.digest import digest_of
from prime_protocol.envelope import parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import Limits
from prime_protocol.parcel import LogprobsHeader, open_logprobs, open_parcel
from prime_protocol.requests import BundleRequest, CheckResultRequest
from prime_protocol.rollout import RolloutHeader, Rollouts, parse_body
from prime_protocol.run_spec import PinnedRun, RunSpec

log = logging.getLogger(__name__)

LOGPROBS_MAX = 4
"""Different logprobs of one bundle that are stored: a validator that starts again may compute others."""
READS_MAX = 16
"""Stored bundles that one check reads at once. Each may take rollout_bytes_max bytes of memory."""


@dataclass(slots=True)
class BundleStorage:
    """Uploaded bundles and their judged logprobs."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    gate: RequestGate
    checks: CheckQueue
    agreement: Agreement
    bundles: Blobs
    archived: Blobs
    _logprobs: dict[str, set[str]] = field(default_factory=dict)
    """Digests of the logprobs that were stored for each bundle that waits for a verdict."""
    _used: Counter[str] = field(default_factory=Counter)
    """Digests that requests store or name at the moment."""
    _spared: set[str] | None = None
    """Digests that were used since a deletion of orphans began; None: there is none."""
    _deleting: str = ""
    """Orphan that is being deleted."""

    async def read(self, signer: str, request: BundleRequest) -> bytes:
        """Return the bytes of any bundle to a validator or the trainer, and of one that was trained on to an auditor."""
        keys = self.run.keys.current
        bundles = self.bundles if signer in (*keys.validator, *keys.trainer) else self.archived
        try:
            return await bundles.get(request.bundle)
        except KeyError:
            raise RemoteError(
                ErrorCode.NOT_FOUND, f"no bundle {request.bundle[:12]}; it may have been deleted"
            ) from None
        except DamagedBlob as error:
            log.error("%s", error)
            raise RemoteError(
                ErrorCode.DIGEST_MISMATCH, f"the bytes of bundle {request.bundle[:12]} are damaged"
            ) from error

    @contextmanager
    def used(self, digest: str) -> Iterator[None]:
        """Keep these bytes from being deleted as an orphan until the state names them. Raise RemoteError if they are already."""
        if digest == self._deleting:
            raise RemoteError(ErrorCode.UNAVAILABLE, "a copy of these bytes is being deleted", retry_after_s=1.0)
        self._used[digest] += 1
        if self._spared is not None:
            self._spared.add(digest)
        try:
            yield
        finally:
            self._used[digest] -= 1
            if not self._used[digest]:
                del self._used[digest]

    async def delete_orphans(self, *, before_ms: int, is_start: bool) -> None:
        """Delete unreferenced bytes: of uploads that were not taken, and of interrupted deletions. Raise OSError or RemoteError.

        Keep those stored at `before_ms` or later: their lease may last, and their upload may be on its way through another
        process. Keep those of events that a crash would undo; a start has none, and nothing writes events yet. One coordinator
        runs one deletion at a time.
        """
        state, num_deleted = self.decisions.state, 0
        spared = self._spared = set(self._used)
        kept = {*state.evidence, *state.bundles, *state.step_bundles(), *chain.from_iterable(self._logprobs.values())}
        try:
            orphans = [found async for found in self.bundles.digests(before_ms=before_ms) if found not in kept]
            if not is_start:
                await self.decisions.synced()
            for digest in orphans:
                if not self.decisions.may_answer():  # the next leader may need it
                    break
                if digest not in spared:
                    self._deleting = digest
                    await self.bundles.delete(digest)
                    num_deleted += 1
        finally:
            self._spared, self._deleting = None, ""
        if num_deleted:
            log.info("deleted %d unreferenced bundles", num_deleted)

    async def damaged(self, digests: Iterable[str]) -> set[str]:
        """Return those whose stored bytes are lost or have another digest. Reads run at once: one of S3 takes a round trip."""
        asked = list(digests)
        are_intact = await at_once([partial(self._is_intact, digest) for digest in asked], most=READS_MAX)
        return {digest for digest, is_intact in zip(asked, are_intact, strict=True) if not is_intact}

    async def _is_intact(self, digest: str) -> bool:
        try:
            data = await self.bundles.get(digest)
        except (KeyError, DamagedBlob):
            return False
        return await asyncio.to_thread(digest_of, data) == digest

    async def share_text(self, bundle: str, other: str) -> bool | None:
        """Return whether one of two bundles has text of the other for another slot. None if either is lost or damaged."""
        try:
            found = {digest: await self.bundles.get(digest) for digest in (bundle, other)}
        except (KeyError, DamagedBlob):
            return None
        return await asyncio.to_thread(_share_text, found, self.run.spec)

    async def put_logprobs(self, parcel: bytes, *, address: str) -> dict[str, str]:
        """Store a validator's own logprobs of a bundle that it is about to accept. Idempotent; return its digest."""
        with self.gate.blame(address, self.clock.monotonic_s()):
            opened = open_parcel(parcel, body_bytes_max=self.run.spec.limits.rollout_bytes_max)
            signer = opened.envelope.sole_signer()
            require_role(signer, Caller.VALIDATOR, run=self.run, state=self.decisions.state)
            header, _ = open_logprobs(
                parcel,
                run=self.run.digest,
                keys=self.run.keys,
                bytes_max=self.run.spec.limits.rollout_bytes_max,
            )
        require_holder(self.checks, signer, header.bundle)
        digest = digest_of(parcel)
        if header.bundle in self.agreement.looks:  # another validator's are stored already
            return {"digest": digest}
        self._require_few(header, digest)
        with self.used(digest):
            return {"digest": await self.bundles.put(parcel, digest=digest)}

    def _require_few(self, header: LogprobsHeader, digest: str) -> None:
        """Check that logprobs fit their bundle, and that few were stored for it: nothing deletes those that no verdict names.

        Raise RemoteError.
        """
        if (pending := self.decisions.state.bundles.get(header.bundle)) is None:
            raise RemoteError(ErrorCode.NOT_FOUND, f"bundle {header.bundle[:12]} waits for no verdict")
        most = tokens_max(pending, self.run.spec)
        if header.num_tokens > most:
            raise RemoteError(ErrorCode.WRONG_TYPE, f"a bundle of this lease has at most {most} completion tokens")
        stored = self._logprobs.setdefault(header.bundle, set())
        if digest not in stored and len(stored) >= LOGPROBS_MAX:
            raise RemoteError(ErrorCode.TOO_LARGE, f"{LOGPROBS_MAX} other logprobs of this bundle are stored already")
        stored.add(digest)
        for settled in [bundle for bundle in self._logprobs if bundle not in self.decisions.state.bundles]:
            del self._logprobs[settled]

    async def require_logprobs(self, pending: PendingBundle, signer: str, request: CheckResultRequest) -> None:
        """Check the logprobs of a verdict, so that the trainer gets nothing that it would stop at. Raise RemoteError."""
        spec = self.run.spec
        if request.logprobs is None:
            is_trained = request.verdict.accepted and not self.decisions.state.is_evaluation(pending.lease.slots)
            if spec.checks.logprobs_judged and pending.audited and is_trained:
                raise RemoteError(
                    ErrorCode.WRONG_TYPE,
                    (
                        "this run trains on validators' logprobs, and the verdict on this audited bundle has none; update "
                        "the validator"
                    ),
                )
            return
        if not request.verdict.accepted:
            raise RemoteError(ErrorCode.WRONG_TYPE, "only an accepted bundle may have logprobs")
        try:
            with self.used(request.logprobs):
                parcel = await self.bundles.get(request.logprobs)
        except (KeyError, DamagedBlob):
            raise RemoteError(
                ErrorCode.NOT_FOUND,
                f"the coordinator does not have logprobs {request.logprobs[:12]}; upload them first",
            ) from None
        open_logprobs(
            parcel,
            run=self.run.digest,
            keys=self.run.keys,
            bytes_max=spec.limits.rollout_bytes_max,
            bundle=request.bundle,
            num_tokens=request.num_tokens,
        )
        if open_parcel(parcel, body_bytes_max=spec.limits.rollout_bytes_max).envelope.sole_signer() != signer:
            raise RemoteError(
                ErrorCode.WRONG_TYPE, f"logprobs {request.logprobs[:12]} were uploaded by another validator"
            )
        # A restart forgets it, and the verdict may wait for a second validator.
        self._logprobs.setdefault(request.bundle, set()).add(request.logprobs)


def _share_text(found: Mapping[str, bytes], spec: RunSpec) -> bool | None:
    if any(digest_of(parcel) != digest for digest, parcel in found.items()):
        return None
    try:
        first, second = (_rollouts_in(parcel, spec.limits) for parcel in found.values())
    except RemoteError:  # a validator has called it well-formed
        return False
    return share_text(first, second, spec.sampling)


def _rollouts_in(parcel: bytes, bounds: Limits) -> Rollouts:
    """Return the rollouts of a stored bundle, whose signature was verified when it arrived. Raise RemoteError."""
    opened = open_parcel(parcel, body_bytes_max=bounds.rollout_bytes_max)
    header = parse_json(opened.envelope.payload, RolloutHeader)
    return parse_body(header, opened.body, bounds)


def tokens_max(pending: PendingBundle, spec: RunSpec) -> int:
    """Return the most completion tokens that a bundle can have."""
    return pending.num_rollouts * spec.turns_max * spec.sampling.completion_tokens_max


def require_holder(checks: CheckQueue, signer: str, bundle: str) -> None:
    """Raise RemoteError(NOT_FOUND) unless the bundle was handed to this validator, and to no other one since."""
    if not checks.is_held_by(bundle, signer):
        detail = (
            f"bundle {bundle[:12]} is not assigned to this validator: it never was, or another validator has it now"
        )
        raise RemoteError(ErrorCode.NOT_FOUND, detail)
