"""Evaluations by workers, against the real daemon and the state machine: leases, results, and exclusion from training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    VALIDATOR,
    Letters,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.scheduler_world import RULES, Run

from prime_node.algo.estimates import Mark
from prime_node.coordinator.assembly import Parts, open_coordinator
from prime_node.coordinator.state import endings, evaluations, invariants, snapshot
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import BundleForgotten, Evaluated
from prime_node.coordinator.state.records import LeaseEnd, State
from prime_node.coordinator.state.slot_records import Results
from prime_node.ports.environment import HeldOutProblem
from prime_protocol.assignment import HELD_OUT_START, Lease
from prime_protocol.errors import LocalError
from prime_protocol.requests import CheckResultRequest
from prime_protocol.verdict import RejectReason, Verdict

RUN = make_run(async_level=2)
SLOTS_END = RUN.spec.max_steps * RUN.spec.groups_per_step
SETTINGS = {"every": 2, "problems": 3, "pass_at": [2]}


@dataclass(frozen=True)
class Asked:
    """Problem that implements ports.environment.HeldOutProblem."""

    prompt: str

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        return finished and completion == self.prompt

    def score(self, completion: str, *, finished: bool) -> float:
        return float(self.is_correct(completion, finished=finished))


class Examined(Letters):
    """Environment with five held-out problems; the second one's prompt is too long."""

    def held_out(self, count: int) -> list[HeldOutProblem]:
        return [Asked(self.prompt(HELD_OUT_START + number)) for number in range(min(count, 5))]

    def prompt(self, index: int) -> str:
        number = index - HELD_OUT_START
        return super().prompt(index) if number < 0 else f"held out {number}" + "!" * 9_000 * (number == 1)


def examined(parts: Parts) -> Parts:
    return replace(parts, environments={"letters": Examined()})


async def answer(world: World, lease: Lease, *, reason: RejectReason | None = None) -> None:
    await world.client(ANNA).upload(make_parcel(lease, ANNA))
    await world.judge(reason=reason)


async def test_workers_evaluate_first_and_no_batch_contains_it() -> None:
    async with running(examined(memory_parts(RUN, evaluation=SETTINGS)), ANNA) as world:
        lease = await world.lease(ANNA)
        assert [group.slot for group in lease.groups] == [SLOTS_END, SLOTS_END + 2]  # one prompt does not fit
        assert [group.problem.index - HELD_OUT_START for group in lease.groups] == [0, 2]
        assert bytes(lease.groups[0].prompt_token_ids) == b"held out 0"
        under_way = (await world.status())["evaluations"]
        assert under_way == [{"policy_version": 0, "eval_problems": 0, "eval_missing": 2}]
        await answer(world, lease)
        (row,) = (await world.status())["evaluations"]
        assert (row["eval_by"], row["eval_trusted"]) == ("workers", False)
        assert (row["eval_problems"], row["eval_unanswered"], row["eval_sampled"], row["eval_pass_at_2"]) == (
            2,
            0,
            0.5,
            1.0,
        )
        assert row["eval_sampled_low"] < 0.5 < row["eval_sampled_high"]
        batch = await world.fill(0)
        assert [group.slot for group in batch.groups] == [0, 1, 2, 3]
        assert (await world.status())["rollouts"]["accepted"] == 4 + 8  # the work is credited like any other


async def test_the_figures_are_a_row_and_gauges_that_say_that_they_are_not_trusted() -> None:
    rows: list[dict[str, Any]] = []

    class Kept:
        def record(self, **fields: Any) -> None:
            rows.append(fields)

        def close(self) -> None:
            rows.append({})

    parts = replace(examined(memory_parts(RUN, evaluation=SETTINGS)), rows=Kept())
    async with running(parts, ANNA) as world:
        await answer(world, await world.lease(ANNA))
        (row,) = rows
        assert (row["policy_version"], row["eval_sampled"], row["eval_trusted"]) == (0, 0.5, False)
        shown = (await world.get("/metrics"))[1].decode()
        assert "prime_coordinator_eval_sampled 0.5" in shown
        assert "prime_coordinator_eval_trusted 0.0" in shown
    assert rows[-1] == {}, "closed with the daemon"


async def test_the_problems_and_seeds_that_are_trained_on_do_not_depend_on_evaluations() -> None:
    asked: list[list[Any]] = []
    for settings in ({}, SETTINGS):
        async with running(examined(memory_parts(RUN, evaluation=settings)), ANNA) as world:
            if settings:
                await answer(world, await world.lease(ANNA))
            asked.append([(one.slot, one.problem, one.seeds) for one in (await world.lease(ANNA)).groups])
    assert asked[0] == asked[1]


async def test_a_later_policy_meets_the_same_problems_and_seeds_and_a_restart_knows_the_results(tmp_path: Path) -> None:
    parts = examined(await folder_parts(RUN, tmp_path, evaluation=SETTINGS))
    async with running(parts, ANNA) as world:
        first = await world.lease(ANNA)
        await answer(world, first)
        for step in (0, 1):
            await world.fill(step)
            await world.publish()
        second = await world.lease(ANNA)
        assert [(one.problem, one.seeds) for one in first.groups] == [(one.problem, one.seeds) for one in second.groups]
        assert (second.policy_version, second.step) == (2, 2)
        await answer(world, second)  # the same text again, from the same seeds: no copy
        shown = (await world.status())["evaluations"]
        assert [row["policy_version"] for row in shown] == [0, 2]
    async with running(examined(await folder_parts(RUN, tmp_path, evaluation=SETTINGS))) as world:
        assert (await world.status())["evaluations"] == shown


async def test_refused_answers_are_asked_again() -> None:
    async with running(examined(memory_parts(RUN, evaluation=SETTINGS)), ANNA) as world:
        lease = await world.lease(ANNA)
        await answer(world, lease, reason=RejectReason.UNVERIFIABLE)
        assert [one.slot for one in (await world.lease(ANNA)).groups] == [one.slot for one in lease.groups]


async def test_rewards_may_be_beyond_one() -> None:
    """An environment of verifiers returns a weighted sum of rewards."""
    async with running(examined(memory_parts(RUN, evaluation=SETTINGS)), ANNA) as world:
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
        task = await world.take_task(VALIDATOR)
        rewards = (2.0, 2.0, 1.0, 2.0)
        await world.client(VALIDATOR).check_result(
            CheckResultRequest(bundle=task.bundle, verdict=Verdict.accept(), rewards=rewards, num_tokens=4)
        )
        (row,) = (await world.status())["evaluations"]
        assert (row["eval_reward"], row["eval_sampled"]) == (1.75, 0.25)
        assert row["eval_reward_low"] < 1.75 < row["eval_reward_high"]


async def test_a_policy_is_evaluated_after_the_next_one_is_out() -> None:
    async with running(examined(memory_parts(RUN, evaluation=SETTINGS)), ANNA, BEN) as world:
        lease = await world.lease(ANNA, rollouts_max=2)
        rest = await world.lease(BEN, rollouts_max=2)
        await world.client(BEN).upload(make_parcel(rest, BEN))
        await world.judge()
        for step in range(4):  # further than async_level: what is tagged so would be stale
            await world.fill(step, BEN)
            await world.publish()
            if step % 2:
                await world.client(BEN).upload(make_parcel(await world.lease(BEN), BEN))
                await world.judge()
        await answer(world, lease)
        rows = {row["policy_version"]: row for row in (await world.status())["evaluations"]}
        assert rows[0]["eval_problems"] == 2


async def test_pass_at_more_than_there_are_completions_is_the_operators_mistake() -> None:
    with pytest.raises(LocalError, match="pass_at"):
        await open_coordinator(memory_parts(RUN, evaluation={"every": 1, "pass_at": [3]}))


# The state machine

END = RULES.max_steps * RULES.groups_per_step


@pytest.fixture
def run() -> Run:
    """A state with two workers, and policy 0 under evaluation."""
    run = Run(workers=("anna", "ben"))
    run.do(ev.EvaluationBegun(0, tuple(range(END, END + 4))))
    return run


def checked(run: Run) -> State:
    invariants.check_invariants(run.state)
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state
    return run.state


def test_an_evaluation_is_shared_fairly_and_comes_before_training(run: Run) -> None:
    assert run.granted("anna", 0).slots == (END, END + 1)
    assert run.granted("anna", 0).slots == (0, 1, 2), "its share is out, and it trains meanwhile"
    assert run.granted("ben", 0).slots == (END + 2, END + 3)
    checked(run)


def test_it_is_over_when_all_is_answered_and_its_bytes_are_forgotten_then(run: Run) -> None:
    first, second = run.granted("anna", 0), run.granted("ben", 0)
    run.accept(run.upload(first))
    assert not checked(run).results
    effects = run.accept(run.upload(second))
    assert [effect for effect in effects if isinstance(effect, Evaluated)] == [Evaluated(0)]
    assert {effect.bundle for effect in effects if isinstance(effect, BundleForgotten)} == {"bundle-0", "bundle-1"}
    state = checked(run)
    assert state.results[0].marks == dict.fromkeys(range(END, END + 4), Mark(0, 2, 0.5))
    assert not state.evaluations
    assert state.num_ready == state.num_accepted_groups == 0, "nothing for the trainer"


def test_what_comes_back_is_leased_again(run: Run) -> None:
    lapsed, refused = run.granted("anna", 0), run.granted("ben", 0)
    run.do(ev.LeasesExpired((lapsed.lease_id,)))
    run.refuse(run.upload(refused), RejectReason.UNVERIFIABLE)
    assert checked(run).evaluations[0].open == [END + 3, END + 2, END + 1, END]


def test_a_problem_that_no_worker_can_score_does_not_delay_the_training(run: Run) -> None:
    for _ in range(2 * evaluations.ATTEMPTS_MAX):  # two leases each time
        lease = run.granted("anna", 0)
        assert lease.slots[0] >= END
        run.refuse(run.upload(lease), RejectReason.UNVERIFIABLE)
        checked(run)
    assert checked(run).results[0] == Results(4, {})
    assert run.granted("anna", 0).slots[0] < END


def test_a_policy_that_is_leased_no_more_is_evaluated_no_further(run: Run) -> None:
    slow, lost = run.granted("anna", 0), run.granted("ben", 0)
    for policy in range(RULES.async_level + 1):
        run.train("ben", policy)
    assert checked(run).evaluations[0].retired
    run.do(ev.LeasesExpired((lost.lease_id,)))
    assert not checked(run).evaluations[0].open
    assert Evaluated(0) in run.accept(run.upload(slow))
    assert checked(run).results[0].marks.keys() == {END, END + 1}, "of four"


def test_answers_of_a_worker_that_is_found_out_are_taken_back() -> None:
    run = Run(replace(RULES, strikes_max=1, escrow_bundles=4, audit_share_min=0.1), workers=("anna", "ben"))
    run.do(ev.EvaluationBegun(0, (END, END + 1)))
    run.accept(run.upload(run.granted("anna", 0), audited=False))
    assert checked(run).evaluations[0].accepted
    run.refuse(run.upload(run.granted("anna", 0)), RejectReason.SEED_MISMATCH)
    assert checked(run).evaluations[0].open == [END + 1, END]


def test_an_answer_that_bans_its_worker_is_kept_though_the_evaluation_ends_by_it() -> None:
    run = Run(replace(RULES, strikes_max=1, escrow_bundles=4, audit_share_min=0.1), workers=("anna", "ben"))
    run.do(ev.EvaluationBegun(0, tuple(range(END, END + 3))))
    lease = run.granted("anna", 0, rollouts_max=2)
    first = run.upload(lease)
    run.accept(first)
    run.upload(run.granted("anna", 0, rollouts_max=2), audited=False)
    run.accept(run.upload(run.granted("ben", 0, rollouts_max=2)))
    for policy in range(RULES.async_level + 1):
        run.train("ben", policy)
    effects = run.do(ev.BundleContradicted(lease.lease_id, "anna", "other", (ev.Replaced(first, None),)))
    assert Evaluated(0) in effects
    assert checked(run).evidence == [first]
    assert first not in {effect.bundle for effect in effects if isinstance(effect, BundleForgotten)}


def test_a_late_answer_to_a_finished_evaluation_is_not_accepted(run: Run) -> None:
    late = run.granted("anna", 0)
    run.do(ev.LeasesExpired((late.lease_id,)))
    assert run.state.is_redeemable(late)
    for worker in ("ben", "anna"):
        run.accept(run.upload(run.granted(worker, 0)))
    assert checked(run).results
    assert not run.state.is_redeemable(late)
    assert late.end is LeaseEnd.LAPSED


def test_a_late_answer_to_a_withdrawn_problem_is_not_accepted(run: Run) -> None:
    run.granted("ben", 0)
    for _ in range(evaluations.ATTEMPTS_MAX):
        late = run.granted("anna", 0, rollouts_max=2)
        run.do(ev.LeasesExpired((late.lease_id,)))
        run.now_ms += endings.WASTED_PAUSE_MS_MAX
    assert checked(run).evaluations[0].open == [END + 3], "the other one of hers was asked often enough"
    assert not run.state.is_redeemable(late), "its slot is closed: taking it again would fail, and end the coordinator"


def test_few_results_are_remembered() -> None:
    run = Run(workers=("anna",))
    for policy in range(RULES.max_steps - 1):
        run.do(ev.EvaluationBegun(policy, (END,)))
        run.accept(run.upload(run.granted("anna", policy)))
        run.train("anna", policy)
    assert len(checked(run).results) == min(RULES.max_steps - 1, evaluations.RESULTS_KEPT_MAX)


def test_all_evaluations_that_a_lost_worker_delayed_are_reported() -> None:
    run = Run(replace(RULES, max_steps=12, leases_per_worker_max=8, bundles_pending_per_worker_max=8))
    end, policies = run.state.rules.slots_end, evaluations.RESULTS_KEPT_MAX + 2
    run.join("anna", "ben")
    run.publish()
    for policy in range(policies):
        run.do(ev.EvaluationBegun(policy, (end,)))
        run.granted("anna", policy)
        run.train("ben", policy)
    for policy in range(policies, policies + RULES.async_level):
        run.train("ben", policy)
    ended = [effect for effect in run.do(ev.WorkersLost(("anna",))) if isinstance(effect, Evaluated)]
    assert len(ended) == policies
    assert checked(run).results.keys() == {effect.policy_version for effect in ended}, "the daemon reads each"
