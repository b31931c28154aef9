"""Baselines and choices of single tokens: optimal token baseline, Clip-Cov, KL-Cov."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.node.batch_coordinator import BatchCoordinator, make_run, write_model
from tests.node.trainer_world import CONFIG, make_trainer, rows

from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.advantages import AdvantageInputs, RolloutView, TokenNeed, find_advantage
from prime_node.algo.losses import LossInputs, find_loss, needs
from prime_node.algo.losses.covariance import choose_clip_cov, choose_kl_cov
from prime_node.ports.train_backend import LossNeed
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.other_policies import with_selected
from prime_node.trainer.recipe import Recipe
from prime_protocol.errors import LocalError

NORMS = ((0.5, 0.5, 1.0), (1.0,))
"""Score norms of two rollouts of three tokens and one of one: W is 0.5, 1, 2 and 1."""


def token_baseline(rewards: tuple[float, ...], norms: Any = NORMS, costs: Any = None, **settings: Any) -> Any:
    group = AdvantageInputs(tuple(map(RolloutView, rewards)))
    advantage = find_advantage("optimal_token_baseline", kwargs=settings)
    return advantage.of_tokens(group, costs or [[0.0] * len(its) for its in norms], score_norms=norms)


def test_the_optimal_baseline_of_a_token_is_by_hand() -> None:
    """At token 0: (1 * 0.5 + 0.4 * 1) / 1.5 = 0.6; beyond the second longest there is no baseline, or its own return."""
    assert token_baseline((1.0, 0.4)) == [pytest.approx([0.4, 1.0, 1.0]), pytest.approx([-0.2])]
    whole = token_baseline((1.0, 0.4), handle_zero_tail=False)
    assert whole == [pytest.approx([0.4, 0.0, 0.0], abs=1e-7), pytest.approx([-0.2])]
    costly = token_baseline((1.0, 0.4), costs=[[0.1, 0.0, 0.3], [0.0]])
    baseline = (0.6 * 0.5 + 0.4) / 1.5
    assert costly == [pytest.approx([0.6 - baseline, 0.7, 0.7]), pytest.approx([0.4 - baseline])]


def test_groups_that_teach_nothing_get_exactly_nothing() -> None:
    assert token_baseline((0.7, 0.7)) == [[0.0] * 3, [0.0]]
    assert token_baseline((0.7,), norms=((0.5, 0.5),)) == [[0.0, 0.0]]
    assert token_baseline((0.7, 0.1), norms=((0.5,), ())) == [[0.0], []]
    assert token_baseline((), norms=()) == []
    certain = token_baseline((1.0, 0.0), norms=((0.0,), (0.0,)))
    assert certain == [[1.0], [0.0]], "certain tokens have no gradient"


ADVANTAGES = (1.0, -1.0, 3.0, 0.0, -3.0)
LOGPROBS = (-1.0, -2.0, -0.5, -3.0, -3.5)
"""Means 0 and -2: the covariances are 1, 0, 4.5, 0, 4.5."""


def test_kl_cov_chooses_the_largest_covariances_of_the_whole_step() -> None:
    def chosen(ratio: float) -> set[int]:
        return choose_kl_cov(ADVANTAGES, LOGPROBS, (0.0,) * 5, Random(0), kl_cov_ratio=ratio)

    assert chosen(0.0002) == {2}, "at least one"
    assert chosen(0.4) == {2, 4}
    assert chosen(0.6) == {0, 2, 4}
    assert choose_kl_cov((), (), (), Random(0)) == set()
    with pytest.raises(LocalError, match=r"kl_cov_ratio = 0\.0: expected a share above 0"):
        chosen(0.0)


def test_clip_cov_chooses_at_random_between_its_bounds_what_ppo_does_not_clip() -> None:
    def chosen(seed: int, log_ratios: tuple[float, ...] = (0.0,) * 5, **settings: float) -> set[int]:
        return choose_clip_cov(ADVANTAGES, LOGPROBS, log_ratios, Random(seed), **settings)

    counts = Counter(next(iter(chosen(seed))) for seed in range(100))
    assert counts.keys() == {2, 4}, "bounds 1 and 5 are exclusive"
    assert min(counts.values()) > 30
    assert chosen(1) == chosen(1)
    assert chosen(0, clip_cov_ratio=0.4) == {2, 4}
    assert chosen(0, clip_cov_lb=0.5, clip_cov_ub=4.0) == {0}
    assert chosen(0, clip_cov_lb=5.0, clip_cov_ub=9.0) == set()
    clipped = (0.0, 0.0, math.log(1.21), 0.0, math.log(0.79))
    assert chosen(0, clipped, clip_cov_ratio=1.0) == set(), "PPO clips both"
    with pytest.raises(LocalError, match="clip_cov_ratio"):
        chosen(0, clip_cov_ratio=-1.0)
    far = (0.0, 0.0, -1e4, 0.0, 1e4)
    assert chosen(0, far, clip_cov_ratio=1.0) == {2, 4}, "ratios beyond any float"
    low = (0.0, 0.0, 0.0, 0.0, -1e4)
    assert chosen(0, low, clip_cov_ratio=1.0) == {2}
    assert chosen(0, low, clip_cov_ratio=1.0, eps_low=1.0) == {2, 4}, "no ratio is below 0"


def test_only_trainable_tokens_of_mode_rl_are_chosen(tmp_path: Path) -> None:
    backend = TorchBackend(write_model(tmp_path / "model"))
    config = TrainerConfig.load({"trainer": {"loss": {"type": "kl_cov", "kl_cov_ratio": 1.0}}})
    recipe = Recipe.of(config, max_steps=1, completion_tokens_max=4, vocab_size=264)
    batch = [
        TrainSample((258, 259), (30, 31), (-5.0, -5.0), 1.0, loss_mask=(True, False)),
        TrainSample((258, 259), (30,), (-5.0,), 1.0, mode=TrainingMode.SFT),
        TrainSample((258, 259), (31,), (-5.0,), 0.0, advantages=(-1.0,)),
    ]
    found = with_selected(batch, recipe, backend, seed=0)
    assert [sample.selected for sample in found] == [(True, False), (False,), (True,)]


def test_a_claim_of_any_size_neither_ends_the_step_nor_is_chosen(tmp_path: Path) -> None:
    backend = TorchBackend(write_model(tmp_path / "model"))
    loss = {"type": "clip_cov", "clip_cov_lb": -1e9, "clip_cov_ub": 1e9, "clip_cov_ratio": 1.0}
    config = TrainerConfig.load({"trainer": {"loss": loss, "use_rollout_log_probs": True}})
    recipe = Recipe.of(config, max_steps=1, completion_tokens_max=4, vocab_size=264)
    claims = (-1e4, -5.5)
    claimed = TrainSample((258, 259), (30, 31), claims, -1.0, prox_logprobs=claims, claim_nats_max=2.0)
    (found,) = with_selected([claimed], recipe, backend, seed=0)
    assert found.selected == (False, True)
    (found,) = with_selected([replace(claimed, claim_nats_max=math.inf)], recipe, backend, seed=0)
    assert found.selected == (True, True)


@needs("selected")
def own(inputs: LossInputs) -> Any:
    """A custom loss cannot choose."""


def test_a_custom_loss_that_asks_for_a_choice_is_refused() -> None:
    loss = find_loss("own", import_path=f"{__name__}.own")
    assert loss.needs == {LossNeed.SELECTED}
    with pytest.raises(LocalError, match="only clip_cov and kl_cov choose tokens"):
        loss.choose([], [], [], seed=0)


def test_a_tokens_score_norm_is_that_of_the_gradient_by_its_logits(tmp_path: Path) -> None:
    """|e_y - p|^2 = 1 - 2 p_y + sum of p^2, with p from the policy's snapshot by transformers; tolerance: float32."""
    backend = TorchBackend(write_model(tmp_path / "model"), published_dtype="fp32")
    sample = TrainSample((258, 10, 259), (30, 31), (-5.0, -5.0), 1.0)
    (found,) = backend.score_norms([sample])
    vocabulary = [TrainSample((258, 10, 259), (token,), (-5.0,), 1.0) for token in range(264)]
    first = torch.tensor(backend.logprobs(vocabulary), dtype=torch.float64)[:, 0].exp()
    one_hot = torch.nn.functional.one_hot(torch.tensor(30), 264).double()
    assert found[0] == pytest.approx(float((one_hot - first).square().sum()), rel=1e-5)
    assert len(found) == 2


def test_a_certain_tokens_score_norm_is_not_negative(tmp_path: Path) -> None:
    """At a low temperature the likeliest token's is 0 but for float32, which also rounds below it."""
    backend = TorchBackend(write_model(tmp_path / "model"), published_dtype="fp32", temperature=1e-2)
    prompts = [TrainSample((258, token), (30,), (-5.0,), 1.0) for token in range(256)]
    likeliest = [int(top.token_ids_NK[0, 0]) for top in backend.top_logprobs(prompts, 1)]
    certain = [replace(one, completion_token_ids=(token,)) for one, token in zip(prompts, likeliest, strict=True)]
    assert min(norm for norms in backend.score_norms(certain) for norm in norms) == 0.0


async def test_a_run_trains_with_a_baseline_of_tokens_and_a_choice_of_tokens(tmp_path: Path) -> None:
    normalized = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    choice = {"type": "clip_cov", "clip_cov_lb": -99.0, "clip_cov_ub": 99.0, "clip_cov_ratio": 0.5}
    changes = {"loss": choice | normalized}
    config = TrainerConfig.model_validate(
        CONFIG.model_dump() | changes | {"advantage": {"type": "optimal_token_baseline"}}
    )
    recipe = Recipe.of(config, max_steps=2, completion_tokens_max=4, vocab_size=264)
    assert recipe.advantage.needs == {TokenNeed.SCORE_NORMS}
    assert recipe.credits_by_weights
    coordinator = BatchCoordinator(make_run(max_steps=2, async_level=2))
    assert await run_trainer(make_trainer(tmp_path, coordinator, config=config), asyncio.Event())
    shares = [float(str(row["selected_share"])) for row in rows(tmp_path, "selected_share")]
    assert len(shares) == 2
    means = [float(str(row["rollout_is_mean"])) for row in rows(tmp_path, "rollout_is_mean")]
    assert means == pytest.approx([1.0, 1.0], rel=1e-4)
    assert all(0.4 < share <= 0.5 for share in shares)
