"""The endpoints for validators: a bundle to judge, its bytes, and the verdict."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial

from prime_node.coordinator.agreement import Agreement, Contradiction, Opinion
from prime_node.coordinator.api.bundles import BundleStorage, require_holder, tokens_max
from prime_node.coordinator.api.leasing import note_failed
from prime_node.coordinator.api.receipts import ReceiptLists
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.calibrated_pairs import CalibratedPairs, is_uncalibrated
from prime_node.coordinator.check_queue import CheckQueue, lease_tokens_max
from prime_node.coordinator.curation import Curation
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state import copies, suspicion
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.state.records import PendingBundle
from prime_node.coordinator.waiting import Notifications
from prime_node.ports.clock import Clock
from prime_node.ports.metrics import Metrics
from prime_node.traces import of_lease, spanned
from prime_protocol.calibration import require_possible
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import REWARD_MAX
from prime_protocol.replies import CheckTask, HoldingReply, NotYet
from prime_protocol.requests import CheckRequest, CheckResultRequest, HoldingRequest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason, Verdict

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Pause before a validator that waited without result may ask again."""

MEASURED_MAX = 64
"""Names of measured values in the metrics; a validator may send any."""


@dataclass(slots=True)
class CheckTasks:
    """The bundles that validators get to judge, and the deadlines of their checks."""

    run: PinnedRun
    second_look_share: float
    """Share of accepted bundles that a second validator judges too."""
    clock: Clock
    decisions: Decisions
    assigner: Assigner
    notifications: Notifications
    checks: CheckQueue
    agreement: Agreement
    pairs: CalibratedPairs

    async def next_check_task(self, signer: str, request: CheckRequest) -> CheckTask | NotYet:
        """Return the oldest pending bundle, those of the validator's own policies first."""
        self.agreement.heard(signer, self.clock.monotonic_s())
        if self.checks.begin(signer, request.session):
            self.notifications.publish(Topic.CHECK)
        bundle = await self.notifications.until(
            Topic.CHECK,
            lambda: self.checks.take(
                request.policy_versions,
                self.clock.monotonic_s(),
                validator=signer,
                session=request.session,
                names_bundles=request.names_bundles,
                may=partial(self._may_take, signer),
                tokens_max=self._tokens_max,
            ),
            is_worth_waiting=lambda found: found is None,
            wait_s=request.wait_s,
        )
        pending = None if bundle is None else self._pending(bundle)
        if bundle is None or pending is None:
            return NotYet(reason="no bundle waits for a check", retry_after_s=RETRY_S)
        now_s = self.clock.monotonic_s()
        left_s = self.checks.due_s(bundle) - now_s
        self.agreement.handed(bundle, signer)
        if not request.names_bundles:
            self.agreement.heard(signer, now_s + left_s - self.checks.check_s)  # it may say nothing until then
        check_ms = max(0, round(left_s * 1_000))
        lease = self.assigner.lease(pending.lease)
        newest = self.decisions.state.head if self.run.spec.schedule.swap.spans_policies else None
        return CheckTask.model_construct(
            bundle=bundle,
            lease=lease,
            deadline_ms=self.clock.now_ms() + check_ms,
            newest_policy=newest,
            audit=pending.audited,
            left_ms=check_ms if request.asks_left else None,
        )

    async def take_holding(self, signer: str, request: HoldingRequest) -> HoldingReply:
        """Record which bundles a validator still has. Return those that it has lost."""
        now_s = self.clock.monotonic_s()
        self.agreement.heard(signer, now_s)
        self.checks.named(signer, request.session, request.bundles, now_s)
        return HoldingReply(lost=tuple(one for one in request.bundles if not self.checks.is_held_by(one, signer)))

    def again(self, pending: PendingBundle) -> None:
        """Hand a bundle to another validator."""
        self.checks.again(pending.bundle, pending.lease.policy_version)
        self.notifications.publish(Topic.CHECK)

    def look_again(self, pending: PendingBundle, opinion: Opinion, *, tokens_s: float) -> None:
        """Hand an accepted bundle to a second validator, if it is drawn for that.

        `tokens_s` is the time that its tokens add to `check_s`.
        """
        is_drawn = pending.audited and self.assigner.look_draw(pending.bundle) < self.second_look_share
        if is_drawn and self.agreement.look_again(pending, opinion, self.clock.monotonic_s(), tokens_s=tokens_s):
            self.again(pending)

    def expire_checks(self) -> None:
        """Requeue bundles of validators that are silent or out of time. After several attempts, reject one as unverifiable."""
        before = len(self.checks)
        for overdue in self.checks.overdue(self.clock.monotonic_s()):
            is_over = overdue not in self.decisions.state.bundles
            if is_over or self.agreement.is_held(overdue):  # settle_held decides the latter
                self.checks.settled([overdue])
                continue
            self.decisions.decide(
                ev.VerdictGiven(
                    bundle=overdue,
                    reason=RejectReason.UNVERIFIABLE,
                    detail="no validator checked it in time",
                    rewards=(),
                    num_tokens=0,
                    validator="",
                    unjudged=True,
                )
            )
        if before:
            self.notifications.publish(Topic.CHECK)

    def _may_take(self, signer: str, bundle: str) -> bool:
        """Return whether a validator may judge a bundle. One that let its deadline pass leaves it to the other active ones."""
        now_s = self.clock.monotonic_s()
        others = self.agreement.active_others(signer, now_s) if self.checks.is_held_by(bundle, signer) else ()
        if any(self._is_for(other, bundle, now_s) for other in others):
            return False
        return self.agreement.may_judge(bundle, signer) and self._is_for(signer, bundle, now_s)

    def _is_for(self, validator: str, bundle: str, now_s: float) -> bool:
        """Return whether a validator need not leave a bundle to one whose class makes a calibrated pair with the bundle's."""
        pending = self.decisions.state.bundles.get(bundle)
        if pending is None or self.agreement.is_held(bundle):  # then agreement.py chooses the validators
            return True
        return self.pairs.may_take(validator, pending, now_s)

    def _tokens_max(self, bundle: str) -> int:
        """Return the maximum number of tokens in a bundle's forward pass; 0 if it needs none."""
        pending = self._pending(bundle)
        if pending is None or not pending.audited:
            return 0
        return lease_tokens_max(self.assigner.prompts(pending.lease), self.run.spec)

    def _pending(self, bundle: str) -> PendingBundle | None:
        """Return a bundle that waits for a verdict or for a second look."""
        look = self.agreement.looks.get(bundle)
        return self.decisions.state.bundles.get(bundle) or (None if look is None else look.pending)


@dataclass(slots=True)
class Judging:
    """The verdicts that validators give."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    metrics: Metrics
    tasks: CheckTasks
    agreement: Agreement
    curation: Curation
    receipts: ReceiptLists
    storage: BundleStorage
    measured: set[str] = field(default_factory=set)
    """Names of measured values that the metrics have."""

    async def check_result(self, signer: str, request: CheckResultRequest) -> None:
        """Record the verdict of the validator that has the bundle. Raise RemoteError.

        Idempotent: the first verdict is final, unless another validator has to confirm it (agreement.py).
        """
        if (reason := request.verdict.reason) is not None and not reason.is_for_validators:
            raise RemoteError(ErrorCode.WRONG_TYPE, f"a validator cannot find {reason}: only the coordinator can")
        pending = self.decisions.state.bundles.get(request.bundle)
        if pending is None and request.bundle not in self.agreement.looks:
            if not await self.receipts.is_known(request.bundle):
                raise RemoteError(ErrorCode.NOT_FOUND, f"no bundle {request.bundle[:12]}")
            return
        if self.agreement.has_answered(request.bundle, signer):
            return
        require_holder(self.tasks.checks, signer, request.bundle)
        if pending is None:
            self._second_look(signer, request)
            return
        verdict = request.verdict
        if len(request.rewards) != (pending.num_rollouts if verdict.accepted else 0):
            raise RemoteError(
                ErrorCode.WRONG_TYPE,
                f"an accepted bundle of {pending.num_rollouts} rollouts needs as many rewards, a rejected bundle none",
            )
        if not all(abs(reward) <= REWARD_MAX for reward in request.rewards):
            raise RemoteError(ErrorCode.WRONG_TYPE, f"a reward is above {REWARD_MAX:g} in magnitude")
        sizes = [one.num_tokens for one in (() if request.evidence is None else request.evidence.sums.values())]
        most = tokens_max(pending, self.run.spec)
        if max(request.num_tokens, *sizes, 0) > most:
            raise RemoteError(ErrorCode.WRONG_TYPE, f"a bundle of this lease has at most {most} completion tokens")
        if request.versions and len(request.versions) != len(pending.lease.slots):
            raise RemoteError(
                ErrorCode.WRONG_TYPE, f"a bundle of {len(pending.lease.slots)} groups needs as many versions"
            )
        leased = pending.lease.policy_version
        newest = self.decisions.state.head if self.run.spec.schedule.swap.spans_policies else leased
        if not all(leased <= oldest <= end <= newest for oldest, end in request.versions):
            raise RemoteError(
                ErrorCode.WRONG_TYPE, f"versions name policies that cannot be in the bundle: {leased} to {newest} can"
            )
        if any(slot not in pending.lease.slots for slot, _ in request.fingerprints):
            raise RemoteError(ErrorCode.WRONG_TYPE, "a fingerprint names a slot outside the lease")
        evidence = request.evidence
        if evidence is not None and self.run.spec.checks.statistics:
            known = self.run.checks_at(evidence.calibration)
            known_moments = known.moments_of(worker=evidence.worker, validator=evidence.validator)
            # In a thread: ranks of a thousand rewards take a while.
            await asyncio.to_thread(require_possible, evidence, known_moments)
        await self.storage.require_logprobs(pending, signer, request)
        if pending.audited and verdict.accepted and self.tasks.checks.is_held_by(request.bundle, signer):
            self.tasks.checks.measure(request.bundle, request.num_tokens, self.clock.monotonic_s())
        if (opinion := self._concluded(signer, request)) is not None:
            await self._decide(opinion)

    def _concluded(self, signer: str, request: CheckResultRequest) -> Opinion | None:
        """Return the opinion that decides a pending bundle; None if another validator has to judge it first."""
        pending = self.decisions.state.bundles.get(request.bundle)
        if pending is None or not self.tasks.checks.is_held_by(
            request.bundle, signer
        ):  # settled, or answered at the same time
            return None
        agreement, worker, now_s = self.agreement, pending.lease.worker, self.clock.monotonic_s()
        agreement.heard(signer, now_s, request)
        if (
            is_uncalibrated(pending, request)
            and not agreement.is_held(request.bundle)
            and self.tasks.pairs.has_better(signer, pending, now_s)
        ):
            self.tasks.again(pending)
            return None
        mine = agreement.opinion(self.decisions.state, worker, signer, request)
        if pending.audited and (differ := agreement.count(mine, now_s)):
            log.warning("%s; compare their versions, arithmetic and hardware", differ)
        num_before = agreement.num_contradictions
        tokens_s = self.tasks.checks.tokens_s(request.bundle)
        opinion = agreement.conclude(
            mine, worker, now_s, self.clock.now_ms(), tokens_s=tokens_s, nats=partial(self._nats, worker)
        )
        if agreement.num_contradictions > num_before:
            _tell(agreement.contradictions[-1])
        if opinion is None and agreement.is_held(request.bundle):
            self.tasks.again(pending)
        return opinion

    def _nats(self, worker: str, opinion: Opinion) -> float:
        return suspicion.log_after(self.decisions.state, worker, opinion.result.evidence)

    def _second_look(self, signer: str, request: CheckResultRequest) -> None:
        """Compare a second validator's opinion on an accepted bundle with the first."""
        self.agreement.heard(signer, self.clock.monotonic_s(), request)
        self.tasks.checks.settled([request.bundle])
        look = self.agreement.looks[request.bundle]
        mine = self.agreement.opinion(self.decisions.state, look.pending.lease.worker, signer, request)
        exact = all(one.is_deterministic and one.scorings == 1 for one in self.run.spec.environments)
        if found := self.agreement.looked(mine, exact_rewards=exact, now_ms=self.clock.now_ms()):
            _tell(found)

    async def _decide(self, opinion: Opinion) -> None:
        tokens_s = self.tasks.checks.tokens_s(opinion.result.bundle)  # after the decision the queue has forgotten it
        request, known = await self._copies(opinion.result)
        verdict = request.verdict
        if (pending := self.decisions.state.bundles.get(request.bundle)) is None:  # another validator was faster
            return
        given = ev.VerdictGiven(
            bundle=request.bundle,
            reason=verdict.reason,
            detail=verdict.detail,
            rewards=request.rewards,
            num_tokens=request.num_tokens,
            validator=opinion.validator,
            versions=request.versions,
            unscored=request.unscored,
            evidence=request.evidence,
            fingerprints=request.fingerprints,
            replaced=known,
            logprobs=request.logprobs or "",
            unjudged=is_uncalibrated(pending, request) and not self.tasks.pairs.knows(pending.engine_class),
        )
        outcome = str(verdict.reason or "accepted")
        with spanned("verdict", of_lease(pending.lease.lease_id), bundle=request.bundle[:12], outcome=outcome):
            self.decisions.decide(given)
        if verdict.accepted:
            self.curation.rate(pending.lease, request.bundle)
            self.tasks.look_again(pending, opinion, tokens_s=tokens_s)
        elif verdict.reason is RejectReason.INCOMPLETE:
            note_failed(self.decisions, pending.lease)
        elif verdict.reason is RejectReason.UNVERIFIABLE and request.unscored:
            note_failed(self.decisions, pending.lease, is_judged=True)
        for name, value in request.measured.items():
            if name in self.measured or len(self.measured) < MEASURED_MAX:
                self.measured.add(name)
                self.metrics.observe("prime_check_measured", coarse(value), number=name)

    async def _copies(self, request: CheckResultRequest) -> tuple[CheckResultRequest, tuple[ev.Replaced, ...]]:
        """Return the verdict, and the receipts of accepted bundles that it shows to be copies of this one.

        A fingerprint is one validator's claim, so the bytes of both bundles decide. The verdict loses its fingerprints if
        they show no copy, and rejects the bundle without a strike if those of the original are deleted.
        """
        known: dict[str, ev.Replaced] = {}
        seen: set[str] = set()
        while (pending := self.decisions.state.bundles.get(request.bundle)) is not None:
            earlier = copies.found_earlier(self.decisions.state, pending, request.fingerprints)
            later = copies.found_later(self.decisions.state, pending, request.fingerprints)
            others = [one.bundle for one in ([] if earlier is None else [earlier]) + later if one.bundle not in seen]
            if not others:
                break
            other = others[0]
            seen.add(other)
            shown = await self.storage.share_text(request.bundle, other)
            if shown is None and earlier is not None and other == earlier.bundle:
                gone = Verdict.refuse(RejectReason.UNVERIFIABLE, "the bundle that it seems to copy is deleted")
                return CheckResultRequest(bundle=request.bundle, verdict=gone, rewards=()), ()
            if not shown:
                if shown is False:
                    log.error(
                        "the bytes of bundles %s and %s show no copy: a validator forged a fingerprint, no worker is to blame",
                        request.bundle[:12],
                        other[:12],
                    )
                return request.model_copy(update={"fingerprints": ()}), ()
            if earlier is None or other != earlier.bundle:
                known[other] = await self.receipts.replaced(other)
        return request, tuple(known.values())

    async def settle_held(self) -> None:
        """Reject the bundles that a second validator should have judged in time but did not."""
        for bundle in self.agreement.overdue(self.clock.monotonic_s()):
            opinion = self.agreement.settle(bundle, self.clock.monotonic_s())
            if bundle in self.decisions.state.bundles:
                await self._decide(opinion)


def _tell(found: Contradiction) -> None:
    said = "; ".join(f"{validator} says {what}" for validator, what in found.said)
    log.warning("validators disagree about bundle %s of %s: %s", found.bundle[:12], found.worker, said)


def coarse(value: float) -> float:
    """Round to one significant digit. The metrics are public: their sum must not show a worker how its last bundle measured."""
    return float(f"{value:.0e}")
