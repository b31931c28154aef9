"""Selection of bundles for audits, and the loss of a worker that fails one."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from tests.node.coordinator_world import ANNA, ENGINE, ROOT, VALIDATOR, make_parcel, make_run, memory_parts, running
from tests.node.scheduler_world import RULES, Run
from tests.node.validator_world import LetterTokenizer

from prime_node.broadcast.audit.ledger_audit import audit_ledger
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.state import audits, invariants, snapshot
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect, Settled
from prime_node.coordinator.state.records import LeaseRecord, WorkerRecord
from prime_protocol.check_policy import AuditPolicy, CheckPolicy
from prime_protocol.digest import digest_of
from prime_protocol.envelope import open_envelope, parse_json
from prime_protocol.evidence import BundleEvidence, Sums
from prime_protocol.replies import NotYet
from prime_protocol.requests import AdminRequest, LeaseRequest, LeaveRequest, ReceiptsRequest
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason

AUDITED = dataclasses.replace(RULES, audit_share_min=0.25, newcomer_bundles=2, escrow_bundles=3, max_steps=20)


@pytest.fixture
def run() -> Run:
    return Run(AUDITED, workers=("anna", "ben"))


def accept(run: Run, lease: LeaseRecord, *, audited: bool) -> Settled:
    """Return the receipt of an accepted bundle of ten tokens."""
    effects = run.accept(run.upload(lease, audited=audited))
    return next(effect for effect in effects if isinstance(effect, Settled))


def settled_in(effects: list[Effect]) -> list[Settled]:
    return [effect for effect in effects if isinstance(effect, Settled)]


def anna(run: Run) -> WorkerRecord:
    return run.state.workers["anna"]


def test_the_share_falls_with_the_audits_that_were_passed_and_never_below_the_floor() -> None:
    worker = WorkerRecord("anna", "", "", "", 1, 0)
    shares = []
    for worker.audit_score in (0, 1, 2, 3, 4, 8, 9, 1_000):
        shares.append(audits.audit_share(AUDITED, worker))
    assert shares == [1.0, 1.0, 1.0, 2 / 3, 0.5, 0.25, 0.25, 0.25]


def test_the_draw_is_uniform_and_no_bundle_predicts_the_next() -> None:
    run = make_run()
    draw = Assigner(run, secret=bytes(range(32)), environments={}, tokenizer=LetterTokenizer()).audit_draw
    draws = np.array([draw(digest_of(b"bundle %d" % number)) for number in range(100_000)])
    shares = np.histogram(draws, bins=20, range=(0.0, 1.0))[0] / len(draws)
    assert np.abs(shares - 0.05).max() < 4.5 * math.sqrt(0.05 * 0.95 / len(draws))
    audited = draws < 0.25
    for lag in (1, 2, 8):  # after an audited bundle the next ones are as likely as any
        following = audited[lag:][audited[:-lag]]
        assert abs(following.mean() - 0.25) < 4.5 * math.sqrt(0.25 * 0.75 / len(following))
    until = np.diff(np.flatnonzero(audited))  # bundles until the next audit: geometric
    assert abs(until.mean() - 4) < 4.5 * math.sqrt(12 / len(until))
    assert abs((until > 11).mean() - 0.75**11) < 4.5 * math.sqrt(0.75**11 / len(until))


def test_where_all_is_audited_tokens_are_credited_at_once(run: Run) -> None:
    run = Run(RULES, workers=("anna",))
    assert accept(run, run.granted("anna", 0), audited=True).num_tokens == 10
    assert audits.audit_share(RULES, anna(run)) == 1.0


def test_tokens_are_credited_when_newer_bundles_take_their_place_in_escrow(run: Run) -> None:
    credited = []
    for number in range(6):
        settled = accept(run, run.granted("anna", 0, rollouts_max=2), audited=number % 2 == 0)
        credited.append(settled.num_tokens)
        assert "10 tokens are credited after 3 more" in settled.detail
    assert credited == [0, 0, 0, 10, 10, 10]
    assert anna(run).audit_score == 3
    invariants.check_invariants(run.state)


def test_a_dishonest_bundle_takes_back_what_was_not_audited_and_not_trained(run: Run) -> None:
    audited = run.granted("anna", 0, rollouts_max=2)
    trusted = run.granted("anna", 0, rollouts_max=2)
    waiting = run.granted("anna", 0, rollouts_max=2)
    accept(run, audited, audited=True)
    accept(run, trusted, audited=False)
    pending = run.upload(waiting, audited=False)
    kept_pending = run.upload(run.granted("anna", 0, rollouts_max=2), audited=True)
    bad = run.upload(run.granted("anna", 0, rollouts_max=2))
    before = anna(run).accepted
    effects = run.refuse(bad, RejectReason.SEED_MISMATCH)
    receipts = {effect.bundle: effect for effect in effects if isinstance(effect, Settled)}
    assert {bundle: receipt.reason for bundle, receipt in receipts.items()} == {
        bad: RejectReason.SEED_MISMATCH,
        trusted.bundle: RejectReason.UNPROVEN,
        pending: RejectReason.UNPROVEN,
    }
    assert (anna(run).accepted, anna(run).strikes, anna(run).audit_score, anna(run).escrow) == (before - 2, 1, 0, [])
    assert audited.slots[0] in run.state.steps[0].accepted, "it passed its audit"
    assert trusted.slots[0] in run.state.steps[0].open, "others may fill it"
    assert kept_pending in run.state.bundles, "it will be judged in full"
    assert run.state.accepted == 2
    invariants.check_invariants(run.state)
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state


def uploaded(run: Run, *, audited: bool) -> str:
    run.now_ms += 1
    return run.upload(run.granted("anna", 0, rollouts_max=2), audited=audited)


def credited(run: Run, bundle: str) -> int:
    (settled,) = settled_in(run.accept(bundle))
    return settled.num_tokens


def test_nothing_later_is_credited_while_an_audit_lasts_and_all_of_it_once_it_is_passed(run: Run) -> None:
    """Before, garbage was credited in the meantime: newer bundles took its place in escrow."""
    before = [uploaded(run, audited=True) for _ in range(4)]
    assert [credited(run, bundle) for bundle in before] == [0, 0, 0, 10]
    slow = uploaded(run, audited=True)
    assert [credited(run, uploaded(run, audited=False)) for _ in range(5)] == [0] * 5
    assert len(anna(run).escrow) == 3 + 5
    assert credited(run, slow) == 6 * 10
    assert credited(run, uploaded(run, audited=False)) == 10
    invariants.check_invariants(run.state)
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state


def test_a_worker_whose_audits_overlap_is_credited_all_the_time(run: Run) -> None:
    waiting, tokens = [uploaded(run, audited=True) for _ in range(3)], []
    for _ in range(9):
        waiting.append(uploaded(run, audited=True))
        tokens.append(credited(run, waiting.pop(0)))
    assert tokens == [0, 0, 0] + [10] * 6


def test_a_slow_audit_that_fails_costs_all_that_came_in_the_meantime(run: Run) -> None:
    for _ in range(3):
        run.accept(uploaded(run, audited=True))
    slow = uploaded(run, audited=True)
    later = []
    for _ in range(5):
        later.append(uploaded(run, audited=False))
        assert credited(run, later[-1]) == 0
    effects = run.refuse(slow, RejectReason.SEED_MISMATCH)
    assert {one.bundle for one in settled_in(effects)} == {slow, *later}
    assert anna(run).escrow == []
    invariants.check_invariants(run.state)


def test_an_honest_worker_is_paid_however_long_an_audit_lasts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "WITHHELD_MAX", 4)
    uploaded(run, audited=True)
    tokens = [credited(run, uploaded(run, audited=False)) for _ in range(9)]
    assert tokens == [0] * 7 + [10] * 2
    assert len(anna(run).escrow) == 3 + 4


def test_an_audit_that_no_validator_finishes_takes_the_credit_of_the_bundles_that_it_stood_for(run: Run) -> None:
    """Else a cheat whose audits are never finished kept the credit of what was not audited."""
    for _ in range(2):
        run.accept(uploaded(run, audited=True))
    for _ in range(5):
        run.accept(uploaded(run, audited=False))
    unjudged = uploaded(run, audited=True)
    accepted = anna(run).accepted
    run.do(ev.VerdictGiven(unjudged, RejectReason.UNVERIFIABLE, "", (), 0, "", unjudged=True))
    assert [one.num_tokens for one in anna(run).escrow] == [0, 0, 0]
    assert anna(run).accepted == accepted, "their groups are trained on"
    assert credited(run, uploaded(run, audited=False)) == 0, "no audit is passed since"
    assert credited(run, uploaded(run, audited=True)) == 0
    assert [credited(run, uploaded(run, audited=True)) for _ in range(2)] == [0, 10]
    invariants.check_invariants(run.state)


def test_what_is_trained_stays_trained_but_is_not_credited(run: Run) -> None:
    lease = run.granted("anna", 0, rollouts_max=2)
    accept(run, lease, audited=False)
    run.train("ben", 0)
    effects = run.refuse(run.upload(run.granted("anna", 1, rollouts_max=2)), RejectReason.LOGPROB_MISMATCH)
    (receipt,) = [effect for effect in effects if isinstance(effect, Settled) and effect.bundle == lease.bundle]
    assert (receipt.status, receipt.num_tokens) == (BundleStatus.REFUSED, 0)
    assert lease.slots[0] in run.state.steps[0].taken
    invariants.check_invariants(run.state)


def test_bad_luck_takes_nothing_back(run: Run) -> None:
    accept(run, run.granted("anna", 0, rollouts_max=2), audited=False)
    run.refuse(run.upload(run.granted("anna", 0, rollouts_max=2)), RejectReason.UNVERIFIABLE)
    assert len(anna(run).escrow) == 1


def test_a_lease_without_a_bundle_costs_passed_audits(run: Run) -> None:
    for _ in range(6):
        accept(run, run.granted("anna", 0, rollouts_max=2), audited=True)
    before = audits.audit_share(AUDITED, anna(run))
    run.do(ev.LeaseReturned(run.granted("anna", 0).lease_id))
    assert (anna(run).audit_score, anna(run).abandoned) == (2, 1)
    assert audits.audit_share(AUDITED, anna(run)) > before


def test_the_last_step_is_not_over_while_something_may_be_taken_back() -> None:
    run = Run(dataclasses.replace(AUDITED, max_steps=1), workers=("anna",))
    accept(run, run.granted("anna", 0), audited=False)
    assert not run.state.is_complete
    run.fix()
    assert run.state.is_complete


def test_a_policy_under_which_cheating_pays_is_refused() -> None:
    with pytest.raises(ValueError, match="a cheat must stake more than it saves"):
        AuditPolicy(share_min=0.1, escrow_bundles=8)


async def test_what_is_claimed_to_be_sampled_without_the_seeds_is_always_audited() -> None:
    policy = AuditPolicy(share_min=0.05, newcomer_bundles=1, escrow_bundles=19)
    parts = memory_parts(make_run(checks=CheckPolicy(audits=policy, unseeded=True), groups_per_step=64))
    async with running(parts, ANNA) as world:
        for seeded in (True,) * 12 + (False,) * 6:
            engine = ENGINE.model_copy(update={"seeded": seeded})
            lease = await world.lease(ANNA, rollouts_max=2)
            await world.client(ANNA).upload(make_parcel(lease, ANNA, engine=engine))
            task = await world.take_task(VALIDATOR)
            assert task.audit or seeded
            await world.give_verdict(task)


async def test_a_task_names_what_to_audit_and_the_ledger_shows_what_is_credited() -> None:
    policy = AuditPolicy(share_min=0.05, newcomer_bundles=1, escrow_bundles=19)
    spec = make_run(checks=CheckPolicy(audits=policy), groups_per_step=64)
    audited = []
    async with running(memory_parts(spec), ANNA) as world:
        for _ in range(24):
            await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
            task = await world.take_task(VALIDATOR)
            audited.append(task.audit)
            await world.give_verdict(task)
        report = await audit_ledger(world.client(ANNA), spec)
        (shown,) = (await world.status())["workers"]
    assert audited[:2] == [True, True], "a newcomer"
    assert not all(audited)
    assert (shown["audits_passed"], shown["tokens_withheld"]) == (sum(audited), 19 * 2)
    assert (report.faults, report.accounts[ANNA.key_id].tokens) == ([], 5 * 2)


def test_when_the_run_ends_the_escrow_is_credited_once_all_is_judged() -> None:
    run = Run(dataclasses.replace(AUDITED, max_steps=1, statistics=("margin",)))
    run.join("anna", "ben")
    run.publish()
    evidence = BundleEvidence(worker="toy", validator="toy", sums={"margin": Sums(num_tokens=10, log_e=(-0.1,))})
    credited = 0
    for _ in range(5):
        bundle = run.upload(run.granted("anna", 0, rollouts_max=2))
        (settled,) = settled_in(run.do(ev.VerdictGiven(bundle, None, "", (0.5,) * 2, 10, "v", evidence=evidence)))
        credited += settled.num_tokens
    assert credited == 20
    late = run.upload(run.granted("anna", 0, rollouts_max=2))
    run.do(ev.DrainSet())
    assert not audits.is_releasable(run.state, anna(run)), "a bundle waits, and may show that it cheats"
    last = settled_in(run.accept(late))[0]
    assert audits.is_releasable(run.state, anna(run))
    (released,) = settled_in(run.do(ev.EscrowReleased(("anna",))))
    assert (released.bundle, released.status) == (late, BundleStatus.ACCEPTED)
    assert credited + released.num_tokens == 60, "the last receipt repeats its tokens and adds those in escrow"
    assert released.credited_before == last.num_tokens, "so that no figure counts them twice"
    assert released.weighed == last.weighed
    assert not audits.is_releasable(run.state, anna(run))
    assert ev.event_from_json(ev.event_to_json(run.log[-1][0])) == run.log[-1][0]
    invariants.check_invariants(run.state)
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state


def test_a_worker_that_leaves_is_credited_no_sooner(run: Run) -> None:
    accept(run, run.granted("anna", 0, rollouts_max=2), audited=False)
    run.do(ev.WorkerLeft("anna"))
    assert not audits.is_releasable(run.state, anna(run)), "it could come back with nothing at stake"
    run.do(ev.DrainSet())
    assert audits.is_releasable(run.state, anna(run))
    run.do(ev.WorkerBanned("anna", "by hand"))
    assert not audits.is_releasable(run.state, anna(run))


async def test_a_worker_reads_its_released_escrow_in_its_last_receipts_and_so_does_the_ledger() -> None:
    policy = AuditPolicy(share_min=0.5, newcomer_bundles=1, escrow_bundles=4)
    spec = make_run(checks=CheckPolicy(audits=policy), groups_per_step=64)
    async with running(memory_parts(spec), ANNA) as world:
        for _ in range(6):
            await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
            await world.give_verdict(await world.take_task(VALIDATOR))
        await world.client(ROOT).admin(AdminRequest(action="drain"))
        page = await world.client(ANNA).receipts(ReceiptsRequest())
        await world.client(ANNA).leave(LeaveRequest())
        shown = (await world.get("/metrics"))[1].decode()
        after = await world.client(ANNA).receipts(ReceiptsRequest(after=page.next))
        report = await audit_ledger(
            world.client(ANNA), spec, receipts=[open_envelope(one.encode()) for one in page.receipts]
        )
    latest = [parse_json(open_envelope(one.encode()).payload, Receipt) for one in page.receipts]
    assert sum(receipt.num_tokens for receipt in latest) == 6 * 2
    assert after.receipts == ()
    assert 'prime_rollouts_total{outcome="accepted"} 12.0' in shown, (
        "the last bundle's second receipt is no further work"
    )
    assert (report.faults, report.accounts[ANNA.key_id].tokens) == ([], 6 * 2)


async def test_a_lapsed_lease_is_redeemed_no_more_once_nothing_stands_for_it() -> None:
    policy = AuditPolicy(share_min=0.5, newcomer_bundles=1, escrow_bundles=4)
    async with running(memory_parts(make_run(checks=CheckPolicy(audits=policy)))) as world:
        manifest = await world.publish()
        await world.join(ANNA)
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
        await world.give_verdict(await world.take_task(VALIDATOR))
        lost = await world.lease(ANNA, rollouts_max=2)
        await world.client(ROOT).admin(AdminRequest(action="drain"))
        forgotten = LeaseRequest(policy_version=0, policy_digest=manifest.digest, rollouts_max=2, holding=())
        assert isinstance(await world.client(ANNA).lease(forgotten), NotYet)
        await world.client(ANNA).receipts(ReceiptsRequest())  # nothing waits: the escrow is credited
        answer = await world.client(ANNA).upload(make_parcel(lost, ANNA))
    assert answer.verdict is not None
    assert answer.verdict.reason is RejectReason.LEASE_EXPIRED
