"""The rollout correction of any loss: weights, rejection, and what it composes, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.node.batch_coordinator import write_model

from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.adapters.training.torch_batch import loss_inputs
from prime_node.algo.losses import LossInputs, LossOutputs, RolloutCorrection, find_loss
from prime_node.algo.losses.objective import Aggregation
from prime_node.ports.train_backend import AggregationKind
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_node.trainer.batch import mode_weighed, prompt_weighed
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.other_policies import with_weight_mean
from prime_node.trainer.recipe import Recipe
from prime_protocol.errors import LocalError

WEIGHTS = (0.25, 1.0, 3.0, 1.0, 1.2)
"""pi_prox / mu of each token: one sequence of three, one of two."""


def given(*, prox: bool = True) -> LossInputs:
    mu = torch.tensor([-4.0, -2.0, -3.0, -1.0, -2.5], dtype=torch.float64)
    prox_logprobs = mu + torch.tensor(WEIGHTS, dtype=torch.float64).log()
    pi = prox_logprobs + torch.tensor([0.1, -0.3, 0.05, 0.4, -0.1], dtype=torch.float64)
    return LossInputs(
        pi.requires_grad_(),
        mu,
        torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5], dtype=torch.float64),
        torch.ones(5, dtype=torch.bool),
        prox_logprobs=prox_logprobs if prox else None,
        lengths=(3, 2),
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rollout_is": "token"}, [0.25, 1.0, 2.0, 1.0, 1.2]),
        ({"rollout_is": "token", "rollout_is_threshold": "inf"}, list(WEIGHTS)),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_2"}, [0.0, 1.0, 0.0, 1.0, 1.2]),
        ({"rollout_is": "sequence", "rollout_is_threshold": "1.1"}, [0.75] * 3 + [1.1] * 2),
        ({"rollout_is": "geometric"}, [0.75 ** (1 / 3)] * 3 + [1.2**0.5] * 2),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2"}, [0.0, 1.0, 0.0, 1.0, 1.0]),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_4.1"}, [1.0, 1.0, 0.0, 1.0, 0.0]),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.7"}, [0.0, 1.0, 1.0, 1.0, 1.0]),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.7"}, [1.0, 1.0, 0.0, 1.0, 1.0]),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "1.25"}, [0.0] * 3 + [1.0] * 2),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.3"}, [0.0] * 3 + [1.0] * 2),
        ({"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.5"}, [0.0] * 3 + [1.0] * 2),
        ({"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "2,0.01"}, [0.0] * 5),
        (
            {
                "rollout_is": "token",
                "rollout_is_threshold": "inf",
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "1.095",
            },
            [0.0] * 5,
        ),
        (
            {
                "rollout_is": "token",
                "rollout_is_threshold": "inf",
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "1.096",
            },
            [0.0, 0.0, 0.0, 1.0, 1.2],
        ),
    ],
)
def test_a_weight_is_its_formula(settings: dict[str, Any], expected: list[float]) -> None:
    """The last two are seq-mask-tis: the geometric means are 0.9086, below 1 / 1.096, and 1.0954."""
    found = RolloutCorrection(**settings).weights(given())
    assert found.tolist() == pytest.approx(expected)
    assert not found.requires_grad


@pytest.mark.parametrize("name", ["cispo", "gspo", "sapo", "gmpo", "gpg", "dapo"])
def test_any_loss_is_weighed_and_its_own_ratio_is_that_to_the_proximal_policy(name: str) -> None:
    correction = RolloutCorrection("token", "inf")
    inputs = given()
    outputs = find_loss(name, aggregation=AggregationKind.TOKEN_MEAN, correction=correction)(inputs)
    assert inputs.prox_logprobs is not None
    near = LossInputs(
        inputs.trainer_logprobs,
        inputs.prox_logprobs,
        inputs.advantages * torch.tensor(WEIGHTS),
        inputs.loss_mask,
        lengths=(3, 2),
    )
    plain = find_loss(name, aggregation=AggregationKind.TOKEN_MEAN)(near)  # w is positive: w * loss(A) = loss(w * A)
    assert outputs.loss.item() == pytest.approx(plain.loss.item())
    slopes = (
        torch.autograd.grad(each.loss, inputs.trainer_logprobs, retain_graph=True)[0] for each in (outputs, plain)
    )
    torch.testing.assert_close(*slopes)
    assert outputs.metrics["rollout_is_mean"].tolist() == pytest.approx([sum(WEIGHTS), 5.0])


@pytest.mark.parametrize(
    ("settings", "mean"),
    [
        ({"rollout_is": "token"}, (0.25 + 1.0 + 2.0 + 1.0 + 1.2) / 5),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_2"}, (1.0 + 1.0 + 1.2) / 5),
        ({"rollout_is": "sequence", "rollout_is_threshold": "1.1"}, (0.75 + 1.1) / 2),
        ({"rollout_is": "geometric"}, (0.75 ** (1 / 3) + 1.2**0.5) / 2),
        ({"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "2"}, 5.45 / 5),
        ({"rollout_is": "token", "rollout_is_threshold": "100_200"}, 1.0),
    ],
)
def test_weights_are_divided_by_their_mean_before_the_rejection(settings: dict[str, Any], mean: float) -> None:
    """By hand: over tokens, or over sequences whatever their lengths; of weights that are all 0 none is made."""
    inputs, plain = given(), RolloutCorrection(**settings)
    whole = RolloutCorrection(**settings, rollout_is_batch_normalize=True)
    assert whole.mean_weight(inputs) == pytest.approx(mean)
    masked = replace(inputs, loss_mask=torch.tensor([True, True, True, False, False]))
    if settings == {"rollout_is": "token"}:
        assert whole.mean_weight(masked) == pytest.approx(3.25 / 3)
    means = torch.full((5,), mean, dtype=torch.float64)
    torch.testing.assert_close(whole.weights(replace(inputs, weight_means=means)), plain.weights(inputs) / mean)


def test_the_mean_weight_is_that_of_the_optimizer_step(tmp_path: Path) -> None:
    """Samples of other modes, masked tokens and incredible claims do not count, and no split changes a gradient."""
    backend = TorchBackend(write_model(tmp_path / "model"), published_dtype="fp32")
    loss = {"type": "cispo", "rollout_is": "token", "rollout_is_threshold": "inf", "rollout_is_batch_normalize": True}
    config = TrainerConfig.load({"trainer": {"loss": loss}})
    recipe = Recipe.of(config, max_steps=1, completion_tokens_max=4, vocab_size=264)
    assert recipe.looks_at_tokens
    batch = [
        TrainSample((258, 259), (30, 31), (-5.0, -5.0), 1.0, loss_mask=(True, False)),
        TrainSample((258, 259), (30,), (-5.0,), 1.0, mode=TrainingMode.SFT),
        TrainSample((258, 259), (31, 32), (-5.2, -900.0), -1.0, claim_nats_max=2.0),
    ]
    now = backend.logprobs(batch)
    mean = (math.exp(now[0][0] + 5.0) + math.exp(now[2][0] + 5.2)) / 2
    found = with_weight_mean(batch, recipe, backend)
    assert [one.weight_mean for one in found] == pytest.approx([mean, 1.0, mean])
    stats = [backend.train_step(its, recipe.loss, lr=0.0) for its in (found, batch)]
    assert stats[0].metrics["rollout_is_mean"] == pytest.approx(1.0, rel=1e-5)
    assert stats[1].metrics["rollout_is_mean"] == pytest.approx(mean, rel=1e-5)
    assert with_weight_mean([], recipe, backend) == []


def test_without_a_proximal_policy_the_ratio_is_one_and_the_weight_the_trainers() -> None:
    inputs = given(prox=False)
    outputs = find_loss("cispo", correction=RolloutCorrection("token", "inf"))(inputs)
    weights = (inputs.trainer_logprobs - inputs.inference_logprobs).detach().exp()
    (slope,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
    torch.testing.assert_close(slope, -weights * inputs.advantages)


def test_a_rejected_token_contributes_nothing_and_no_edge_gives_nan() -> None:
    inputs = LossInputs(
        torch.tensor([-1e9, 0.0, -70.0, -1.0], requires_grad=True),
        torch.tensor([0.0, -math.inf, -1.0, -1.0]),
        torch.tensor([1.0, -1.0, 1.0, math.nan]),
        torch.tensor([True, True, True, False]),
    )
    for name in ("cispo", "sapo", "gmpo"):
        for rs in ("token_k1", "seq_max_k2", "seq_sum_k3"):
            outputs = find_loss(name, correction=RolloutCorrection("token", "2", rs, "3"))(inputs)
            (slope,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
            assert outputs.loss.item() == 0.0
            assert slope.tolist() == [0.0] * 4


def summed(inputs: LossInputs) -> LossOutputs:
    """A custom loss that returns a sum."""
    return LossOutputs(inputs.trainer_logprobs.sum(), {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is": "word"}, "rollout_is 'word': expected one of token, sequence, geometric"),
        ({"rollout_is_batch_normalize": True}, "needs rollout_is: token, sequence or geometric"),
        ({"rollout_is_threshold": "5_2"}, "expected an upper bound"),
        ({"rollout_is_threshold": "many"}, "expected an upper bound"),
        (
            {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": "2"},
            "rollout_rs 'seq_max_k1': expected some of token_k1",
        ),
        ({"rollout_rs": "token_k1,token_k2"}, "one for each of token_k1, token_k2"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"}, "token_k2 has an upper bound only"),
    ],
)
def test_a_bad_setting_is_answered_with_the_good_ones(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        RolloutCorrection(**settings)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (AggregationKind.TOKEN_MEAN, (1.0 + 2.0 + 3.0 + 4.0) / 4 + 10.0),
        (AggregationKind.SEQUENCE_MEAN, (1.0 + 3.0) / 2 + 10.0),
        (AggregationKind.SEQUENCE_SUM, (1.0 + 9.0) / 2 + 10.0),
        (AggregationKind.CONSTANT_LENGTH, ((1.0 + 9.0) / 2 + 10.0) / 8),
        (AggregationKind.TOKEN_SUM, 20.0),
        (AggregationKind.PROMPT_MEAN, 10.0 / 4 + 10.0),
    ],
)
def test_each_mode_may_be_divided_by_its_own_count(kind: AggregationKind, expected: float) -> None:
    """Mode rl: completions of 1 and 3 tokens of one prompt; mode sft: one of 2 tokens, of which one is masked."""

    def sample(length: int, mode: TrainingMode, mask: tuple[bool, ...] = ()) -> TrainSample:
        return TrainSample((1,), (2,) * length, (0.0,) * length, 1.0, mode=mode, loss_mask=mask)

    rl, sft = TrainingMode.RL, TrainingMode.SFT
    prompts = [[sample(1, rl), sample(3, rl)], [sample(2, sft, (True, False))], []]
    if kind is AggregationKind.PROMPT_MEAN:
        prompts = prompt_weighed(prompts)
    batch = [one for prompt in mode_weighed(prompts, kind) for one in prompt]
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 99.0])
    inputs = replace(loss_inputs(losses, batch), loss_mask=torch.tensor([True] * 5 + [False]))
    aggregation = Aggregation(kind, constant_length=8)
    found = aggregation.sum(losses, inputs).item() / aggregation.denominator(num_tokens=5, num_sequences=3)
    assert found == pytest.approx(expected)
    alone = mode_weighed(prompts[:1], kind)[0]
    assert kind is AggregationKind.PROMPT_MEAN or [one.loss_weight for one in alone] == [1.0, 1.0]
    assert mode_weighed([[], []], kind) == [[], []]


def test_a_custom_loss_that_returns_a_sum_cannot_be_weighed() -> None:
    loss = find_loss("custom", import_path=f"{__name__}.summed", correction=RolloutCorrection("token"))
    with pytest.raises(LocalError, match="one value a token"):
        loss(given())


def test_a_prompts_mean_is_over_all_tokens_of_its_completions() -> None:
    """Two prompts: the first has completions of 1 and 3 tokens, the second one of 2 tokens, of which one is masked."""

    def sample(length: int, mask: tuple[bool, ...] = ()) -> TrainSample:
        return TrainSample((1,), (2,) * length, (0.0,) * length, 1.0, loss_mask=mask)

    prompts = prompt_weighed([[sample(1), sample(3)], [sample(2, (True, False))], []])
    weights = [[one.loss_weight for one in prompt] for prompt in prompts]
    assert weights == [[5 / 8, 5 / 8], [5 / 2], []]
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 99.0])
    inputs = LossInputs(
        losses,
        losses,
        losses,
        torch.tensor([True] * 5 + [False]),
        loss_weights=torch.tensor([5 / 8] * 4 + [5 / 2] * 2),
        lengths=(1, 3, 2),
    )
    counts = {"num_tokens": 5, "num_sequences": 3}
    for kind, expected in (
        (AggregationKind.PROMPT_MEAN, (10.0 / 4 + 10.0) / 2),
        (AggregationKind.SEQUENCE_SUM, 20.0 / 3),
        (AggregationKind.TOKEN_SUM, 20.0),
    ):
        aggregation = Aggregation(kind)
        weighed = inputs if kind is AggregationKind.PROMPT_MEAN else replace(inputs, loss_weights=None)
        found = aggregation.sum(losses, weighed).item() / aggregation.denominator(**counts)
        assert found == pytest.approx(expected), kind
    assert AggregationKind("token-sum") is AggregationKind.TOKEN_SUM
    assert AggregationKind("seq-mean-token-sum") is AggregationKind.SEQUENCE_SUM
