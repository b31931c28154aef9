"""Each loss against its formula in float64, value and gradient, at ratios that break a careless one.

The references are scalar Python over torch's float64 scalars, written from the papers' formulas. They share nothing with what
they check but the documented clamp of log ratios.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.cases_world import check_each
from torch import Tensor

from prime_node.algo.losses import LOSSES, LossInputs, LossSum, find_loss
from prime_node.algo.losses.base import LOG_RATIO_MAX
from prime_node.ports.train_backend import AggregationKind
from prime_protocol.errors import LocalError

INF, NAN = math.inf, math.nan
LOG_RATIOS = (-200.0, -30.0, -1.0, -0.3, -0.01, 0.0, 0.01, 0.15, 1.0, 1.9, 2.1, 69.0, 200.0)
ADVANTAGES = (1.0, -1.0, 0.25, -0.25, 0.0, 3.0, -3.0, 0.5, -0.5, -2.0, 2.0, 1.5, -0.75)
LENGTHS = (4, 1, 8)
SELECTED = (True, False, False, True, True, False, False, True, False, True, False, False, True)


def inputs(log_ratios: tuple[float, ...] = LOG_RATIOS, *, prox: bool = False) -> LossInputs:
    """Three sequences; with `prox`, the proximal policy is between the sampler and the trainer."""
    inference = torch.linspace(-0.1, -3.0, len(log_ratios))
    shift = torch.tensor(log_ratios)
    return LossInputs(
        trainer_logprobs=(inference + shift).requires_grad_(),
        inference_logprobs=inference,
        advantages=torch.tensor(ADVANTAGES),
        loss_mask=torch.ones(len(log_ratios), dtype=torch.bool),
        teacher_logprobs=inference - 0.7 * shift.clamp(-1.0, 1.0),
        prox_logprobs=inference + 0.25 * shift if prox else None,
        selected=torch.tensor(SELECTED),
        lengths=LENGTHS,
    )


Scalar = Any
"""Torch float64 scalar or float."""


def constant(value: Scalar) -> float:
    """Return a value without its gradient."""
    return float(value.detach())


def clamped(log_ratio: Scalar) -> Scalar:
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def surrogate(ratio: Scalar, advantage: float, low: float, high: float, dual: float | None = None) -> Scalar:
    bounded = 1.0 - low if ratio < 1.0 - low else min(ratio, 1.0 + high)
    loss = max(-ratio * advantage, -bounded * advantage)
    if dual is not None and advantage < 0.0:
        loss = min(loss, torch.tensor(-dual * advantage, dtype=torch.float64))
    return loss


class Tokens:
    """One sequence in float64: pi carries the gradient."""

    def __init__(
        self,
        pi: Tensor,
        mu: Tensor,
        advantages: Tensor,
        teacher: Tensor,
        selected: Tensor,
        prox: Tensor | None,
    ) -> None:
        self.selected: list[bool] = selected.bool().tolist()
        self.pi, self.mu, self.advantages, self.teacher = pi, mu, advantages.tolist(), teacher
        self.prox = pi.detach() if prox is None else prox

    def each(self, loss: Callable[[Scalar, Scalar, Scalar, float, Scalar], Scalar]) -> list[Scalar]:
        """Return `loss` of log pi, log r, log mu, A, log teacher for each token."""
        return [
            loss(pi, clamped(pi - mu), mu, advantage, teacher)
            for pi, mu, advantage, teacher in zip(self.pi, self.mu, self.advantages, self.teacher, strict=True)
        ]

    def corrected(
        self, weigh: Callable[[list[Scalar]], list[Scalar]], low: float = 0.2, high: float = 0.2
    ) -> list[Scalar]:
        """Return w times the surrogate of rho."""
        weights = weigh([clamped(prox - mu) for prox, mu in zip(self.prox, self.mu, strict=True)])
        return [
            weight * surrogate(clamped(pi - prox).exp(), advantage, low, high)
            for weight, pi, prox, advantage in zip(weights, self.pi, self.prox, self.advantages, strict=True)
        ]


def clip_cov(tokens: Tokens) -> list[Scalar]:
    losses = tokens.corrected(token_weights(lambda w: 1.0))
    return [loss * 0.0 if chosen else loss for loss, chosen in zip(losses, tokens.selected, strict=True)]


def kl_cov(tokens: Tokens) -> list[Scalar]:
    logs = [clamped(pi - prox) for pi, prox in zip(tokens.pi, tokens.prox, strict=True)]
    return [
        -log.exp() * advantage + (0.5 * abs(log) if chosen else 0.0)
        for log, advantage, chosen in zip(logs, tokens.advantages, tokens.selected, strict=True)
    ]


def dppo_kl(pi: Scalar, log_r: Scalar, mu: Scalar, advantage: float, teacher: Scalar) -> Scalar:
    moved = constant(pi.exp() - mu.exp())
    dropped = moved > 0.2 if advantage > 0 else moved < -0.2
    return (0.0 if dropped else -advantage * log_r.exp()) + 1e-3 * log_r**2


def dppo_binary(pi: Scalar, log_r: Scalar, mu: Scalar, advantage: float, *, is_kl: bool) -> Scalar:
    p, q = (min(constant(value.exp()), 1.0) for value in (pi, mu))
    distance = abs(p - q)
    if is_kl:
        distance = q * constant(mu - pi) + (1.0 - q) * math.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
    is_away = constant(pi) > constant(mu) if advantage > 0.0 else constant(pi) < constant(mu)
    dropped = is_away and distance > (0.05 if is_kl else 0.15)
    return pi * 0.0 if dropped else -min(constant(log_r.exp()), 20.0) * advantage * pi


def sapo(log_r: Scalar, advantage: float) -> Scalar:
    tau = 1.0 if advantage > 0.0 else 1.05
    return -4.0 / tau / (1.0 + (-tau * (log_r.exp() - 1.0)).exp()) * advantage


def gmpo(tokens: Tokens) -> list[Scalar]:
    def bounded(log_r: Scalar, advantage: float) -> Scalar:
        limit = torch.tensor(0.4 if advantage > 0.0 else -0.4, dtype=torch.float64)
        return min(log_r, limit) if advantage > 0.0 else max(log_r, limit)

    logs = [clamped(pi - mu) for pi, mu in zip(tokens.pi, tokens.mu, strict=True)]
    bounds = [bounded(log_r, advantage) for log_r, advantage in zip(logs, tokens.advantages, strict=True)]
    return [-(sum(bounds) / len(bounds)).exp() * advantage for advantage in tokens.advantages]


def ipo(pi: Scalar, log_r: Scalar, mu: Scalar, advantage: float, teacher: Scalar) -> Scalar:
    dropped = abs(constant(pi.exp() - mu.exp())) > 0.2
    return (0.0 if dropped else -advantage * log_r.exp()) + 1e-3 * log_r**2


def gspo(tokens: Tokens) -> list[Scalar]:
    ratio = (sum(clamped(pi - mu) for pi, mu in zip(tokens.pi, tokens.mu, strict=True)) / len(tokens.mu)).exp()
    return [surrogate(ratio, advantage, 3e-4, 4e-4) for advantage in tokens.advantages]


def token_weights(bound: Callable[[float], float]) -> Callable[[list[Scalar]], list[Scalar]]:
    return lambda log_weights: [bound(constant(value.exp())) for value in log_weights]


def sequence_weights(bound: Callable[[float], float], *, mean: bool) -> Callable[[list[Scalar]], list[Scalar]]:
    def weigh(log_weights: list[Scalar]) -> list[Scalar]:
        total = constant(sum(log_weights)) / (len(log_weights) if mean else 1)
        return [bound(math.exp(min(max(total, -LOG_RATIO_MAX), LOG_RATIO_MAX)))] * len(log_weights)

    return weigh


def truncated(weight: float) -> float:
    return min(weight, 2.0)


def masked(weight: float) -> float:
    return weight if 0.5 <= weight <= 5.0 else 0.0


REFERENCES: Mapping[tuple[str, tuple[tuple[str, Any], ...]], Callable[[Tokens], list[Scalar]]] = {
    ("aipo", (("delta", 4.0),)): lambda t: t.each(lambda pi, log_r, mu, a, q: -min(log_r.exp(), torch.tensor(4.0)) * a),
    ("aipo_stop_gradient", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: -min(constant(log_r.exp()), 8.0) * a * pi),
    ("cispo", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: -min(constant(log_r.exp()), 5.0) * a * pi),
    ("cispo", (("eps_low", 0.2), ("eps_high", 0.3))): lambda t: t.each(
        lambda pi, log_r, mu, a, q: -min(max(constant(log_r.exp()), 0.8), 1.3) * a * pi
    ),
    ("dapo", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: surrogate(log_r.exp(), a, 0.2, 0.28)),
    ("decoupled_ppo", (("behavior_weight_max", 1.5),)): lambda t: t.corrected(token_weights(lambda w: min(w, 1.5))),
    ("dppo_kl", ()): lambda t: t.each(dppo_kl),
    ("dppo_kl", (("dppo_mask_by_sign", False),)): lambda t: t.each(ipo),
    ("dppo_binary_kl", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: dppo_binary(pi, log_r, mu, a, is_kl=True)),
    ("dppo_binary_tv", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: dppo_binary(pi, log_r, mu, a, is_kl=False)),
    ("gmpo", ()): gmpo,
    ("clip_cov", ()): clip_cov,
    ("kl_cov", (("ppo_kl_coef", 0.5),)): kl_cov,
    ("gpg", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: -a * pi),
    ("sapo", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: sapo(log_r, a)),
    ("decoupled_ppo", (("behavior_weight_max", 1.5), ("behavior_weight_mode", "mask"))): lambda t: t.corrected(
        token_weights(lambda w: w if w <= 1.5 else 0.0)
    ),
    ("dr_grpo", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: surrogate(log_r.exp(), a, 0.2, 0.2)),
    ("grpo", (("eps_high", 0.5),)): lambda t: t.corrected(token_weights(lambda w: 1.0), high=0.5),
    ("grpo_is", ()): lambda t: t.corrected(token_weights(lambda w: w)),
    ("gspo", ()): gspo,
    ("mis", ()): lambda t: t.corrected(token_weights(masked)),
    ("mis", (("level", "sequence"),)): lambda t: t.corrected(sequence_weights(masked, mean=False)),
    ("opd", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: -min(constant(log_r.exp()), 8.0) * constant(q - pi) * pi),
    ("ppo_clip", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: surrogate(log_r.exp(), a, 0.2, 0.2, 3.0)),
    ("ppo_clip", (("dual_clip", None),)): lambda t: t.each(
        lambda pi, log_r, mu, a, q: surrogate(log_r.exp(), a, 0.2, 0.2)
    ),
    ("sft", ()): lambda t: t.each(lambda pi, log_r, mu, a, q: -pi),
    ("tis", ()): lambda t: t.corrected(token_weights(truncated)),
    ("tis", (("level", "sequence"),)): lambda t: t.corrected(sequence_weights(truncated, mean=False)),
    ("tis", (("level", "geometric"),)): lambda t: t.corrected(sequence_weights(truncated, mean=True)),
}


def in_float64(
    reference: Callable[[Tokens], list[Scalar]], given: LossInputs, kind: AggregationKind
) -> tuple[float, Tensor]:
    """Return the batch's loss before its division, and the gradient."""

    def split(values: Tensor) -> tuple[Tensor, ...]:
        return torch.split(values.detach().double(), list(LENGTHS))

    pi = given.trainer_logprobs.detach().double().requires_grad_()
    total: Scalar = torch.zeros((), dtype=torch.float64)
    assert given.teacher_logprobs is not None
    proxies = [None] * len(LENGTHS) if given.prox_logprobs is None else split(given.prox_logprobs)
    parts = (
        torch.split(pi, list(LENGTHS)),
        *map(split, (given.inference_logprobs, given.advantages, given.teacher_logprobs, torch.tensor(SELECTED))),
    )
    for pi_T, mu_T, advantages_T, teacher_T, selected_T, prox_T in zip(*parts, proxies, strict=True):
        losses = reference(Tokens(pi_T, mu_T, advantages_T, teacher_T, selected_T, prox_T))
        total = total + sum(losses) / (len(losses) if kind is AggregationKind.SEQUENCE_MEAN else 1)
    (gradient,) = torch.autograd.grad(total, pi)
    return float(total.detach()), gradient


def gradient(outputs: LossSum, given: LossInputs) -> Tensor:
    (found,) = torch.autograd.grad(outputs.loss, given.trainer_logprobs)
    return found


def found(name: str, **settings: Any) -> Any:
    return find_loss(name, constant_length=16, **settings)


def test_every_loss_has_a_reference() -> None:
    assert {name for name, _ in REFERENCES} == set(LOSSES)


@pytest.mark.parametrize(("name", "settings"), REFERENCES)
def test_a_loss_is_its_formula_in_float64(name: str, settings: tuple[tuple[str, Any], ...]) -> None:
    """Tolerance: a few roundings of float32 of the largest token; exp amplifies those of a log ratio twenty times.

    The slope of `sapo`'s gate is s (1 - s), whose second factor loses digits where s is near 1.
    """

    def check(case: tuple[AggregationKind, bool]) -> None:
        kind, prox = case
        given = inputs(prox=prox)
        outputs = found(name, kwargs=dict(settings), aggregation=kind)(given)
        total, slope = in_float64(REFERENCES[name, settings], given, kind)
        assert outputs.loss.item() == pytest.approx(total, rel=1e-5)
        torch.testing.assert_close(
            gradient(outputs, given).double(), slope, rtol=1e-4 if name == "sapo" else 2e-5, atol=1e-7
        )
        assert all(tally.isfinite().all() for tally in outputs.metrics.values())

    check_each(
        ((f"{kind}, prox={prox}", (kind, prox)) for kind, prox in itertools.product(AggregationKind, (False, True))),
        check,
    )


def test_aipo_gives_no_gradient_above_delta_and_its_other_form_does() -> None:
    for name, expected in (("aipo", [0.0, 0.0]), ("aipo_stop_gradient", [-4.0, 4.0])):
        given = LossInputs(
            torch.tensor([-1.0, -1.0], requires_grad=True),
            torch.tensor([-4.0, -4.0]),
            torch.tensor([1.0, -1.0]),
            torch.tensor([True, True]),
        )
        assert gradient(find_loss(name, kwargs={"delta": 4.0})(given), given).tolist() == expected


@pytest.mark.parametrize("name", ["sapo", "gmpo", "gspo", "ppo_clip", "gpg"])
def test_a_loss_without_constants_has_the_gradient_of_its_value(name: str) -> None:
    """Finite differences in float64."""
    given = inputs((-1.0, -0.3, -0.01, 0.05, 0.15, 1.0, 1.9, 2.1, -0.7, 0.3, 0.5, -0.9, 0.02))
    exact = {
        key: None if value is None else value.detach().double()
        for key in ("inference_logprobs", "advantages", "teacher_logprobs")
        for value in (getattr(given, key),)
    }
    loss = find_loss(name, kwargs={"eps_low": 0.2, "eps_high": 0.2} if name == "gspo" else {})

    def total(logprobs: Tensor) -> Tensor:
        values: dict[str, Any] = {
            **exact,
            "trainer_logprobs": logprobs,
            "loss_mask": given.loss_mask,
            "lengths": LENGTHS,
        }
        found: Tensor = loss(LossInputs(**values)).loss
        return found

    torch.autograd.gradcheck(total, given.trainer_logprobs.detach().double().requires_grad_())


def test_dppo_holds_dropped_tokens_to_the_sampler_as_well() -> None:
    given = LossInputs(
        torch.tensor([-0.1, -3.0], requires_grad=True),
        torch.tensor([-1.0, -0.5]),
        torch.tensor([1.0, -1.0]),
        torch.tensor([True, True]),
    )
    outputs = find_loss("dppo_kl", kwargs={"kl_tau": 0.5})(given)
    assert outputs.metrics["masked_share"].tolist() == [2.0, 2.0]
    assert gradient(outputs, given).tolist() == pytest.approx([0.9, -2.5])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_masked_tokens_contribute_exactly_nothing(name: str) -> None:
    loss = found(name)

    def given(*masked: float) -> LossInputs:
        """One trained token, and optionally a masked one after it: trainer, inference, advantage."""
        trainer, inference, advantage = [[value] for value in masked] or [[], [], []]
        return LossInputs(
            torch.tensor([-2.7, *trainer], requires_grad=True),
            torch.tensor([-3.0, *inference]),
            torch.tensor([0.7, *advantage]),
            torch.tensor([True, *(False for _ in trainer)]),
            teacher_logprobs=torch.tensor([-2.0, *inference]),
            prox_logprobs=torch.tensor([-2.9, *trainer]),
            selected=torch.ones(1 + len(trainer), dtype=torch.bool),
        )

    def outcome(inputs: LossInputs) -> tuple[float, list[float], dict[str, object]]:
        outputs = loss(inputs)
        tallies = {key: tally.tolist() for key, tally in outputs.metrics.items()}
        return outputs.loss.item(), gradient(outputs, inputs).tolist(), tallies

    value, slope, tallies = outcome(given())

    def check(masked: tuple[float, float, float]) -> None:
        assert outcome(given(*masked)) == (value, [*slope, 0.0], tallies)

    masked = itertools.product((0.0, -INF, INF, NAN, -1e30), (-INF, INF, NAN, -1e30), (1.0, INF, NAN))
    check_each(((str(case), case) for case in masked), check)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("smallest", [-1e30, -INF])
def test_no_ratio_gives_nan(name: str, smallest: float) -> None:
    given = LossInputs(
        torch.tensor([-1.0, smallest, -70.0, -0.0, smallest], requires_grad=True),
        torch.tensor([smallest, -1.0, -0.0, smallest, smallest]),
        torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0]),
        torch.ones(5, dtype=torch.bool),
        teacher_logprobs=torch.full((5,), -2.0),
        selected=torch.tensor([True, False, True, True, True]),
    )
    outputs = found(name)(given)
    assert math.isfinite(outputs.loss.item())
    assert gradient(outputs, given).isfinite().all()


def test_distillation_without_a_teacher_says_what_is_missing() -> None:
    given = LossInputs(*(torch.zeros(1),) * 3, torch.tensor([True]))
    with pytest.raises(LocalError, match="no teacher logprobs"):
        find_loss("opd")(given)


def test_a_weight_at_a_bound_of_the_mask_is_kept_and_one_below_the_truncation_is_lifted() -> None:
    zeros = torch.zeros(1)
    given = LossInputs(zeros, zeros, torch.ones(1), torch.tensor([True]))  # every weight is exactly 1
    for name, bounds, weight in (
        ("mis", {"weight_min": 1.0, "weight_max": 1.0}, 1.0),
        ("mis", {"weight_min": 1.1, "weight_max": 2.0}, 0.0),
        ("mis", {"weight_min": 0.5, "weight_max": 0.9}, 0.0),
        ("tis", {"weight_min": 1.5, "weight_max": 2.0}, 1.5),
        ("tis", {"weight_min": 0.0, "weight_max": 0.5}, 0.5),
    ):
        assert find_loss(name, kwargs=bounds)(given).loss.item() == -weight, (name, bounds)


def test_an_unknown_level_is_answered_with_the_known_ones() -> None:
    with pytest.raises(LocalError, match="level 'word': expected one of token, sequence, geometric"):
        find_loss("tis", kwargs={"level": "word"})(inputs())


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(LocalError, match=r"unknown loss 'apio'; known are .*aipo, "):
        find_loss("apio")


def test_a_setting_that_the_loss_does_not_take_is_refused_before_the_run() -> None:
    with pytest.raises(LocalError, match="loss aipo: got an unexpected keyword argument 'dleta'"):
        find_loss("aipo", kwargs={"dleta": 4.0})
