"""Each loss against its formula in float64, at ratios that break a careless one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prime_node.algo.advantages import AdvantageInputs, find_advantage
from prime_node.algo.filters import FilterInputs, find_filters, flags
from prime_node.algo.losses import LOSSES, LossInputs, LossOutputs, find_loss
from prime_node.algo.losses.base import LOG_RATIO_MAX
from prime_node.algo.schedule import Damping, LinearSchedule
from prime_node.ports.train_backend import Group
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason

INF, NAN = math.inf, math.nan
LOG_RATIOS = [-200.0, -30.0, -1.0, -0.01, 0.0, 0.01, 1.0, 1.9, 2.1, 69.0, 200.0]
ADVANTAGES = [1.0, -1.0, 0.25, -0.25, 0.0, 3.0, -3.0, 0.5, 0.5, -2.0, 2.0]
DELTA = 8.0


def inputs(log_ratios: list[float], advantages: list[float], mask: list[bool] | None = None) -> LossInputs:
    inference = torch.full((len(log_ratios),), -3.0)
    return LossInputs(
        trainer_logprobs=(inference + torch.tensor(log_ratios)).requires_grad_(),
        inference_logprobs=inference,
        advantages=torch.tensor(advantages),
        loss_mask=torch.tensor(mask or [True] * len(log_ratios)),
    )


def gradient(outputs: LossOutputs, given: LossInputs) -> Tensor:
    (found,) = torch.autograd.grad(outputs.loss, given.trainer_logprobs)
    return found.double()


def test_aipo_is_its_formula_in_float64() -> None:
    given = inputs(LOG_RATIOS, ADVANTAGES)
    outputs = find_loss("aipo", kwargs={"delta": DELTA})(given)
    log_ratio = given.trainer_logprobs.detach().double() - given.inference_logprobs.double()
    ratio, advantages = log_ratio.exp(), given.advantages.double()
    expected = (-torch.minimum(ratio, torch.tensor(DELTA).double()) * advantages).sum()
    # Below exp(-LOG_RATIO_MAX) the clamp holds the ratio at 2e-9 instead of less: beyond float32 beside anything else.
    assert outputs.loss.item() == pytest.approx(float(expected), rel=1e-6)
    slope = torch.where(ratio < DELTA, -ratio * advantages, 0.0)
    torch.testing.assert_close(gradient(outputs, given), slope, rtol=1e-5, atol=math.exp(-LOG_RATIO_MAX))
    assert float(outputs.metrics["ratio_clipped_share"]) == pytest.approx(float((ratio > DELTA).double().mean()))


def test_aipo_gives_no_gradient_above_delta_for_either_sign_of_the_advantage() -> None:
    given = inputs([3.0, 3.0], [1.0, -1.0])
    assert gradient(find_loss("aipo", kwargs={"delta": DELTA})(given), given).tolist() == [0.0, 0.0]


def test_sft_is_the_cross_entropy() -> None:
    given = inputs([0.0, 1.0, -5.0], [0.0, 7.0, NAN])
    outputs = find_loss("sft")(given)
    assert outputs.loss.item() == pytest.approx(3.0 + 2.0 + 8.0)
    assert gradient(outputs, given).tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("trainer", [0.0, -INF, INF, NAN, -1e30])
@pytest.mark.parametrize("inference", [-INF, INF, NAN, -1e30])
@pytest.mark.parametrize("advantage", [1.0, INF, NAN])
def test_masked_tokens_contribute_exactly_nothing(
    name: str, trainer: float, inference: float, advantage: float
) -> None:
    alone = inputs([0.3], [0.7])
    logprobs = torch.tensor([float(alone.trainer_logprobs.detach()[0]), trainer], requires_grad=True)
    beside = LossInputs(
        logprobs, torch.tensor([-3.0, inference]), torch.tensor([0.7, advantage]), torch.tensor([True, False])
    )
    loss = find_loss(name)
    expected, found = loss(alone), loss(beside)
    assert found.loss.item() == expected.loss.item()
    assert gradient(found, beside).tolist() == [float(gradient(expected, alone)[0]), 0.0]
    assert {key: float(value) for key, value in found.metrics.items()} == {
        key: float(value) for key, value in expected.metrics.items()
    }


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_ratio_gives_nan(name: str) -> None:
    given = LossInputs(
        torch.tensor([-1.0, -1e30, -70.0, -0.0], requires_grad=True),
        torch.tensor([-1e30, -1.0, -0.0, -1e30]),
        torch.tensor([1.0, -1.0, 1.0, -1.0]),
        torch.ones(4, dtype=torch.bool),
    )
    outputs = find_loss(name)(given)
    assert math.isfinite(outputs.loss.item())
    assert gradient(outputs, given).isfinite().all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_token_wise_loss_is_the_sum_over_its_parts(name: str) -> None:
    loss, whole = find_loss(name), inputs(LOG_RATIOS[2:9], ADVANTAGES[2:9])
    assert loss.token_wise
    parts = [
        loss(
            LossInputs(
                *(
                    value[part]
                    for value in (
                        whole.trainer_logprobs,
                        whole.inference_logprobs,
                        whole.advantages,
                        whole.loss_mask,
                    )
                )
            )
        ).loss
        for part in (slice(0, 3), slice(3, 7))
    ]
    assert loss(whole).loss.item() == pytest.approx(torch.stack(parts).sum().item(), rel=1e-6)


def test_a_loss_of_ones_own_is_found_by_its_import_path_and_called_for_each_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_losses.py").write_text(
        "from prime_node.algo.losses import LossInputs, LossOutputs\n"
        "def doubled(inputs: LossInputs, factor: float = 1.0) -> LossOutputs:\n"
        "    return LossOutputs(loss=factor * -inputs.trainer_logprobs[inputs.loss_mask].sum(), metrics={})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = find_loss("unused", import_path="my_losses.doubled", kwargs={"factor": 2.0})
    assert not loss.token_wise
    assert loss(inputs([0.0, 0.0], [1.0, 1.0])).loss.item() == 12.0
    for path, why in (("my_losses.no", "my_losses has no no"), ("nothing.here", "No module named"), ("x", "expected")):
        with pytest.raises(LocalError, match=why):
            find_loss("unused", import_path=path)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(LocalError, match="no loss is called 'apio'; known are aipo, sft"):
        find_loss("apio")


def test_a_setting_that_the_loss_does_not_take_is_refused_before_the_run() -> None:
    with pytest.raises(LocalError, match="loss aipo: got an unexpected keyword argument 'dleta'"):
        find_loss("aipo", kwargs={"dleta": 4.0})


def test_the_advantage_is_the_reward_minus_the_mean_without_a_deviation() -> None:
    advantage = find_advantage("group_mean")
    assert advantage(AdvantageInputs((1.0, 0.0, 0.5), (3, 1, 8))) == [0.5, -0.5, 0.0]
    assert advantage(AdvantageInputs((0.7,), (3,))) == [0.0]
    assert advantage(AdvantageInputs((0.1,) * 7, (1,) * 7)) == [0.0] * 7
    assert advantage(AdvantageInputs((), ())) == []


def group(*rewards: float) -> Group:
    completion = Completion((1, 2), (-0.1, -0.2), FinishReason.STOP)
    return Group(0, (9,), (completion,) * len(rewards), rewards, (0,) * len(rewards), "worker")


def test_the_first_filter_that_matches_names_the_rollout() -> None:
    filters = {
        "second_only": lambda given: [index == 1 for index in range(len(given.advantages))],
        **find_filters(["zero_advantage"]),
    }
    given = FilterInputs(group(1.0, 0.0, 0.5), (0.5, 0.0, 0.0))
    assert flags(filters, given) == [None, "second_only", "zero_advantage"]
    assert flags({}, given) == [None, None, None]
    with pytest.raises(LocalError, match="no filter is called"):
        find_filters(["zero"])


def test_the_schedule_rises_and_falls() -> None:
    schedule = LinearSchedule(1.0, warmup_steps=5, total_steps=400, final_share=0.1)
    assert schedule.at(0) == pytest.approx(0.2)
    assert schedule.at(4) == pytest.approx(1 - 0.9 * 4 / 400)
    assert schedule.at(399) == pytest.approx(0.1, abs=0.003)
    assert schedule.at(10_000) == pytest.approx(0.1)
    assert LinearSchedule(2.0, 0, 1, 1.0).at(77) == 2.0


def test_damping_falls_fast_recovers_slowly_and_has_a_floor() -> None:
    damping = Damping(0.1)
    assert damping.after(1.0, 0.2) == 0.75
    assert damping.after(0.5, 0.12) == 0.5
    assert damping.after(0.5, 0.05) == pytest.approx(0.525)
    assert damping.after(1.0, 0.0) == 1.0
    assert damping.after(0.16, 9.0) == 0.15
