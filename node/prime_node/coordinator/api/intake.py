"""Intake of rollouts: the checks of an uploaded bundle.

    (1) framing and size                                  MALFORMED, TOO_LARGE, ...
    (2) the signer takes part and is not banned           UNKNOWN_WORKER, BANNED
    (3) signature over the header's raw bytes             WRONG_PAYLOAD_TYPE, BAD_SIGNATURE
    (4) the header's schema, run, signer and sizes        UNKNOWN_FIELD, WRONG_TYPE, WRONG_RUN, TOO_LARGE
    (5) its lease (`decide_upload`)                       LEASE_UNKNOWN, LEASE_FOREIGN, verdict DUPLICATE, EQUIVOCATION
                                                          or LEASE_EXPIRED
    (6) its step                                          verdict STALE or FUTURE
        its step, policy and number of rollouts are the lease's
                                                          WRONG_TYPE
    (7) sizes that the lease can possibly need            TOO_LARGE, DECOMPRESSED_TOO_LARGE
    (8) the body is the one that was signed               DIGEST_MISMATCH
    (9) the digest of the lease in the header             WRONG_TYPE

A new bundle counts against its worker's rate (TOO_MANY_REQUESTS), and is a sign of life. A repeated bundle, or a header without
its body, has a rate of its own, because anyone who has recorded it can send it again. None is charged if the worker's
announcement was (requests.py).

First the bytes are made durable, then the event, then the answer is sent. So a worker that got an answer may delete the bundle.
One that got none sends it again: the same bundle gets the same answer. The body is not opened here. A validator judges its
content; its verdict on a body that cannot be read is MALFORMED.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from prime_node.carrier import carrier
from prime_node.coordinator.api.bundles import BundleStorage
from prime_node.coordinator.api.direct_uploads import DirectUploads, lease_bytes_max
from prime_node.coordinator.api.leasing import ENVIRONMENT_RETRY_S
from prime_node.coordinator.api.receipts import ReceiptLists, verdict_of
from prime_node.coordinator.api.requests import Caller, RequestGate, require_role, wrong_run
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.calibrated_pairs import CalibratedPairs
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.dossiers import contradiction_name
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state import audits
from prime_node.coordinator.state.events import BundleArrived, BundleContradicted, BundleTurnedAway
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord, State
from prime_node.ports.blobs import DamagedBlob
from prime_node.ports.clock import Clock
from prime_node.ports.documents import Documents
from prime_node.ports.metrics import Metrics
from prime_node.ports.writer_link import HeldParcel
from prime_node.traces import of_lease, spanned
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, Signature, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.parcel import Parcel, open_parcel
from prime_protocol.replies import UploadReply
from prime_protocol.rollout import RolloutHeader
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason, Verdict

log = logging.getLogger(__name__)

AGAIN = "again "
"""Prefix of the bucket name for repeated uploads and headers without bodies, from the worker or anyone who has recorded them."""
_ENDED: dict[LeaseEnd | None, str] = {
    LeaseEnd.RETURNED: "was handed back",
    LeaseEnd.CANCELLED: "was handed back",
    LeaseEnd.OVERTAKEN: "ended: another worker was leased the same groups and was faster",
}
ELSEWHERE_RETRY_S = 5.0
"""Time after which a worker may send a bundle again that its gateway stored where the coordinator cannot read it."""
ANOTHER_UPLOADED = Verdict.refuse(RejectReason.DUPLICATE, "another bundle was uploaded for this lease")


@carrier(frozen=True, slots=True)
class AlreadyAnswered:
    """Outcome: nothing new to record. The bundle was uploaded before, or the lease's one receipt is another bundle's."""

    verdict: Verdict | None
    """Its verdict; None while it is pending."""


UploadOutcome = AlreadyAnswered | BundleArrived | BundleTurnedAway | BundleContradicted
"""Outcome of an upload: no change, or the event that records the bundle."""


def decide_upload(
    state: State, header: RolloutHeader, lease: LeaseRecord, *, bundle: str, num_bytes: int
) -> UploadOutcome:
    """Return the outcome of a bundle for a lease. Raise RemoteError."""
    if lease.worker != header.worker:
        raise RemoteError(ErrorCode.LEASE_FOREIGN, "this lease belongs to another worker")
    if lease.bundle == bundle:
        return AlreadyAnswered(verdict_of_lease(state, lease))
    if lease.bundle is not None and lease.reason is None:  # accepted, or still to be judged
        return BundleContradicted(lease.lease_id, lease.worker, bundle)
    if lease.bundle is not None:
        return AlreadyAnswered(ANOTHER_UPLOADED)
    num_rollouts = len(lease.slots) * state.rules.rollouts_per_group
    reason, detail = _fault(state, header, lease)
    if reason is not None:
        return BundleTurnedAway(bundle, lease.lease_id, lease.worker, num_rollouts, reason, detail)
    claimed = (header.step, header.policy_version, header.policy_digest, header.num_rollouts)
    if claimed != (lease.step, lease.policy_version, lease.policy_digest, num_rollouts):
        detail = "the header names another step, policy or number of rollouts than its lease"
        raise RemoteError(ErrorCode.WRONG_TYPE, detail)
    if len(state.workers[lease.worker].pending) >= state.rules.bundles_pending_per_worker_max:
        raise RemoteError(
            ErrorCode.TOO_MANY_REQUESTS,
            "your earlier bundles still wait for a validator; try again later",
            retry_after_s=2.0,
        )
    return BundleArrived(bundle, lease.lease_id, lease.worker, num_rollouts, num_bytes)


def verdict_of_lease(state: State, lease: LeaseRecord) -> Verdict | None:
    """Return the verdict on the bundle of a lease; None while it is pending."""
    if lease.bundle in state.bundles:
        return None
    return Verdict.accept() if lease.reason is None else Verdict.refuse(lease.reason, lease.detail)


def _fault(state: State, header: RolloutHeader, lease: LeaseRecord) -> tuple[RejectReason | None, str]:
    fault = state.rules.admission.check(header.step, header.policy_version, current_step=state.current_step)
    if fault is not None and not state.is_evaluation(lease.slots):
        detail = (
            f"the bundle is for step {header.step} by policy {header.policy_version}, and step {state.current_step} "
            "is being trained"
        )
        return RejectReason(fault.value), detail
    if lease.end is LeaseEnd.LAPSED and state.workers[lease.worker].released:
        return (
            RejectReason.LEASE_EXPIRED,
            "the lease expired, and the run is ending: the tokens in escrow are credited already",
        )
    if not state.is_redeemable(lease):
        return (
            RejectReason.LEASE_EXPIRED,
            f"the lease {_ENDED.get(lease.end, 'ended, and its groups were leased to others')}",
        )
    return None, ""


@dataclass(slots=True)
class BundleIntake:
    """Intake of the bundles that workers upload."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    gate: RequestGate
    assigner: Assigner
    pairs: CalibratedPairs
    presence: Presence
    receipts: ReceiptLists
    storage: BundleStorage
    evidence: Documents
    """The operator's folder, for headers that contradict each other."""
    metrics: Metrics
    direct: DirectUploads

    async def upload(self, parcel: bytes, *, address: str, paid_by: str = "") -> UploadReply:
        """Accept one bundle. `paid_by` is the key whose rate is charged already. Raise RemoteError."""
        self.metrics.add("prime_upload_bytes_total", len(parcel))
        with self.gate.blame(address, self.clock.monotonic_s()):
            opened = open_parcel(parcel, body_bytes_max=self.run.spec.limits.rollout_bytes_max)  # (1)
            header = read_header(opened.envelope, run=self.run, state=self.decisions.state)  # (2) to (4)
        if opened.body or not header.body_bytes:
            return await self._take_whole(parcel, opened, header, paid_by=paid_by)
        self._require_wanted(header)
        if paid_by != header.worker:  # anyone who has recorded the header can send it
            self.gate.limiter.by_key.require(header.worker, self.clock.monotonic_s())
            # Each asks the bucket twice, also for a body that is missing.
            self._charge(AGAIN + header.worker, is_charged=False)
        async with self.direct.body_of(header) as body:
            self.metrics.add("prime_upload_bytes_total", len(body))
            whole = parcel + body
            opened = open_parcel(whole, body_bytes_max=self.run.spec.limits.rollout_bytes_max)
            return await self._take_whole(whole, opened, header, paid_by=paid_by)

    def _require_wanted(self, header: RolloutHeader) -> None:
        """Check, before a body is read from a bucket, that it would be stored. Raise RemoteError."""
        state = self.decisions.state
        lease = state.lease_of(header.lease_id, header.worker)
        if lease is not None:
            check_sizes(header, lease, self.run)
            outcome = decide_upload(state, header, lease, bundle="", num_bytes=0)
        if lease is None or not isinstance(outcome, BundleArrived):
            raise RemoteError(ErrorCode.DIGEST_MISMATCH, "the parcel lacks its body: send the bundle whole")

    async def _take_whole(self, parcel: bytes, opened: Parcel, header: RolloutHeader, *, paid_by: str) -> UploadReply:
        digest = digest_of(parcel)

        async def keep() -> None:
            await self.storage.bundles.put(parcel, digest=digest)

        bundle = _Bundle(digest, len(parcel), opened.envelope, lambda: opened.check_body(header), keep)
        return await self._take(bundle, header, paid_by=paid_by)

    async def upload_held(
        self, signer: str, header_bytes: bytes, parcel: HeldParcel, *, address: str, paid_by: str = ""
    ) -> UploadReply:
        """Accept one bundle that a gateway holds, by its signed header. Raise RemoteError."""
        self.metrics.add("prime_upload_bytes_total", parcel.num_bytes)
        opened = Envelope(PayloadType.ROLLOUT, header_bytes, (Signature(signer, parcel.signature),))
        with self.gate.blame(address, self.clock.monotonic_s()):
            header = read_header(opened, run=self.run, state=self.decisions.state, is_verified=True)

        async def keep() -> None:
            if data := await parcel.fetch():
                await asyncio.to_thread(self._require_held, data, parcel, header_bytes)
                await self.storage.bundles.put(data, digest=parcel.digest)
            elif not await self.storage.bundles.has(parcel.digest):
                log.error(
                    "bundle %s is not where its gateway says: coordinator.blobs of the gateway must be the coordinator's",
                    parcel.digest[:12],
                )
                raise RemoteError(
                    ErrorCode.UNAVAILABLE, "the gateway stores bundles elsewhere", retry_after_s=ELSEWHERE_RETRY_S
                )

        bundle = _Bundle(parcel.digest, parcel.num_bytes, opened, lambda: None, keep)
        return await self._take(bundle, header, paid_by=paid_by)

    def _require_held(self, data: bytes, parcel: HeldParcel, header_bytes: bytes) -> None:
        """Check that a gateway has sent the bundle that it named: other bytes would replace another's. Raise RemoteError."""
        opened = open_parcel(data, body_bytes_max=self.run.spec.limits.rollout_bytes_max)
        if opened.envelope.payload != header_bytes or digest_of(data) != parcel.digest:
            raise RemoteError(ErrorCode.DIGEST_MISMATCH, "the gateway sent another bundle than it named")

    async def _take(self, incoming: _Bundle, header: RolloutHeader, *, paid_by: str) -> UploadReply:
        state, bundle = self.decisions.state, incoming.digest
        lease = state.lease_of(header.lease_id, header.worker)
        is_charged = paid_by == header.worker
        if lease is None:
            self._charge(AGAIN + header.worker, is_charged)
            return UploadReply(bundle=bundle, verdict=await self._verdict_on_forgotten(header, bundle))
        outcome = decide_upload(state, header, lease, bundle=bundle, num_bytes=incoming.num_bytes)  # (5), (6)
        if isinstance(outcome, AlreadyAnswered):
            self._charge(AGAIN + header.worker, is_charged)
            return UploadReply(bundle=bundle, verdict=outcome.verdict)
        check_sizes(header, lease, self.run)  # (7)
        incoming.check_body()  # (8); before any conviction: anyone who has seen a header can attach another body to it
        self._charge(header.worker, is_charged)
        self._require_lease_digest(header, lease)  # (9)
        self.presence.heard(header.worker, self.clock.monotonic_s())
        with (
            spanned(
                "upload", of_lease(lease.lease_id), step=lease.step, bundle=bundle[:12], num_bytes=incoming.num_bytes
            ),
            self.storage.used(bundle),
        ):
            if isinstance(outcome, BundleArrived):
                if bundle in state.bundles:  # a gateway has named it: by its header it belongs to one lease
                    raise RemoteError(ErrorCode.DIGEST_MISMATCH, "this bundle was uploaded for another lease")
                outcome = await self._store(header, incoming)
            return UploadReply(bundle=bundle, verdict=await self._record(outcome, header, lease, incoming.envelope))

    def _require_lease_digest(self, header: RolloutHeader, lease: LeaseRecord) -> None:
        """Check step (9): a bundle kept for another lease than this one would prove nothing. Raise RemoteError."""
        try:
            granted = self.assigner.lease_digest(lease)
        except Exception as error:  # an environment is foreign code, and after a restart it makes the prompts again
            log.exception("an environment failed to make the prompts of lease %s again", lease.lease_id[:12])
            detail = "an environment of the coordinator fails; try again later"
            raise RemoteError(ErrorCode.UNAVAILABLE, detail, retry_after_s=ENVIRONMENT_RETRY_S) from error
        if header.lease_digest != granted:
            raise RemoteError(ErrorCode.WRONG_TYPE, "the header does not name the digest of the lease that was granted")

    def _charge(self, bucket: str, is_charged: bool) -> None:
        if not is_charged:
            self.gate.limiter.by_key.spend(bucket, self.clock.monotonic_s())

    async def _store(self, header: RolloutHeader, incoming: _Bundle) -> UploadOutcome:
        """Make the bytes durable, then decide again: meanwhile the lease may have ended, or the same bundle arrived twice."""
        await incoming.keep()
        state = self.decisions.state
        require_role(header.worker, Caller.WORKER, run=self.run, state=state)
        lease = state.lease_of(header.lease_id, header.worker)
        if lease is None:
            raise RemoteError(ErrorCode.LEASE_UNKNOWN, "the lease ended during the upload")
        return decide_upload(state, header, lease, bundle=incoming.digest, num_bytes=incoming.num_bytes)

    async def _record(
        self, outcome: UploadOutcome, header: RolloutHeader, lease: LeaseRecord, envelope: Envelope
    ) -> Verdict | None:
        """Record the outcome of a bundle, and return its verdict; None if it is pending."""
        match outcome:
            case AlreadyAnswered():
                return outcome.verdict
            case BundleArrived():
                engine = header.engine
                is_weighable = self.pairs.is_weighable(engine.calibration_class, self.clock.monotonic_s())
                audited = self._is_drawn(outcome) or not engine.seeded or not is_weighable
                self.decisions.decide(
                    replace(outcome, audited=audited, seeded=engine.seeded, engine_class=engine.calibration_class)
                )
                return None
            case BundleTurnedAway():
                self.decisions.decide(outcome)
                return Verdict.refuse(outcome.reason, outcome.detail)
            case BundleContradicted():
                return await self._keep_both(outcome, lease, envelope)

    def _is_drawn(self, arrived: BundleArrived) -> bool:
        """Return whether a bundle is drawn to be audited."""
        state = self.decisions.state
        share = audits.audit_share(state.rules, state.workers[arrived.worker])
        return self.assigner.audit_draw(arrived.bundle) < share

    async def _keep_both(
        self, contradicted: BundleContradicted, lease: LeaseRecord, envelope: Envelope
    ) -> Verdict | None:
        """Keep two signed headers for one lease for the operator, then convict their worker.

        The same header in other JSON is no evidence: anyone can produce it. Nor is there evidence once the first bundle is
        deleted.
        """
        state = self.decisions.state
        assert lease.bundle is not None
        try:
            stored = await self.storage.bundles.get(lease.bundle)
        except (KeyError, DamagedBlob):  # its step is trained
            stored = b""
        if digest_of(stored) != lease.bundle:  # a header that rotted would convict its worker
            return ANOTHER_UPLOADED
        first = open_parcel(stored, body_bytes_max=self.run.spec.limits.rollout_bytes_max)
        if first.envelope.payload == envelope.payload:
            return verdict_of_lease(state, lease)
        headers = [first.envelope, envelope]
        name = contradiction_name(lease.worker, lease.lease_id)
        await self.evidence.write(name, b"".join(header.to_bytes() + b"\n" for header in headers))
        receipt = await self.receipts.replaced(lease.bundle)
        worker = state.workers.get(contradicted.worker)
        is_known = worker is not None and state.lease_of(contradicted.lease_id, contradicted.worker) is lease
        if is_known and lease.reason is None:  # meanwhile a second copy may have arrived, or the lease may be forgotten
            self.decisions.decide(replace(contradicted, replaced=(receipt,)))
        return Verdict.refuse(RejectReason.EQUIVOCATION, "two bundles were signed for this lease")

    async def _verdict_on_forgotten(self, header: RolloutHeader, bundle: str) -> Verdict | None:
        """Return the verdict on a bundle whose lease is forgotten: from its receipt, if it was ever accepted for judgement."""
        stored = await self.receipts.read_for(header.worker, bundle)
        if stored is not None:
            return verdict_of(stored)
        current = self.decisions.state.current_step
        if header.step < current:
            return Verdict.refuse(RejectReason.STALE, f"step {current} is being trained now")
        raise RemoteError(ErrorCode.LEASE_UNKNOWN, "no such lease; request a new one")


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A bundle that arrives."""

    digest: str
    num_bytes: int
    envelope: Envelope
    """Envelope of its header."""
    check_body: Callable[[], object]
    """Check step (8). Raises RemoteError."""
    keep: Callable[[], Awaitable[None]]
    """Make the bytes durable."""


def read_header(envelope: Envelope, *, run: PinnedRun, state: State, is_verified: bool = False) -> RolloutHeader:
    """Check steps (2) to (4), without (3) if a gateway has verified the signature and the JSON. Raise RemoteError."""
    signer = envelope.sole_signer()
    require_role(signer, Caller.WORKER, run=run, state=state)  # (2)
    payload = envelope.payload if is_verified else envelope.verify(PayloadType.ROLLOUT, trusted=(signer,))  # (3)
    header = parse_json(payload, RolloutHeader, is_json=is_verified)  # (4)
    if header.run != run.digest:
        raise wrong_run(header.run, run)
    if header.worker != signer:
        raise RemoteError(ErrorCode.BAD_SIGNATURE, "the header names a worker that did not sign it")
    bound = run.spec.limits.rollout_decompressed_bytes_max
    if header.decompressed_bytes > bound:
        raise LimitExceeded(
            "rollout_decompressed_bytes_max",
            header.decompressed_bytes,
            bound,
            code=ErrorCode.DECOMPRESSED_TOO_LARGE,
        )
    return header


def check_sizes(header: RolloutHeader, lease: LeaseRecord, run: PinnedRun) -> None:
    """Check step (7). Raise RemoteError if the declared sizes exceed what the lease's completions can need."""
    bound = lease_bytes_max(len(lease.slots), run)
    if header.body_bytes > bound:  # compression makes it smaller, or larger by far less than the bound's slack
        raise LimitExceeded("the lease's body_bytes_max", header.body_bytes, bound)
    if header.decompressed_bytes > bound:
        code = ErrorCode.DECOMPRESSED_TOO_LARGE
        raise LimitExceeded("the lease's body_bytes_max", header.decompressed_bytes, bound, code=code)
