"""The losses on the inputs of other frameworks' own unit tests, against the values that these tests expect.

Each test names repository, file and commit; inputs and expected values are theirs. What they expect and this project does
otherwise is in the tables of docs/algorithms.md, and a test here holds that it is said there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.oracles.nemo_rl_goldens import ADVANTAGES, GOLDENS, LENGTHS, NOW
from tests.source_tree import ROOT
from torch import Tensor

from prime_node.algo.kl_control import KlControl, KlControlKind
from prime_node.algo.losses import LossInputs, find_loss
from prime_node.algo.losses.penalty import kl_estimate
from prime_node.algo.losses.rollout_correction import RolloutCorrection, behavior_weight
from prime_node.ports.train_backend import AggregationKind

E = math.e
Values = Sequence[float]


def of(values: Values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def given(
    now: Values,
    sampled: Values,
    advantages: Values,
    *,
    before: Values | None = None,
    teacher: Values | None = None,
    mask: Sequence[bool] | None = None,
    lengths: Sequence[int] = (),
) -> LossInputs:
    return LossInputs(
        trainer_logprobs=of(now).requires_grad_(),
        inference_logprobs=of(sampled),
        advantages=of(advantages),
        loss_mask=torch.tensor([True] * len(now) if mask is None else list(mask)),
        prox_logprobs=None if before is None else of(before),
        teacher_logprobs=None if teacher is None else of(teacher),
        lengths=tuple(lengths) or (len(now),),
    )


def result(inputs: LossInputs, name: str, **settings: Any) -> tuple[float, list[float]]:
    """Return a batch's loss and its gradient at each token. Settings are those of `find_loss`."""
    aggregation = settings.pop("aggregation", None)
    correction = {key: settings.pop(key) for key in [*settings] if key.startswith("rollout_")}
    loss = find_loss(
        name,
        kwargs=settings,
        aggregation=aggregation,
        constant_length=10,
        correction=RolloutCorrection(**correction),
    )
    masks = torch.split(inputs.loss_mask, list(inputs.lengths))
    total = loss(inputs).loss / loss.denominator(
        num_tokens=int(inputs.loss_mask.sum()), num_sequences=sum(bool(its.any()) for its in masks)
    )
    (gradient,) = torch.autograd.grad(total, inputs.trainer_logprobs)
    return float(total.detach()), gradient.tolist()


def test_nemo_rls_golden_losses_and_gradients() -> None:
    for name, case in GOLDENS.items():
        inputs = given(NOW, case.sampled, ADVANTAGES, before=case.before, lengths=LENGTHS)
        value, gradient = result(inputs, case.loss, **case.settings, **case.kwargs)
        assert value == pytest.approx(case.value, rel=1e-7), name
        assert gradient == pytest.approx(case.gradient, rel=1e-7), name


def test_skyrls_dual_clip_and_cispo() -> None:
    """NovaSky-AI/SkyRL, skyrl-train/tests/cpu/algorithms/test_losses.py at 041ed9e2."""
    inputs = given((-1.69315, -1.0, -0.69741), (-1.0, -1.0, -3.0), (1.0, -1.0, -4.0))
    assert result(inputs, "ppo_clip", dual_clip=3.0)[0] == pytest.approx(4.1667, abs=1e-4)
    value, gradient = result(
        inputs, "cispo", eps_low=0.2, eps_high=0.2
    )  # by its formula; its hand value has other signs
    assert value == pytest.approx((0.8 * 1.69315 - 1.0 - 1.2 * 4.0 * 0.69741) / 3)
    assert gradient == pytest.approx([-0.8 / 3, 1.0 / 3, 4.8 / 3])


def test_skyrls_and_areals_sequence_ratio() -> None:
    """SkyRL as above, `test_gspo_importance_sampling_levels`; inclusionAI/AReaL, areal/tests/test_functional.py at 6ef0b54a."""
    now = (0.2, -2.5, -0.3, 0.1, -1.8, 0.8, -0.2, -0.5, 0.3, -1.7, 0.4)
    advantages = (1.5, 2.0, 1.0, 0.8, 0.5, 3.0, 1.5, 0.5, 0.8, 1.2, 2.5)
    inputs = given(now, (-1.0,) * 11, advantages, lengths=(5, 2, 4))
    ratios = [math.exp(0.7 / 5), min(math.exp(2.6 / 2), 1.2), min(math.exp(2.5 / 4), 1.2)]
    means = [sum(its) / len(its) for its in (advantages[:5], advantages[5:7], advantages[7:])]
    expected = -sum(ratio * mean for ratio, mean in zip(ratios, means, strict=True)) / 3
    assert result(inputs, "gspo", eps_low=0.2, eps_high=0.2)[0] == pytest.approx(expected)

    even = given((1.0,) * 8, (1.0,) * 8, (1.0, 2.0, 3.0, 4.0, *[0.5] * 4), lengths=(4, 4))
    assert result(even, "gspo", aggregation=AggregationKind.TOKEN_MEAN)[0] == pytest.approx(-1.5)
    apart = given((1.0,) * 3 + (2.0,) * 5, (0.5,) * 3 + (1.0,) * 5, (1.0,) * 8, lengths=(3, 5))
    wide = result(apart, "gspo", eps_low=0.2, eps_high=9.0)[0]
    assert wide == pytest.approx(-(math.exp(0.5) + math.exp(1.0)) / 2)


def test_skyrls_importance_weights_and_sequence_masks() -> None:
    """NovaSky-AI/SkyRL, skyrl-train/tests/cpu/algorithms/test_off_policy_correction.py at bb065c9c."""
    before, sampled = (-1.0, -1.5, -0.5), (-1.5, -1.0, -1.5)
    inputs = given(before, sampled, (1.0,) * 3, before=before)
    assert behavior_weight(inputs, "token").clamp(max=2.0).tolist() == pytest.approx([1.6487, 0.6065, 2.0], abs=1e-4)
    assert behavior_weight(inputs, "sequence").tolist() == pytest.approx([2.7183] * 3, abs=1e-4)
    far = given((-1.0,) * 3, (-2.0,) * 3, (1.0,) * 3, before=(-1.0,) * 3)
    assert RolloutCorrection("sequence", "5").weights(far).tolist() == pytest.approx([5.0] * 3)
    masked = given(before, sampled, (-1.0,) * 3, before=before, mask=(True, False, True))
    value, gradient = result(masked, "gpg", rollout_is="sequence", rollout_is_threshold="10")
    assert gradient == pytest.approx([math.exp(1.5) / 2, 0.0, math.exp(1.5) / 2])
    assert value == pytest.approx(math.exp(1.5) * (-1.5) / 2)

    geometric = ("seq_mean_k1", f"{1 / 1.1}_{1 / 0.9}")
    product = ("seq_sum_k1", "0.5_2")
    cases = [
        (geometric, (-1.0, -1.1, -1.0), (-1.1, -1.0, -1.0), 1.0),
        (geometric, (-1.0,) * 3, (-1.5,) * 3, 0.0),
        (product, (-1.0, -1.1, -1.2), (-1.2,) * 3, 1.0),
        (product, (-1.0,) * 3, (-2.0,) * 3, 0.0),
    ]
    for (name, threshold), now, mu, kept in cases:
        weights = RolloutCorrection(rollout_rs=name, rollout_rs_threshold=threshold).weights(
            given(now, mu, (1.0,) * 3, before=now)
        )
        assert weights.tolist() == [kept] * 3, (name, now)


def test_verls_rollout_correction() -> None:
    """verl, tests/trainer/ppo/test_rollout_corr.py at 88a96e3c, and test_rollout_corr_integration.py at 2dd0a55a."""
    sampled = (-1.0,) * 5 + (-2.5,) * 5
    inputs = given((-2.0,) * 10, sampled, (1.0,) * 10, before=(-2.0,) * 10, lengths=(5, 5))
    weights = behavior_weight(inputs, "token").tolist()
    assert weights == pytest.approx([0.368] * 5 + [1.649] * 5, abs=0.01)
    rule = RolloutCorrection("token", "2", "token_k1", "0.5_2")
    assert [weight > 0.0 for weight in rule.weights(inputs).tolist()] == [False] * 5 + [True] * 5

    icepop = given((-1.0,) * 3, (-0.5, -3.5, -0.8), (1.0, -1.0, 2.0), before=(-1.0,) * 3)
    rule = RolloutCorrection("token", "0.5_5.0")
    expected = [0.60653067, 0.0, 0.81873075]
    assert rule.weights(icepop).tolist() == pytest.approx(expected, abs=1e-6)
    value, _ = result(icepop, "grpo", rollout_is="token", rollout_is_threshold="0.5_5.0")
    assert value == pytest.approx(-(expected[0] + 2.0 * expected[2]) / 3, abs=1e-6)


def test_sums_and_means_of_verl_and_openrlhf() -> None:
    """verl-project/verl, test_loss_aggregation_on_cpu.py at 9895e05e; OpenRLHF, tests/test_loss_aggregation.py at 06ee6ce6."""

    def aggregated(losses: Sequence[Values], kind: AggregationKind, empty: int = 0) -> float:
        """Each token's loss is -A log pi with log pi = -1, so A is the loss."""
        flat = [value for row in losses for value in row] + [4.0] * empty
        mask = [True] * (len(flat) - empty) + [False] * empty
        lengths = [*map(len, losses), *([empty] if empty else [])]
        return result(
            given((-1.0,) * len(flat), (-1.0,) * len(flat), flat, mask=mask, lengths=lengths), "gpg", aggregation=kind
        )[0]

    constant = AggregationKind.CONSTANT_LENGTH  # of 10
    assert aggregated([[1, 2], [5, 6, 7], [9]], constant) == pytest.approx(1.0)
    assert aggregated([[1, 2], [7]], constant, empty=3) == pytest.approx(10 / 20), "an empty sequence is not counted"
    rows = [[1, 2], [3, 4, 5], [7]]
    assert aggregated(rows, AggregationKind.TOKEN_MEAN) == pytest.approx(22 / 6)
    assert aggregated([[1, 3], [2, 4], [8]], AggregationKind.SEQUENCE_MEAN) == pytest.approx((2 + 3 + 8) / 3)
    assert aggregated([[1, 3]], AggregationKind.SEQUENCE_MEAN, empty=2) == pytest.approx(2.0)
    window = [[1, 2], [3, 4, 5], [6, 7]]
    assert aggregated(window, AggregationKind.TOKEN_MEAN) == pytest.approx(28 / 7)


def test_slimes_cispo() -> None:
    """THUDM/slime, tests/test_cispo_custom_loss.py at d31b07ca: thresholds 0 and 1.5, value and gradient."""
    inputs = given((0.0, 0.5, -1.0), (0.0, -0.5, -1.0), (1.0, -2.0, 0.25))
    value, gradient = result(inputs, "cispo", eps_low=1.0, eps_high=0.5, aggregation=AggregationKind.TOKEN_SUM)
    assert value == pytest.approx(0.0 + 1.5 * 2.0 * 0.5 + 0.25)
    assert gradient == pytest.approx([-1.0, 3.0, -0.25])


def test_areals_and_trls_sapo() -> None:
    """AReaL as above; huggingface/trl, tests/test_grpo_trainer.py (`test_get_sapo_token_loss`, in the copy that was read)."""
    for tau in (1.0, 2.0):
        value, gradient = result(given((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), "sapo", tau_pos=tau, tau_neg=tau)
        assert value == pytest.approx(-2.0 / tau)
        assert gradient == pytest.approx([-0.5] * 2), "at r = 1 that of -r A, whatever tau"
    gates = {
        advantage: result(given((0.5,), (0.0,), (advantage,)), "sapo", tau_pos=1.0, tau_neg=2.0)[0] / -advantage
        for advantage in (1.0, -1.0)
    }
    far = math.exp(0.5) - 1.0
    assert gates[1.0] == pytest.approx(4.0 / (1.0 + math.exp(-far)))
    assert gates[-1.0] == pytest.approx(2.0 / (1.0 + math.exp(-2.0 * far)))
    value, gradient = result(given((-1.0, -101.0), (-101.0, -1.0), (1.0, -1.0)), "sapo")
    assert all(map(math.isfinite, (value, *gradient)))


def test_trls_and_slimes_binary_trust_region() -> None:
    """huggingface/trl, tests/experimental/test_dppo_trainer.py at 0423cdb9.

    Two copies of slime: L-hongbin/slime-kernel-agent, tests/test_dppo_binary_policy_loss.py at 07e4559d, and
    MaxwellJryao/slime, tests/test_dppo_loss.py at 231790fa.
    """

    def dropped(
        now: Values, sampled: Values, advantages: Values, low: float, high: float, loss: str = "dppo_binary_tv"
    ) -> list[bool]:
        inputs = given([*map(math.log, now)], [*map(math.log, sampled)], advantages)
        return [value == 0.0 for value in result(inputs, loss, eps_low=low, eps_high=high)[1]]

    assert dropped((0.51, 0.29, 0.71), (0.5, 0.3, 0.7), (1.0,) * 3, 0.2, 0.28) == [False] * 3
    assert dropped((0.5,), (0.1,), (1.0,), 0.01, 0.01) == [True]
    assert dropped((0.1,), (0.5,), (-1.0,), 0.01, 0.01) == [True]
    now, sampled, advantages = (0.35, 0.10, 0.90, 0.20), (0.10, 0.40, 0.50, 0.70), (1.0, -1.0, 1.0, -1.0)
    assert dropped(now, sampled, advantages, 0.2, 0.28) == [False, True, True, True]
    now, sampled = (0.4, 0.4, 0.1, 0.1), (0.2, 0.2, 0.4, 0.4)
    assert dropped(now, sampled, advantages, 0.1, 0.1) == [True, False, False, True]
    assert dropped((0.9, 0.1), (0.5, 0.5), (-1.0, 1.0), 0.05, 0.05, "dppo_binary_kl") == [False, False]


def test_prime_rls_default_loss_at_large_ratios() -> None:
    """PrimeIntellect-ai/prime-rl, tests/unit/train/rl/test_loss_numerics.py at 30603ab5."""
    one = given((-2.0,), (-3.0,), (1.0,))
    value, gradient = result(one, "dppo_kl", dppo_mask_high=10.0, kl_tau=0.0, delta=20.0)
    assert (value, gradient) == (pytest.approx(-E), pytest.approx([-E]))
    masked = given((-1.0,), (-91.0,), (1.0,))
    assert result(masked, "dppo_kl", kl_tau=0.0) == (0.0, [0.0])
    capped, gradient = result(given((-2.0,), (-91.0,), (1.0,)), "dppo_kl", dppo_mask_high=10.0, kl_tau=0.0, delta=20.0)
    assert capped == pytest.approx(-20.0)
    assert gradient == [0.0], "its branch keeps the gradient of log pi at the cap"
    assert result(given((-2.0,), (-91.0,), (0.0,), teacher=(-3.0,)), "opd", delta=20.0)[1] != [0.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.1, 0.1, 0.1]),
        ("abs", [0.1, 0.1, 0.1]),
        ("k2", [0.005, 0.005, 0.005]),
        ("k3", [math.exp(-0.1) - 0.9] * 3),
    ],
)
def test_skyrls_and_openrlhfs_divergences(name: str, expected: list[float]) -> None:
    """SkyRL, tests/backends/skyrl_train/utils/test_ppo_utils.py at 0be108ee; OpenRLHF, tests/test_kl_estimator_gradient.py at
    1e0a09c6."""
    assert kl_estimate(of((0.2, 0.3, 0.5)), of((0.1, 0.2, 0.4)), name).tolist() == pytest.approx(expected)
    logs = of((-3.0, -1.0, -0.1, 0.0)).requires_grad_()
    (straight,) = torch.autograd.grad(kl_estimate(logs, torch.zeros(4, dtype=torch.float64), f"{name}+").sum(), logs)
    assert straight.tolist() == pytest.approx([-3.0, -1.0, -0.1, 0.0]), "that of the divergence: log pi - log reference"


def test_the_k3_divergence_of_openrlhf_is_bounded_by_10() -> None:
    """OpenRLHF as above: the value stops at 10, and its gradient is then 0."""
    logs = of((-100.0, -90.0, -11.0, -10.0, -3.0, -1.0, -0.1, 0.0)).requires_grad_()
    found = kl_estimate(logs, torch.zeros(8, dtype=torch.float64), "k3")
    (gradient,) = torch.autograd.grad(found.sum(), logs)
    assert found.tolist() == pytest.approx([10.0] * 5 + [E - 2.0, math.exp(0.1) - 1.1, 0.0])
    assert gradient.tolist() == pytest.approx([0.0] * 5 + [1.0 - E, 1.0 - math.exp(0.1), 0.0])


def test_the_adaptive_coefficients_of_openrlhf_and_skyrl() -> None:
    """OpenRLHF, tests/test_kl_controller.py at c9f0a150; SkyRL as above."""
    after = KlControl(KlControlKind.ADAPTIVE, horizon=100.0, target_kl=1.0).after
    assert after(0.1, 1.2, 10) == pytest.approx(0.102)
    assert KlControl(KlControlKind.ADAPTIVE, horizon=100.0, target_kl=0.1).after(0.2, 0.2, 10) == pytest.approx(0.204)
    assert KlControl().after(0.1, 1.0, 10) == 0.1


NAMED = (
    "positive_example_nll_weight",
    "goes through the sampling too",
    "reward_scaling",
    "stop_properly_penalty_coef",
    "outlier_token_is_threshold_low",
    "counts sequences without trained tokens",
    "`kl_tau` term",
    "importance_ratio_max",
    "binary_kl",
    "`dro`",
    "of the sequence's mean advantage",
    "tokens of the environment count",
    "estimates within +-10",
)
"""What upstream's tests expect and this project does otherwise or lacks, as docs/algorithms.md says it."""


def test_each_difference_that_upstreams_tests_show_is_named() -> None:
    text = " ".join((ROOT / "docs" / "algorithms.md").read_text().split())
    assert [name for name in NAMED if name not in text] == []
