"""References that a validator samples for unseeded bundles, and the evidence from comparing rewards with them."""

from __future__ import annotations

import asyncio

import pytest
from tests.node.references_world import COMPARED, RUN, sampled
from tests.node.validator_world import (
    LengthEnvironment,
    MemoryCheckQueue,
    TableScorer,
    make_lease,
    make_validator,
)
from tests.node.worker_world import make_run

from prime_node.cli.deciding_bundle import compared
from prime_node.ports.environment import EnvironmentGone
from prime_node.validator.judge import with_ranks
from prime_node.validator.loop import run_validator as run_validator
from prime_node.validator.references import choose_groups
from prime_node.validator.scoring import Scored
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.evidence import BundleEvidence, ComparedRewards
from prime_protocol.limits import COMPARED_REWARDS_MAX
from prime_protocol.requests import CheckResultRequest
from prime_protocol.reward_ranks import REWARD_RANKS, rank_sums
from prime_protocol.run_spec import PinnedRun, RunSpec
from prime_protocol.verdict import RejectReason


async def judged(
    parcel: bytes, lease: Lease, environment: type[LengthEnvironment] = LengthEnvironment, run: PinnedRun = RUN
) -> CheckResultRequest:
    stop = asyncio.Event()
    queue = MemoryCheckQueue([(lease, parcel)], stop)
    validator = make_validator(queue, TableScorer(), environment=environment)
    validator.run, validator.comparisons.secret = run, bytes(32)
    await run_validator(validator, stop)
    return queue.results[digest_of(parcel)]


async def test_unseeded_rewards_are_compared_and_the_best_of_several_rank_high() -> None:
    lease = make_lease()
    honest, best = [await judged(await sampled(num, lease), lease) for num in (1, 8)]
    assert (honest.verdict.accepted, best.verdict.accepted) == (True, True), "one bundle alone decides nothing else"
    assert honest.evidence is not None
    assert best.evidence is not None
    assert set(honest.evidence.sums) == set(REWARD_RANKS)
    assert honest.evidence.sums["rewards_above"].num_tokens == lease.num_rollouts
    assert max(honest.evidence.sums["rewards_above"].log_e) < 2
    assert max(best.evidence.sums["rewards_above"].log_e) > 5
    assert max(best.evidence.sums["rewards_below"].log_e) < 0


def test_a_check_of_a_dossier_reports_whether_ranks_can_be_repeated() -> None:
    claimed = BundleEvidence(worker="a", validator="b", sums=rank_sums([([1.0] * 8, [0.0] * 8)]))
    assert "does not repeat" in compared(claimed, None)
    rewards = (ComparedRewards(mine=(1.0,) * 8, trusted=(0.0,) * 8),)
    assert "as the rewards in its receipt do" in compared(claimed.model_copy(update={"compared": rewards}), None)


async def test_compared_rewards_are_sent_if_the_run_asks_for_them_and_give_the_same_sums() -> None:
    lease, checks = make_lease(), COMPARED.model_copy(update={"references_public": True})
    result = await judged(await sampled(1, lease), lease, run=make_run(rollouts_per_group=16, checks=checks))
    assert result.evidence is not None
    assert len(result.evidence.compared) == len(lease.groups)
    assert rank_sums([(one.mine, one.trusted) for one in result.evidence.compared]) == result.evidence.sums
    scored = Scored((1.0,) * lease.num_rollouts, (), "", enough=True, spread_mean=None)
    empty, beyond = result.evidence.model_copy(update={"sums": {}, "compared": ()}), {0: (0.0,) * COMPARED_REWARDS_MAX}
    summed = await with_ranks(empty, lease, scored, beyond, spec=RUN.spec.model_copy(update={"checks": checks}))
    assert set(summed.sums) == set(REWARD_RANKS)
    assert summed.compared == (), "what is too much to tell is summed all the same"
    one_is_missing = Scored(tuple(range(lease.num_rollouts)), (1,), "", enough=True, spread_mean=None)
    ranked = await with_ranks(
        empty, lease, one_is_missing, {0: (0.0,)}, spec=RUN.spec.model_copy(update={"checks": checks})
    )
    assert ranked.compared[0].mine == (0, *range(2, 16)), "what could not be scored is no reward of the worker's"


async def test_a_bundle_that_contains_one_text_twice_is_rejected_as_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = make_lease()
    monkeypatch.setattr("prime_node.validator.judge.is_repetitive", lambda marks: True)
    result = await judged(await sampled(1, lease), lease)
    assert (result.verdict.reason, result.rewards) == (RejectReason.COPIED, ())


async def test_what_an_environment_cannot_score_is_compared_with_nothing() -> None:
    class Fragile(LengthEnvironment):
        """An environment that scores as many answers as the worker sent, and then ends."""

        left = make_lease().num_rollouts

        def score(self, index: int, completion: str, *, finished: bool) -> float:
            Fragile.left -= 1
            if Fragile.left < 0:
                raise EnvironmentGone("its process has ended")
            return super().score(index, completion, finished=finished)

    lease = make_lease()
    result = await judged(await sampled(1, lease), lease, environment=Fragile)
    assert result.verdict.accepted
    assert result.evidence is not None
    assert result.evidence.sums == {}


async def test_references_are_of_an_unpredictable_share_of_the_groups() -> None:
    lease = make_lease()
    group = lease.groups[0]
    many = lease.model_copy(update={"groups": (group,) * 8})

    async def chosen(spec: RunSpec, bundle: str, secret: bytes) -> tuple[int, ...]:
        found = choose_groups(many, spec=spec, bundle=bundle, secret=secret)
        assert all(len(requests) == len(group.seeds) for requests in found.values())
        return tuple(found)

    half = RUN.spec.model_copy(update={"checks": COMPARED.model_copy(update={"reference_share": 0.5})})
    shares = [await chosen(half, str(number), bytes(32)) for number in range(30)]
    assert 0.4 < sum(map(len, shares)) / 240 < 0.6
    assert await chosen(half, "5", bytes(32)) == shares[5], "the same bundle is compared with the same completions"
    assert [await chosen(half, str(number), b"x" * 32) for number in range(30)] != shares
    answering = [one.model_copy(update={"turns_max": 2}) for one in RUN.spec.environments]
    assert await chosen(RUN.spec.model_copy(update={"environments": tuple(answering)}), "5", bytes(32)) == ()
