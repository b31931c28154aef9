"""Bundles that name an engine class without a calibration: they are audited, gain nothing, and hurt no honest worker."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from tests.node.coordinator_world import (
    ANNA,
    COORDINATOR,
    ENGINE,
    ROOT,
    TRAINER,
    VALIDATOR,
    make_parcel,
    make_run,
    memory_parts,
)
from tests.node.dossiers_world import CALIBRATED, CLASS
from tests.time_world import VirtualClock

from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.assembly import Coordinator, open_coordinator
from prime_node.coordinator.state import audits
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import WorkerRecord
from prime_protocol.assignment import Lease
from prime_protocol.check_policy import AuditPolicy, CheckPolicy
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.evidence import BundleEvidence, Sums
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.replies import CheckTask, NotYet
from prime_protocol.requests import CheckRequest, CheckResultRequest, LeaseRequest
from prime_protocol.rollout import EngineInfo
from prime_protocol.verdict import RejectReason, Verdict

MADE_UP = EngineInfo(name="x", version="1", dtype="y", device="z")
OTHER = SigningKey(bytes([97]) * 32)
"""A second validator."""
OTHER_CLASS = "toy/bf16/cuda"
"""An engine class of validators that makes no calibrated pair."""
UNVERIFIABLE = RejectReason.UNVERIFIABLE
POLICY = "d" * 64
FLOOR = AuditPolicy()


@dataclass
class Bench:
    """A coordinator without its server, one worker, and the answers of validators."""

    coordinator: Coordinator
    clock: VirtualClock

    @property
    def anna(self) -> WorkerRecord:
        return self.coordinator.decisions.state.workers[ANNA.key_id]

    async def upload(self, engine: EngineInfo = ENGINE) -> None:
        """Upload one bundle of one group."""
        handlers = self.coordinator.handlers
        asked = LeaseRequest(policy_version=0, policy_digest=POLICY, rollouts_max=2)
        leased = await handlers.leasing.lease(ANNA.key_id, asked)
        assert isinstance(leased, Envelope), leased
        lease = parse_json(leased.verify(PayloadType.LEASE, trusted=(COORDINATOR.key_id,)), Lease)
        await handlers.intake.upload(make_parcel(lease, ANNA, engine=engine), address="127.0.0.1")
        await self.clock.sleep(1.0)

    async def task(self, validator: SigningKey = VALIDATOR) -> CheckTask | NotYet:
        return await self.coordinator.handlers.check_tasks.next_check_task(
            validator.key_id, CheckRequest(policy_versions=())
        )

    async def say(
        self,
        task: CheckTask,
        reason: RejectReason | None = None,
        *,
        validator: SigningKey = VALIDATOR,
        worker: str = CLASS,
        judge: str = CLASS,
        unscored: tuple[int, ...] = (),
    ) -> None:
        """Answer with the evidence that a validator of class `judge` has for a bundle of class `worker`."""
        sums = {"margin": Sums(num_tokens=6, log_e=(-0.1, -0.2))} if (worker, judge) == (CLASS, CLASS) else {}
        await self.coordinator.handlers.judging.check_result(
            validator.key_id,
            CheckResultRequest(
                bundle=task.bundle,
                verdict=Verdict.refuse(reason) if reason else Verdict.accept(),
                rewards=() if reason else (1.0, 0.0),
                num_tokens=0 if reason else 6,
                evidence=BundleEvidence(worker=worker, validator=judge, sums=sums) if task.audit else None,
                unscored=unscored,
            ),
        )

    async def honest(self, count: int = 1) -> None:
        """Upload and accept bundles of the calibrated class."""
        for _ in range(count):
            await self.upload()
            await self.say(await self.taken())

    async def taken(self, validator: SigningKey = VALIDATOR) -> CheckTask:
        task = await self.task(validator)
        assert isinstance(task, CheckTask), task
        return task


async def opened(checks: CheckPolicy = CALIBRATED, audits_of: AuditPolicy = FLOOR) -> Bench:
    keys = RoleKeys(
        root=(ROOT.key_id,),
        coordinator=(COORDINATOR.key_id,),
        trainer=(TRAINER.key_id,),
        validator=(VALIDATOR.key_id, OTHER.key_id),
    )
    policy = checks.model_copy(update={"audits": audits_of})
    clock, run = VirtualClock(), make_run(checks=policy, groups_per_step=1_000, lease_seconds=3_600.0, keys=keys)
    parts = memory_parts(run, requests_per_second=10_000.0, second_look_share=0.0)
    coordinator = await open_coordinator(dataclasses.replace(parts, clock=clock))
    decide = coordinator.decisions.decide
    decide(ev.WorkerJoined(ANNA.key_id, "anna", "1", CLASS, 64))
    decide(ev.ManifestPublished(0, POLICY, (UpdateRoute(None, 1),)))
    return Bench(coordinator, clock)


async def test_no_bundle_of_a_made_up_class_is_accepted_unaudited_however_trusted_its_worker_is() -> None:
    """Before, three in four were credited and trained without end, and the audited ones cost nothing."""
    bench = await opened()
    await bench.task()
    await bench.honest(100)
    assert audits.audit_share(bench.coordinator.decisions.state.rules, bench.anna) < 0.5
    while sum(not one.audited and one.num_tokens > 0 for one in bench.anna.escrow) < 3:  # the draws are random
        await bench.honest()
    before = sum(one.num_tokens for one in bench.anna.escrow if not one.audited)
    accepted = bench.anna.accepted
    await bench.upload(MADE_UP)
    task = await bench.taken()
    assert task.audit
    await bench.say(task, UNVERIFIABLE, worker=MADE_UP.calibration_class)
    assert sum(one.num_tokens for one in bench.anna.escrow if not one.audited) == before - 3 * 6
    assert (bench.anna.calibrated, bench.anna.audited_in_full) == (False, True)
    for _ in range(50):
        await bench.upload(MADE_UP)
        task = await bench.taken()
        assert task.audit
        await bench.say(task, UNVERIFIABLE, worker=MADE_UP.calibration_class)
    assert (bench.anna.accepted, bench.anna.strikes, bench.anna.banned) == (accepted, 0, None)
    assert bench.anna.audit_score == 0


async def test_only_an_accepted_bundle_of_a_calibrated_pair_makes_a_worker_calibrated_again() -> None:
    bench = await opened()
    await bench.task()
    await bench.honest(40)
    await bench.upload(MADE_UP)
    await bench.say(await bench.taken(), UNVERIFIABLE, worker=MADE_UP.calibration_class)
    await bench.upload()
    task = await bench.taken()
    assert task.audit
    await bench.say(task, RejectReason.INCOMPLETE)
    assert bench.anna.calibrated is False
    await bench.honest()
    assert bench.anna.calibrated is True


async def test_an_honest_worker_of_an_unknown_class_works_on_and_each_bundle_is_audited() -> None:
    bench = await opened(audits_of=AuditPolicy(escrow_bundles=4))
    await bench.task()
    for number in range(80):
        await bench.upload(MADE_UP)
        task = await bench.taken()
        assert task.audit
        # One in eight is beyond the narrow thresholds.
        await bench.say(task, UNVERIFIABLE if number % 8 == 7 else None, worker=MADE_UP.calibration_class)
    assert (bench.anna.accepted, bench.anna.strikes, bench.anna.banned) == (140, 0, None)
    assert all(one.num_tokens == 6 for one in bench.anna.escrow), "no bundle lost its credit"
    assert bench.anna.audit_score > 16


async def test_a_validator_that_cannot_weigh_a_bundle_leaves_it_to_one_that_can() -> None:
    bench = await opened()
    await bench.task()
    await bench.honest(60)
    state = bench.anna.audit_score, bench.anna.calibrated
    await bench.task(OTHER)
    while True:
        await bench.upload()
        task = await bench.taken(OTHER)  # its class is not known yet
        if task.audit:
            break
        await bench.say(task, validator=OTHER)
    credit = [one.num_tokens for one in bench.anna.escrow]
    await bench.say(task, UNVERIFIABLE, validator=OTHER, judge=OTHER_CLASS)
    assert task.bundle in bench.coordinator.decisions.state.bundles, "it waits for the other validator"
    assert isinstance(await bench.task(OTHER), NotYet), "its class is known now"
    again = await bench.taken()
    assert again.bundle == task.bundle
    assert (bench.anna.audit_score, bench.anna.calibrated) == state
    assert [one.num_tokens for one in bench.anna.escrow] == credit
    await bench.say(again)
    assert bench.anna.audit_score == state[0] + 1
    assert bench.coordinator.decisions.state.refused == {}


async def test_a_validator_that_can_weigh_a_bundle_and_lets_it_pass_gets_it_again() -> None:
    bench = await opened(audits_of=AuditPolicy(share_min=1.0))
    await bench.honest()
    await bench.upload(MADE_UP)
    await bench.say(await bench.taken(OTHER), validator=OTHER, worker=MADE_UP.calibration_class, judge=OTHER_CLASS)
    await bench.upload()
    first = await bench.taken()
    await bench.clock.sleep(
        bench.coordinator.handlers.check_tasks.checks.due_s(first.bundle) - bench.clock.monotonic_s()
    )
    bench.coordinator.handlers.check_tasks.expire_checks()
    assert isinstance(await bench.task(OTHER), NotYet)
    assert (await bench.taken()).bundle == first.bundle


async def test_while_no_active_validator_can_weigh_a_class_all_of_it_is_audited_and_costs_its_worker_nothing() -> None:
    bench = await opened()
    await bench.task()
    await bench.honest(60)
    checks = bench.coordinator.handlers.check_tasks
    await bench.upload(MADE_UP)  # so that the class of the other validator is known
    await bench.say(await bench.taken(OTHER), validator=OTHER, worker=MADE_UP.calibration_class, judge=OTHER_CLASS)
    await bench.honest(2)
    await bench.clock.sleep(2 * checks.agreement.check_s + 1.0)  # the validator that can weigh it is away
    await bench.task(OTHER)
    credit, score = sorted(one.num_tokens for one in bench.anna.escrow), bench.anna.audit_score
    for _ in range(20):
        await bench.upload()
        task = await bench.taken(OTHER)
        assert task.audit
        await bench.say(task, UNVERIFIABLE, validator=OTHER, judge=OTHER_CLASS)
    assert sorted(one.num_tokens for one in bench.anna.escrow) == credit
    assert (bench.anna.audit_score, bench.anna.strikes, bench.anna.audited_in_full) == (score, 0, False)


async def test_a_run_without_a_calibration_audits_any_class_alike() -> None:
    bench = await opened(CheckPolicy())
    await bench.task()
    audited = 0
    for _ in range(100):
        await bench.upload(MADE_UP)
        task = await bench.taken()
        audited += task.audit
        await bench.say(task)
    assert audited < 80
    assert bench.anna.banned is None


@pytest.mark.parametrize("has_failed", [False, True])
async def test_only_an_environment_that_failed_at_the_validator_reports_a_problem(has_failed: bool) -> None:
    """Before, a bundle of a made-up class did too: one bundle exchanged a problem."""
    bench = await opened()
    await bench.task()
    await bench.upload(MADE_UP)
    unscored = (0, 1) if has_failed else ()
    await bench.say(await bench.taken(), UNVERIFIABLE, worker=MADE_UP.calibration_class, unscored=unscored)
    state = bench.coordinator.decisions.state
    assert (state.num_redrawn, state.failing) == (int(has_failed), {})
