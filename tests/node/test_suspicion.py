"""Evidence accumulates in the coordinator's state: slow cheats are banned by all their bundles together. Logs replay equally."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, VALIDATOR, make_parcel, make_run, memory_parts, running
from tests.node.dossiers_world import CALIBRATED, CLASS
from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.state import audits, invariants, snapshot
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect, Settled, WorkerWasBanned
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import BundleEvidence, Sums, folded, log_evidence
from prime_protocol.excess_flips import EXCESS_FLIPS
from prime_protocol.replies import CheckTask
from prime_protocol.requests import CheckRequest, CheckResultRequest, HeartbeatRequest, ReceiptsRequest, WorkerState
from prime_protocol.verdict import BanKind, BundleStatus, Receipt, RejectReason, Verdict

WEIGHING = dataclasses.replace(RULES, statistics=("logprob", "margin"), max_steps=50)


def saying(nats: float) -> BundleEvidence:
    """Return a bundle's evidence with the given sums at each lambda."""
    sums = {"margin": Sums(num_tokens=64, log_e=(nats, nats)), "logprob": Sums(num_tokens=64, log_e=(-0.1, -0.5))}
    return BundleEvidence(worker=CLASS, validator=CLASS, sums=sums)


UNKNOWN = BundleEvidence(worker="other/int4/cuda", validator=CLASS, sums={})


@pytest.fixture
def run() -> Run:
    return Run(WEIGHING, workers=("anna", "ben"))


def judged(run: Run, worker: str, evidence: BundleEvidence | None, reason: RejectReason | None = None) -> list[Effect]:
    """Settle one more bundle of a worker."""
    if not any(step.open for step in run.state.steps.values()):
        run.fix()
        run.publish()
    bundle = run.upload(run.granted(worker, run.state.head, rollouts_max=2))
    rewards = () if reason else (0.5,) * run.state.bundles[bundle].num_rollouts
    return run.do(ev.VerdictGiven(bundle, reason, "", rewards, 10, "validator", evidence=evidence))


def receipt_of(effects: list[Effect]) -> Settled:
    return next(effect for effect in effects if isinstance(effect, Settled))


def test_bundles_that_pass_one_by_one_ban_their_worker_together(run: Run) -> None:
    for _ in range(5):
        effects = judged(run, "anna", saying(3.0))
        if run.state.workers["anna"].banned:
            break
        assert receipt_of(effects).status is BundleStatus.ACCEPTED
    anna = run.state.workers["anna"]
    assert anna.banned is not None
    assert anna.banned.kind is BanKind.STATISTICAL
    assert receipt_of(effects).reason is RejectReason.STATISTICAL
    assert WorkerWasBanned("anna", anna.banned) in effects
    assert anna.banned.evidence in run.state.evidence, "the deciding bundle is kept"
    assert 3 < anna.num_weighed <= 5
    invariants.check_invariants(run.state)


def test_honest_bundles_never_add_up(run: Run) -> None:
    for _ in range(40):
        judged(run, "anna", saying(-0.2))
    anna = run.state.workers["anna"]
    assert anna.banned is None
    assert anna.num_weighed == 40
    assert log_evidence(anna.evidence) < math.log(2)


def test_refused_bundles_count_like_accepted_ones(run: Run) -> None:
    judged(run, "anna", saying(8.0), RejectReason.UNVERIFIABLE)
    effects = judged(run, "anna", saying(8.0), RejectReason.LOGPROB_MISMATCH)
    anna = run.state.workers["anna"]
    assert anna.banned is not None
    assert (anna.banned.kind, anna.strikes) == (BanKind.STATISTICAL, 1)
    assert receipt_of(effects).reason is RejectReason.LOGPROB_MISMATCH, "what is grossly wrong keeps its name"


def test_two_strikes_still_ban_without_any_evidence(run: Run) -> None:
    for _ in range(2):
        judged(run, "anna", None, RejectReason.MALFORMED)
    assert run.state.workers["anna"].banned is not None
    assert run.state.workers["anna"].banned.kind is BanKind.HARD


def test_an_unknown_engine_is_marked_and_not_banned(run: Run) -> None:
    for _ in range(10):
        assert receipt_of(judged(run, "anna", UNKNOWN)).weighed is None
    anna = run.state.workers["anna"]
    assert (anna.banned, anna.calibrated, anna.num_weighed) == (None, False, 0)
    trusted = dataclasses.replace(WEIGHING, newcomer_bundles=1, audit_share_min=0.1)
    assert audits.audit_share(trusted, anna) == 1.0, "it stays a newcomer"
    judged(run, "anna", saying(-0.2))
    assert anna.calibrated is True


def test_an_unknown_engine_is_banned_by_what_needs_no_calibration_and_is_still_marked() -> None:
    run = Run(dataclasses.replace(WEIGHING, statistics=(*WEIGHING.statistics, EXCESS_FLIPS)))
    run.join("anna", "ben")
    run.publish()
    flips = UNKNOWN.model_copy(update={"sums": {EXCESS_FLIPS: Sums(num_tokens=48, log_e=(0.6, 1.6))}})
    for _ in range(14):
        effects = judged(run, "anna", flips)
        if receipt_of(effects).reason is not None:
            break
    anna = run.state.workers["anna"]
    assert receipt_of(effects).reason is RejectReason.STATISTICAL
    assert anna.banned is not None
    assert anna.banned.kind is BanKind.STATISTICAL
    assert anna.calibrated is False


def test_a_run_without_calibration_weighs_nothing() -> None:
    run = Run(workers=("anna",))
    judged(run, "anna", saying(50.0))
    assert run.state.workers["anna"].banned is None


def test_a_forgiven_worker_starts_without_evidence(run: Run) -> None:
    judged(run, "anna", saying(30.0))
    assert run.state.workers["anna"].banned is not None
    run.do(ev.WorkerUnbanned("anna"))
    run.join("anna")
    effects = judged(run, "anna", saying(-0.2))
    weighed = receipt_of(effects).weighed
    assert weighed is not None
    assert (weighed.number, run.state.workers["anna"].banned) == (1, None)


def test_one_workers_evidence_does_not_count_against_another(run: Run) -> None:
    judged(run, "anna", saying(30.0))
    judged(run, "ben", saying(-0.2))
    assert run.state.workers["ben"].banned is None


def test_log_and_snapshot_lead_to_the_same_evidence(run: Run) -> None:
    for nats in (-0.2, 1.5, -0.3, 2.0):
        judged(run, "anna", saying(nats))
    again = Run(WEIGHING)
    for event, at_ms in run.log:
        again.now_ms = at_ms
        again.do(ev.event_from_json(ev.event_to_json(event)))
    assert again.state == run.state
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state


def test_a_verdict_of_an_older_log_adds_no_evidence() -> None:
    event = ev.VerdictGiven("b", None, "", (0.5,), 10, "validator")
    old = json.loads(ev.event_to_json(event))
    del old["evidence"]
    assert ev.event_from_json(json.dumps(old)) == event


async def test_a_worker_can_add_up_its_own_receipts_and_an_operator_sees_the_evidence() -> None:
    """Through the daemon: verdicts with sums in, receipts with sums out, and the ban occurs where the sums imply it."""
    async with running(memory_parts(make_run(checks=CALIBRATED)), ANNA, BEN) as world:
        for nats in (-0.5, 4.0, 9.0):
            await world.client(ANNA).upload(make_parcel(lease := await world.lease(ANNA, rollouts_max=2), ANNA))
            task = await world.client(VALIDATOR).check(CheckRequest(policy_versions=(), wait_s=5.0))
            assert isinstance(task, CheckTask)
            sums = {"margin": Sums(num_tokens=6, log_e=(min(nats, 5.9), nats))}
            result = CheckResultRequest(
                bundle=task.bundle,
                verdict=Verdict.accept(),
                rewards=(0.5,) * lease.num_rollouts,
                num_tokens=6,
                evidence=BundleEvidence(worker=CLASS, validator=CLASS, sums=sums),
            )
            await world.client(VALIDATOR).check_result(result)
        stored, _ = await world.parts.store.receipts_of(ANNA.key_id, after=0, limit=10)
        receipts = [
            parse_json(
                open_envelope(one.envelope.encode()).verify(PayloadType.RECEIPT, trusted=(COORDINATOR.key_id,)), Receipt
            )
            for one in stored
        ]
        wealth = folded({}, {}, statistics=("margin",))
        for number, receipt in enumerate(receipts, 1):
            assert receipt.evidence is not None
            assert receipt.evidence.number == number
            wealth = folded(wealth, receipt.evidence.sums, statistics=("margin",))
            assert receipt.evidence.log_evidence == pytest.approx(log_evidence(wealth))
        assert [receipt.reason for receipt in receipts] == [None, None, RejectReason.STATISTICAL]
        assert log_evidence(wealth) >= math.log(1e5)
        shown = {row["worker"]: row for row in (await world.status())["workers"]}
        assert shown[ANNA.key_id]["banned"]["kind"] == "statistical"
        assert shown[ANNA.key_id]["evidence_nats"] == pytest.approx(log_evidence(wealth), abs=0.01)
        assert (shown[BEN.key_id]["evidence_nats"], shown[BEN.key_id]["calibrated"]) == (0.0, None)
        page = await world.client(ANNA).receipts(ReceiptsRequest())
        assert page.receipts == tuple(one.envelope for one in stored), "the banned can read why"
        with pytest.raises(RemoteError) as refused:
            await world.client(ANNA).heartbeat(
                HeartbeatRequest(state=WorkerState.IDLE, policy_version=0, bundles_spooled=0)
            )
        assert refused.value.code is ErrorCode.BANNED
        with pytest.raises(RemoteError) as refused:
            await world.client(COORDINATOR).receipts(ReceiptsRequest())
        assert refused.value.code is ErrorCode.UNKNOWN_WORKER


async def test_sums_that_no_tokens_can_give_are_refused_and_the_coordinator_continues() -> None:
    """A number of lambdas other than the calibration's would otherwise end the journal, and with it the run."""
    async with running(memory_parts(make_run(checks=CALIBRATED)), ANNA) as world:
        await world.client(ANNA).upload(make_parcel(lease := await world.lease(ANNA, rollouts_max=2), ANNA))
        task = await world.client(VALIDATOR).check(CheckRequest(policy_versions=(), wait_s=5.0))
        assert isinstance(task, CheckTask)

        async def verdict(worker: str, name: str, *log_e: float) -> None:
            sums = {name: Sums(num_tokens=6, log_e=log_e)}
            result = CheckResultRequest(
                bundle=task.bundle,
                verdict=Verdict.accept(),
                rewards=(0.5,) * lease.num_rollouts,
                evidence=BundleEvidence(worker=worker, validator=CLASS, sums=sums),
            )
            await world.client(VALIDATOR).check_result(result)

        wrong: list[tuple[Any, ...]] = [
            (CLASS, "margin", 1.0),
            (CLASS, "margin", 1.0, 12.0),
            (CLASS, "proof", 1.0, 1.0),
            ("a", "margin", 1.0, 1.0),
        ]
        for found in wrong:
            with pytest.raises(RemoteError) as refused:
                await verdict(*found)
            assert refused.value.code is ErrorCode.MALFORMED
        await verdict(CLASS, "margin", 1.0, 1.0)
        assert (await world.status())["workers"][0]["evidence_nats"] != 0.0


@pytest.mark.parametrize("reason", [RejectReason.EQUIVOCATION, RejectReason.COPIED])
def test_an_accepted_bundle_that_is_rejected_later_resets_nothing(run: Run, reason: RejectReason) -> None:
    """A worker that signs twice, or is found to have copied, keeps its evidence; its receipts stay numbered without a gap."""
    mark = "a" * 24
    bundles = {name: run.upload(run.granted(name, 0, rollouts_max=2)) for name in ("ben", "anna")}
    run.state.bundles[bundles["anna"]].arrived_at_ms += 1
    slots = {name: run.state.bundles[bundle].lease.slots[0] for name, bundle in bundles.items()}

    def accept(name: str, replaced: tuple[ev.Replaced, ...] = ()) -> list[Effect]:
        marks = ((slots[name], mark),)
        evidence = saying(3.0) if name == "anna" else saying(-0.2)
        return run.do(
            ev.VerdictGiven(bundles[name], None, "", (0.5,) * 2, 10, "v", (), (), evidence, marks, replaced=replaced)
        )

    first = receipt_of(accept("anna")).weighed
    before = dict(run.state.workers["anna"].evidence)
    replaced = (ev.Replaced(bundles["anna"], first),)
    if reason is RejectReason.COPIED:
        effects = accept("ben", replaced)
    else:
        lease = next(iter(run.state.workers["anna"].ended))
        effects = run.do(ev.BundleContradicted(lease.lease_id, "anna", "another", replaced))
    anna = run.state.workers["anna"]
    (settled,) = [one for one in effects if isinstance(one, Settled) and one.bundle == bundles["anna"]]
    assert (settled.reason, settled.weighed, anna.strikes) == (reason, first, 1)
    assert (anna.evidence, anna.num_weighed) == (before, 1)
    event, _ = run.log[-1]
    assert ev.event_from_json(ev.event_to_json(event)) == event
    invariants.check_invariants(run.state)


def test_a_receipt_from_before_a_pardon_does_not_count_in_the_evidence_after_it(run: Run) -> None:
    bundle = run.upload(run.granted("anna", 0, rollouts_max=2))
    first = receipt_of(run.do(ev.VerdictGiven(bundle, None, "", (0.5,) * 2, 10, "v", evidence=saying(-0.2)))).weighed
    lease = next(iter(run.state.workers["anna"].ended))
    run.do(ev.WorkerBanned("anna", "by hand"))
    run.now_ms += 1
    run.do(ev.WorkerUnbanned("anna"))
    run.join("anna")
    effects = run.do(ev.BundleContradicted(lease.lease_id, "anna", "another", (ev.Replaced(bundle, first),)))
    assert receipt_of(effects).weighed is None
