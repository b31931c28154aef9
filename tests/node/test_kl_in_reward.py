"""The divergence from the reference policy in the reward: by hand, per token, with a fixed and an adaptive coefficient."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.node.batch_coordinator import write_model
from tests.node.trainer_world import CONFIG, check_kill_in_a_step, rows

from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.kl_control import KlControl, KlControlKind
from prime_node.algo.losses import find_loss
from prime_node.ports.train_backend import KeptPolicy
from prime_node.ports.train_samples import Group, TrainSample
from prime_node.trainer.batch import MiniBatch, Prepared, prepare, samples_of
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.other_policies import credited
from prime_node.trainer.recipe import Recipe
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.turns import Turn

COSTS = [[[0.1, 0.2], [0.0, 0.0]]]


def group(*rewards: float) -> Group:
    completion = Completion((30, 31), (-5.0, -5.5), FinishReason.STOP)
    return Group(0, (258, 10, 259), (completion,) * len(rewards), rewards, (0,) * len(rewards), "worker")


def recipe_of(**settings: Any) -> Recipe:
    config = TrainerConfig.load({"trainer": {"filters": []} | settings})
    return Recipe.of(config, max_steps=9, completion_tokens_max=4, vocab_size=264)


def with_costs(costs: Any = COSTS, **advantage: Any) -> Prepared:
    return prepare([group(1.0, 0.0)], recipe_of(advantage=advantage), step=0, costs=costs)


def test_an_adaptive_coefficient_moves_towards_its_target_by_a_fifth_at_most() -> None:
    """Errors of 0.1 and of a clipped 0.2 and -0.2, over 1,000 of 10,000 rollouts."""
    control = KlControl(KlControlKind.ADAPTIVE, horizon=10_000, target_kl=0.1)
    assert control.after(0.5, 0.11, 1_000) == pytest.approx(0.5 * 1.01)
    assert control.after(0.5, 9.0, 1_000) == pytest.approx(0.5 * 1.02)
    assert control.after(0.5, -9.0, 1_000) == pytest.approx(0.5 * 0.98)
    assert KlControl().after(0.5, 9.0, 1_000) == 0.5
    hasty = KlControl(KlControlKind.ADAPTIVE, horizon=10.0, target_kl=0.1)
    assert hasty.after(0.5, 0.0, 1_000) == 0.0, "a step of 20 times the coefficient"


def test_a_group_compares_rewards_less_the_divergence_of_whole_rollouts() -> None:
    """verl: scores 1 - 0.3 and 0, whose mean is 0.35."""
    for name, factor in (("group_mean", 1.0), ("leave_one_out", 2.0)):
        samples = with_costs(type=name).samples
        assert [sample.advantages for sample in samples] == [
            pytest.approx((0.35 * factor,) * 2),
            pytest.approx((-0.35 * factor,) * 2),
        ]


def test_a_token_answers_for_the_divergence_from_there_on() -> None:
    """OpenRLHF: advantages 0.5 and -0.5, less 0.3 and 0.2 at the two tokens of the first rollout; NeMo-RL: less 0.1 and 0.2."""
    samples = with_costs(kl_credit="return").samples
    assert [sample.advantages for sample in samples] == [pytest.approx((0.2, 0.3)), (-0.5, -0.5)]
    assert [sample.advantage for sample in samples] == pytest.approx([0.3, -0.5]), "what filters see"
    assert with_costs(kl_credit="token").samples[0].advantages == pytest.approx((0.4, 0.3))


def test_reinforce_plus_plus_discounts_the_rewards_of_tokens() -> None:
    """Rewards of tokens -0.1, 0.8 and 0, 0; with gamma 0.5 the returns are 0.3, 0.8, 0, 0: mean 0.275, squares 0.4275."""
    plain = with_costs(type="reinforce_plus_plus", whiten=False, gamma=0.5).samples
    assert [sample.advantages for sample in plain] == [pytest.approx((0.3, 0.8)), (0.0, 0.0)]
    deviation = math.sqrt((0.73 - 4 * 0.275**2) / 3 + 1e-8)
    found = [value for one in with_costs(type="reinforce_plus_plus", gamma=0.5).samples for value in one.advantages]
    assert found == pytest.approx([(value - 0.275) / deviation for value in (0.3, 0.8, 0.0, 0.0)])
    without = prepare([group(1.0, 0.0)], recipe_of(advantage={"type": "reinforce_plus_plus", "gamma": 0.5}), step=0)
    deviation = math.sqrt((1.25 - 4 * 0.375**2) / 3 + 1e-8)
    assert without.samples[0].advantages == pytest.approx((0.125 / deviation, 0.625 / deviation))


def test_a_discount_of_another_advantage_is_refused() -> None:
    with pytest.raises(LocalError, match="advantage group_mean: got an unexpected keyword argument 'gamma'"):
        recipe_of(advantage={"type": "group_mean", "gamma": 0.9})


def test_an_environments_tokens_have_no_advantage_and_cost_nothing() -> None:
    """Two turns of two and one sampled tokens, with one token of the environment between them; another rollout of one."""
    first, second = (Completion(ids, (-1.0,) * len(ids), FinishReason.STOP) for ids in ((30, 31), (32,)))
    turns = (Turn((258, 259), first), Turn((258, 259, 30, 31, 40), second))
    whole = Completion((30, 31, 32), (-1.0,) * 3, FinishReason.STOP)
    episode = Group(0, (258, 259), (whole, second), (1.0, 0.0), (0, 0), "worker", turns=(turns, (turns[0],)))
    recipe = recipe_of(advantage={"kl_credit": "return"})
    rollouts = samples_of([episode], recipe)
    found = prepare([episode], recipe, step=0, rollouts=rollouts, costs=[[[0.1, 0.1, 0.2], [0.0, 0.0]]]).samples
    assert found[0].loss_mask == (True, True, False, True)
    assert found[0].advantages == pytest.approx((0.5 - 0.4, 0.5 - 0.3, 0.0, 0.5 - 0.2))


def test_rollouts_without_tokens_change_nothing() -> None:
    """Such as one whose samples are longer than the model's positions."""
    for name in ("group_mean", "reinforce_plus_plus"):
        recipe, groups = recipe_of(advantage={"type": name}), [group(1.0, 0.0)]
        rollouts = [[[], samples_of(groups, recipe)[0][1]]]
        (sample,) = prepare(groups, recipe, step=0, rollouts=rollouts, costs=[[[], [0.0, 0.0]]]).samples
        assert all(map(math.isfinite, sample.advantages))


def test_the_loss_takes_the_advantage_of_each_token(tmp_path: Path) -> None:
    """The gradient of a sample whose tokens have advantages of their own is the sum of those of two masked samples."""
    backend = TorchBackend(write_model(tmp_path / "model"), published_dtype="fp32")
    base = TrainSample((258, 10, 259), (30, 31), (-5.5, -5.5), 0.0)
    parts = [
        replace(base, advantage=0.4, loss_mask=(True, False)),
        replace(base, advantage=-0.2, loss_mask=(False, True)),
    ]
    loss, (ours,) = find_loss("aipo"), backend.logprobs([base])
    expected = -(0.4 * math.exp(ours[0] + 5.5) - 0.2 * math.exp(ours[1] + 5.5)) / 2
    one = backend.train_step([replace(base, advantages=(0.4, -0.2))], loss, lr=0.0)
    two = backend.train_step(parts, loss, lr=0.0)
    assert one.loss == pytest.approx(expected, rel=1e-5) == two.loss
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-5)


def test_a_rollout_is_filtered_only_if_no_token_has_an_advantage() -> None:
    """Discounted by 0, only the token with the reward has one, and it is the last."""
    recipe = recipe_of(
        advantage={"type": "reinforce_plus_plus", "whiten": False, "gamma": 0.0}, filters=[{"type": "zero_advantage"}]
    )
    found = prepare([group(1.0, 0.0)], recipe, step=0)
    assert [sample.advantages for sample in found.samples] == [(0.0, 1.0)]
    assert found.metrics["filtered_zero_advantage"] == 1


def test_the_divergence_is_that_of_the_policy_before_the_step(tmp_path: Path) -> None:
    backend = TorchBackend(write_model(tmp_path / "model"))
    backend.keep_policy(KeptPolicy.REFERENCE)
    sample = TrainSample((258, 10, 259), (30, 31), (-5.5, -5.5), 1.0)
    for _ in range(3):
        backend.train_step([sample], find_loss("aipo"), lr=1e-2)
    settings = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.5, "type": "adaptive"}}
    recipe, groups = recipe_of(**settings), [group(1.0, 0.0)]
    mini = MiniBatch(groups, samples_of(groups, recipe), None, None)
    found = credited(mini, recipe, backend, step=0, kl_coef=None, keeps=False)
    (old,) = backend.logprobs([sample])
    (reference,) = backend.logprobs([sample], KeptPolicy.REFERENCE)
    kl = [a - b for a, b in zip(old, reference, strict=True)]
    assert abs(sum(kl)) > 1e-3
    assert found.numbers["reward_kl_penalty"] == pytest.approx(sum(kl) / 2, rel=1e-5)
    assert found.numbers["reward_kl_penalty_coeff"] == 0.5
    assert found.kl_coef != 0.5
    assert found.prepared.samples[0].advantages == pytest.approx((0.5, 0.5)), "both rollouts cost the same"
    assert found.prepared.samples[0].reference_logprobs == pytest.approx(tuple(reference))
    assert credited(mini, recipe, backend, step=0, kl_coef=0.25, keeps=False).numbers["reward_kl_penalty_coeff"] == 0.25
    fixed = recipe_of(use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.5})
    found = credited(mini, fixed, backend, step=0, kl_coef=0.25, keeps=False)
    assert found.numbers["reward_kl_penalty_coeff"] == 0.5, "the setting, not an earlier adapted one"
    assert found.kl_coef is None


def test_only_rollouts_of_mode_rl_count_in_the_mean_divergence(tmp_path: Path) -> None:
    backend = TorchBackend(write_model(tmp_path / "model"))
    backend.keep_policy(KeptPolicy.REFERENCE)
    for _ in range(3):
        backend.train_step([TrainSample((258, 10, 259), (30, 31), (-5.5, -5.5), 1.0)], find_loss("aipo"), lr=1e-2)
    control = {"kl_coef": 0.5, "type": "adaptive", "horizon": 100.0}
    recipe = recipe_of(use_kl_in_reward=True, kl_ctrl=control, environment_modes={"copies": "sft"})
    alone, other = group(1.0, 0.0), replace(group(1.0, 0.0), environment="copies")
    found = []
    for groups in ([alone], [alone, other]):
        mini = MiniBatch(groups, samples_of(groups, recipe), None, None)
        found.append(credited(mini, recipe, backend, step=0, kl_coef=None, keeps=False))
    assert found[0].numbers["reward_kl_penalty"] == pytest.approx(found[1].numbers["reward_kl_penalty"], rel=1e-4)
    assert found[0].kl_coef == pytest.approx(found[1].kl_coef, rel=1e-6)


def test_claimed_logprobs_never_become_rewards() -> None:
    with pytest.raises(LocalError, match="use_kl_in_reward with use_rollout_log_probs makes rewards of logprobs"):
        recipe_of(use_kl_in_reward=True, use_rollout_log_probs=True)


def test_settings_choose_it_and_the_default_has_none() -> None:
    assert recipe_of().kl_in_reward is None
    assert not recipe_of().needs_reference
    recipe = recipe_of(use_kl_in_reward=True, kl_penalty="low_var_kl")
    assert recipe.needs_reference
    assert recipe.credits_by_weights
    with pytest.raises(LocalError, match="KL estimator 'full': expected one of"):
        recipe_of(use_kl_in_reward=True, kl_penalty="full")


async def test_a_run_with_an_adaptive_coefficient_continues_bit_exactly_after_a_kill(tmp_path: Path) -> None:
    changes = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "horizon": 100.0}}
    config = TrainerConfig.model_validate(CONFIG.model_dump() | changes)
    await check_kill_in_a_step(tmp_path, config)
    penalties = [float(str(row["reward_kl_penalty"])) for row in rows(tmp_path / "whole", "reward_kl_penalty")]
    coefficients = [float(str(row["reward_kl_penalty_coeff"])) for row in rows(tmp_path / "whole", "reward_kl_penalty")]
    assert penalties[0] == 0.0
    assert penalties[-1] != 0.0
    assert coefficients[0] == 0.5
    assert len(set(coefficients)) > 1
