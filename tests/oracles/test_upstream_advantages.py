"""Advantages and reward shaping on the inputs of other frameworks' own unit tests, against the values that these tests expect."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from prime_node.algo.advantages import AdvantageInputs, OverlongPenalty, RolloutView, find_advantage
from prime_node.trainer.credit import whitened, whitened_tokens
from prime_protocol.errors import LocalError


def group(
    rewards: Sequence[float], lengths: Sequence[int] = (), parts: Sequence[dict[str, float]] = ()
) -> AdvantageInputs:
    lengths, parts = lengths or (1,) * len(rewards), parts or ({},) * len(rewards)
    return AdvantageInputs(
        tuple(
            RolloutView(reward, completion_ids=(0,) * length, reward_parts=more)
            for reward, length, more in zip(rewards, lengths, parts, strict=True)
        )
    )


def by_token(name: str, rewards: Sequence[float], values: Sequence[float] = (), **settings: Any) -> list[float]:
    """Return the advantages of one rollout with a reward at each token, the last of which is its own."""
    *costs, last = [-reward for reward in rewards]
    inputs, more = AdvantageInputs((RolloutView(-last),)), {"values": [values]} if values else {}
    (found,) = find_advantage(name, kwargs=settings).of_tokens(inputs, [[*costs, 0.0]], **more)
    return found


def test_prime_rls_means() -> None:
    """PrimeIntellect-ai/prime-rl, tests/unit/orchestrator/test_advantage.py at 00c3be86."""
    mean = find_advantage("group_mean")
    assert [*mean(group((1.0, 0.0))), *mean(group((0.5, 0.5)))] == [0.5, -0.5, 0.0, 0.0]
    by_length = find_advantage("opo")(group((1.0, 0.0), (100, 10)))
    assert by_length == pytest.approx((0.0909, -0.9091), abs=1e-4)


def test_skyrls_outcome_advantages() -> None:
    """NovaSky-AI/SkyRL, tests/backends/skyrl_train/utils/test_ppo_utils.py at 0be108ee."""
    groups = [group((6.0, 3.0)), group((9.0, 12.0)), group((1.0,))]

    def found(name: str, count: int) -> list[float]:
        return [value for its in groups[:count] for value in find_advantage(name)(its)]

    assert found("leave_one_out", 3) == [3.0, -3.0, -3.0, 3.0, 0.0]
    assert found("group_mean", 2) == [1.5, -1.5, -1.5, 1.5]
    assert found("max_rl", 2) == pytest.approx([1.5 / 4.5, -1.5 / 4.5, -1.5 / 10.5, 1.5 / 10.5], abs=1e-5)


def test_skyrls_returns() -> None:
    """The same file: REINFORCE++ and GAE over rewards 1, 2, 3."""
    rewards, values = (1.0, 2.0, 3.0), (0.5, 1.0, 1.5)
    assert by_token("reinforce_plus_plus", rewards[:2]) == pytest.approx([3.0, 2.0])
    assert by_token("reinforce_plus_plus", rewards, gamma=0.5) == pytest.approx([2.75, 3.5, 3.0])

    def returns(**settings: float) -> list[float]:
        found = by_token("gae", rewards, values, **settings)
        return [advantage + value for advantage, value in zip(found, values, strict=True)]

    assert returns() == pytest.approx([6.0, 5.0, 3.0])
    assert returns(gamma=0.5) == pytest.approx([2.75, 3.5, 3.0])
    assert returns(lam=0.5) == pytest.approx([3.625, 4.25, 3.0])
    assert whitened_tokens([[5.5, 1.5]])[0] == pytest.approx([0.7071, -0.7071], abs=1e-4), "of its tokens 0 and 2"


def test_nemo_rls_estimation_of_advantages_skips_tokens_of_the_environment() -> None:
    """NVIDIA-NeMo/RL, tests/unit/algorithms/test_gae.py at 00925dd1: the recurrence, at its discounts and lambdas."""
    rewards, values = (0.3, -0.2, 1.0), (0.2, 0.5, 0.8)
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (1.0, 0.8), (0.99, 1.0), (1.0 - 1e-7, 1.0), (1.0, 0.5)):
        deltas = [
            reward + gamma * after - now for reward, (now, after) in zip(rewards, pairwise((*values, 0.0)), strict=True)
        ]
        last = deltas[2]
        middle = deltas[1] + gamma * lam * last
        expected = [deltas[0] + gamma * lam * middle, middle, last]
        assert by_token("gae", rewards, values, gamma=gamma, lam=lam) == pytest.approx(expected, rel=1e-13)


def test_nemo_rls_and_openrlhfs_baselines_are_of_the_rollouts_that_count() -> None:
    """NeMo-RL, test_advantage_validity.py at 1b3c83e1, and OpenRLHF, tests/test_experience_maker.py at dd3096bc.

    A rollout that does not count is not in the group at all here.
    """
    assert find_advantage("group_mean")(group((1.0, 3.0, 2.0))) == (-1.0, 1.0, 0.0)
    assert find_advantage("group_mean")(group((1.0, 3.0))) == (-1.0, 1.0)
    assert find_advantage("group_mean")(group((1.0,))) == (0.0,)


def test_nemo_rls_and_openrlhfs_penalty_of_long_completions() -> None:
    """NeMo-RL, test_reward_functions.py at 073bf0ce; OpenRLHF, tests/test_length_penalty.py at 476954d4."""
    shaped = OverlongPenalty(5, 0.5, 25).shaped(group((1.0, 0.8, 0.6, 0.4), (10, 22, 25, 30)))
    assert shaped.rewards == pytest.approx((1.0, 0.6, 0.1, -0.6))
    assert OverlongPenalty(5, 1.0, 25).shaped(group((1.0, 0.5, 0.8), (10, 15, 18))).rewards == (1.0, 0.5, 0.8)
    assert OverlongPenalty(3, 1.0, 8).shaped(group((1.0, 1.0), (5, 7))).rewards == pytest.approx((1.0, 1.0 - 2.0 / 3.0))


GDPO = {"gdpo_reward_keys": "accuracy,format"}


def test_verls_gdpo() -> None:
    """verl-project/verl, tests/trainer/ppo/test_gdpo_on_cpu.py at 67ebf66d and test_core_algos_on_cpu.py at 0b5f8819."""
    parts = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)]
    named = [{"accuracy": accuracy, "format": kind} for accuracy, kind in parts]
    gdpo = find_advantage("gdpo", kwargs=GDPO)
    found = [gdpo(group((0.0, 0.0), (2, 2), named[start : start + 2])) for start in (0, 2)]
    white = whitened(found, [(2, 2), (2, 2)])
    assert white[0] == pytest.approx((0.0, 0.0), abs=1e-6)
    assert white[1][0] < 0.0 < white[1][1]
    assert sum(map(sum, white)) == pytest.approx(0.0, abs=1e-6)
    other = find_advantage("gdpo", kwargs=GDPO | {"gdpo_reward_weights": "1,5"})
    assert other(group((0.0, 0.0), (), named[:2])) != gdpo(group((0.0, 0.0), (), named[:2]))
    for weights in ("1", "1,1,1"):
        with pytest.raises(LocalError, match="expected 2 numbers"):
            find_advantage("gdpo", kwargs=GDPO | {"gdpo_reward_weights": weights})


def test_slimes_returns_with_a_divergence() -> None:
    """THUDM/slime, tests/test_discounted_returns.py at ced43c97: the divergence of sampled tokens, at a discount of 0.99."""
    for reward, divergences in ((2.0, (0.1, 0.3, 0.4)), (-1.0, (0.4, 0.2, 0.1))):
        rewards = [-0.1 * value for value in divergences]
        rewards[-1] += reward
        expected = [sum(0.99 ** (later - place) * rewards[later] for later in range(place, 3)) for place in range(3)]
        assert by_token("reinforce_plus_plus", rewards, gamma=0.99) == pytest.approx(expected)
