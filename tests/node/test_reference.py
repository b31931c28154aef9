"""The reference policy and the entropy: estimators by hand, gradients in float64, and the trainer's copies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.node.batch_coordinator import write_model
from tests.node.trainer_world import CONFIG, check_kill_in_a_step, rows
from tests.tensors_world import held_bytes

from prime_node.adapters.models.lora import LoraSettings
from prime_node.adapters.training.chosen_logprobs import in_blocks, of_logits
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import LossInputs, LossOutputs, Penalty, find_loss, needs
from prime_node.algo.losses.penalty import kl_estimate
from prime_node.ports.train_backend import AggregationKind, KeptPolicy, LossNeed
from prime_node.ports.train_samples import TrainSample
from prime_node.trainer.recipe import Recipe
from prime_protocol.errors import LocalError

ESTIMATES = {
    "k1": 0.5,
    "kl": 0.5,
    "k2": 0.125,
    "mse": 0.125,
    "k3": math.exp(-0.5) - 0.5,
    "low_var_kl": math.exp(-0.5) - 0.5,
}
BATCH = [
    TrainSample((258, 10, 11, 259), (30, 31, 32), (-5.5,) * 3, 0.7),
    TrainSample((258, 10, 12, 259), (31, 30), (-5.5,) * 2, -0.4),
]


def given(**fields: Any) -> LossInputs:
    """Two tokens at log ratios 0.5 and -0.5 to the reference, and a masked one."""
    inputs: dict[str, Any] = {
        "trainer_logprobs": torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64, requires_grad=True),
        "inference_logprobs": torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64),
        "advantages": torch.zeros(3, dtype=torch.float64),
        "loss_mask": torch.tensor([True, True, False]),
        "reference_logprobs": torch.tensor([-1.5, -1.5, math.nan], dtype=torch.float64),
    }
    return LossInputs(**{**inputs, **fields})


@pytest.mark.parametrize(("name", "value"), ESTIMATES.items())
def test_an_estimate_is_its_formula_at_a_log_ratio_of_a_half(name: str, value: float) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5], dtype=torch.float64)
    for kind in (name, f"{name}+"):
        assert kl_estimate(logprobs, reference, kind).item() == pytest.approx(value)
    (slope,) = torch.autograd.grad(kl_estimate(logprobs, reference, f"{name}+").sum(), logprobs)
    assert slope.item() == pytest.approx(0.5), "with a + the gradient is that of k2"
    torch.autograd.gradcheck(lambda values: kl_estimate(values, reference, name), logprobs)


def test_an_estimate_is_bounded_and_finite_at_the_edges() -> None:
    logprobs = torch.tensor([-1e9, 0.0, -200.0], requires_grad=True)
    for name in (*ESTIMATES, "abs", "k1+", "k3+"):
        found = kl_estimate(logprobs, torch.tensor([0.0, -1e9, -1.0]), name)
        (slope,) = torch.autograd.grad(found.sum(), logprobs)
        assert found.isfinite().all()
        assert slope.isfinite().all()
    assert kl_estimate(logprobs, torch.tensor([0.0, -1e9, -1.0]), "k3").max().item() == 10.0


def test_the_terms_are_added_to_any_loss_and_aggregated_like_it() -> None:
    penalty = Penalty(kl_loss_coef=0.1, kl_loss_type="k2", entropy_coeff=0.01)
    inputs = given(entropy=torch.tensor([2.0, 3.0, math.nan], dtype=torch.float64, requires_grad=True))
    for aggregation, expected in (
        (AggregationKind.TOKEN_MEAN, 0.025 - 0.05),
        (AggregationKind.SEQUENCE_MEAN, (0.025 - 0.05) / 2),
    ):
        outputs = find_loss("aipo", aggregation=aggregation, penalty=penalty)(inputs)
        assert outputs.loss.item() == pytest.approx(expected)
    assert outputs.metrics["reference_kl"].tolist() == [0.25, 2.0]
    objective = find_loss("aipo", penalty=penalty)
    assert inputs.entropy is not None
    slopes = torch.autograd.grad(objective(inputs).loss, (inputs.trainer_logprobs, inputs.entropy))
    assert slopes[0].tolist() == pytest.approx([0.05, -0.05, 0.0])
    assert slopes[1].tolist() == pytest.approx([-0.01, -0.01, 0.0])


def test_a_loss_without_terms_needs_nothing_and_an_unknown_estimator_is_refused() -> None:
    assert find_loss("aipo").needs == frozenset()
    assert find_loss("aipo", penalty=Penalty(kl_loss_coef=0.1)).needs == {LossNeed.REFERENCE_LOGPROBS}
    assert find_loss("aipo", penalty=Penalty(entropy_coeff=0.1)).needs == {LossNeed.ENTROPY}
    with pytest.raises(LocalError, match="KL estimator 'k4': expected one of kl, mse"):
        Penalty(kl_loss_type="k4")


@needs("reference_logprobs", "entropy")
def custom(inputs: LossInputs) -> LossOutputs:
    """A loss of a user's own module."""
    assert inputs.reference_logprobs is not None
    assert inputs.entropy is not None
    loss = (inputs.trainer_logprobs - inputs.reference_logprobs - 0.5 * inputs.entropy)[inputs.loss_mask].sum()
    return LossOutputs(
        loss, {"entropy_seen": inputs.entropy, "log_ratio": inputs.trainer_logprobs - inputs.reference_logprobs}
    )


@pytest.mark.parametrize("blocks", [False, True])
def test_the_entropys_gradient_is_that_of_its_definition(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd in float64; tolerance: roundings of float32."""
    monkeypatch.setattr("prime_node.adapters.training.chosen_logprobs.BLOCK_LOGITS", {"cpu": 8})
    torch.manual_seed(1)
    hidden, head, bias = torch.randn(3, 4), torch.randn(11, 4), torch.randn(11)
    rows_N, targets_N = torch.tensor([0, 0, 2]), torch.tensor([1, 10, 5])
    weights_N, weights_S = torch.randn(3), torch.randn(3)
    inputs = [each.requires_grad_() for each in (hidden, head, bias)]
    if blocks:
        chosen, entropy = in_blocks(hidden, head, bias, rows_N, targets_N, 0.7, entropy_gradient=True)
    else:
        logits = torch.nn.functional.linear(*inputs) / 0.7
        chosen, entropy = of_logits(logits, rows_N, targets_N, entropy_gradient=True)
    found = torch.autograd.grad((chosen * weights_N).sum() + (entropy * weights_S).sum(), inputs)
    doubles = [each.detach().double().requires_grad_() for each in inputs]
    logprobs = (torch.nn.functional.linear(*doubles) / 0.7).log_softmax(-1)
    total = (logprobs[rows_N, targets_N] * weights_N).sum() - ((logprobs.exp() * logprobs).sum(-1) * weights_S).sum()
    for slope, expected in zip(found, torch.autograd.grad(total, doubles), strict=True):
        torch.testing.assert_close(slope.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_custom_loss_gets_what_it_asks_for(tmp_path: Path) -> None:
    backend = TorchBackend(write_model(tmp_path / "model"))
    loss = find_loss("custom", import_path=f"{__name__}.custom")
    assert loss.needs == {LossNeed.REFERENCE_LOGPROBS, LossNeed.ENTROPY}
    backend.keep_policy(KeptPolicy.REFERENCE)
    samples = with_reference(backend)
    stats = backend.train_step(samples, loss, lr=1e-2)
    assert stats.metrics["log_ratio"] == 0.0, "the reference is the policy itself so far"
    assert stats.metrics["entropy_seen"] == pytest.approx(stats.metrics["entropy_mean"])
    assert stats.metrics["entropy_seen"] > 1.0
    assert backend.train_step(samples, loss, lr=1e-2).metrics["log_ratio"] < 0.0


def with_reference(backend: TorchBackend) -> list[TrainSample]:
    found = backend.logprobs(BATCH, KeptPolicy.REFERENCE)
    return [
        TrainSample(
            one.prompt_token_ids,
            one.completion_token_ids,
            one.inference_logprobs,
            one.advantage,
            reference_logprobs=tuple(its),
        )
        for one, its in zip(BATCH, found, strict=True)
    ]


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4)])
def test_the_reference_stays_while_the_policy_moves_and_survives_a_checkpoint(
    tmp_path: Path, lora: LoraSettings | None
) -> None:
    model, aipo = write_model(tmp_path / "model"), find_loss("aipo")
    backend = TorchBackend(model, lora=lora)
    held, before = held_bytes(), backend.logprobs(BATCH)
    backend.keep_policy(KeptPolicy.REFERENCE)
    copied = held_bytes() - held
    if lora is None:
        assert copied == 2 * sum(each.numel() for each in (backend.shared_tensors() or {}).values()), "2 bytes a weight"
    else:
        assert 0 < copied < held / 20, "the factors alone"
    for _ in range(3):
        backend.train_step(BATCH, aipo, lr=1e-1)
    trained = backend.logprobs(BATCH)
    assert backend.logprobs(BATCH, KeptPolicy.REFERENCE) == before != trained
    assert backend.logprobs(BATCH) == trained
    (tmp_path / "saved").mkdir()
    backend.save(tmp_path / "saved")()
    resumed = TorchBackend(model, lora=lora)
    resumed.load(tmp_path / "saved")
    assert resumed.logprobs(BATCH, KeptPolicy.REFERENCE) == before
    assert resumed.logprobs(BATCH) == trained


def test_a_checkpoint_without_a_reference_says_that_none_is_stored(tmp_path: Path) -> None:
    backend = TorchBackend(write_model(tmp_path / "model"))
    (tmp_path / "saved").mkdir()
    backend.save(tmp_path / "saved")()
    backend.keep_policy(KeptPolicy.REFERENCE)
    backend.load(tmp_path / "saved")
    with pytest.raises(LocalError, match="no reference policy is stored"):
        backend.logprobs(BATCH, KeptPolicy.REFERENCE)


def test_the_reference_is_renewed_at_multiples_of_its_interval() -> None:
    loss = CONFIG.loss.model_copy(update={"kl_loss_coef": 0.1})
    config = CONFIG.model_copy(update={"loss": loss, "ref_update_interval": 3})
    recipe = Recipe.of(config, max_steps=9, completion_tokens_max=4, vocab_size=8)
    kept, renewed = None, []
    for step in range(8):
        if recipe.renews_reference(step, kept):
            kept = step
            renewed.append(step)
    assert renewed == [0, 3, 6]
    assert not Recipe.of(CONFIG, max_steps=9, completion_tokens_max=4, vocab_size=8).renews_reference(0, None)


@pytest.mark.parametrize("interval", [0, 2])
async def test_a_run_with_a_reference_continues_bit_exactly_after_a_kill(tmp_path: Path, interval: int) -> None:
    changes = {
        "loss": CONFIG.loss.model_copy(update={"kl_loss_coef": 0.5, "entropy_coeff": 0.01}),
        "ref_update_interval": interval,
    }
    config = CONFIG.model_copy(update=changes)
    await check_kill_in_a_step(tmp_path, config)
    divergences = [row["reference_kl"] for row in rows(tmp_path / "whole", "reference_kl")]
    assert [float(str(value)) == 0.0 for value in divergences] == [True, False, interval == 2, False]
