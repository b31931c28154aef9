"""Training modes other than AdamW on all weights: adapters, other optimizers, compiled layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.node.batch_coordinator import write_model
from tests.node.rank_jobs import samples

from prime_node.adapters.models.lora import LoraSettings, MergedLinear, merged_weight
from prime_node.adapters.training.sharding import PLAIN, Placement
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.ports.train_backend import OptimizerSettings
from prime_protocol.errors import LocalError
from prime_protocol.weights import Weights, root_of

AIPO = find_loss("aipo")
LORA = LoraSettings(rank=4, alpha=8, targets=("q_proj", "v_proj"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def changed(before: Weights, after: Weights) -> set[str]:
    return {name for name in before if not np.array_equal(before[name].data, after[name].data)}


def test_training_begins_at_the_model_and_changes_its_targets_alone(folder: Path) -> None:
    plain = TorchBackend(folder, seed=3, published_dtype="fp32").snapshot()
    backend = TorchBackend(folder, plain, seed=3, published_dtype="fp32", lora=LORA)
    assert root_of(backend.snapshot()) == root_of(plain)
    backend.train_step(samples(), AIPO, lr=1e-2)
    touched = changed(plain, backend.snapshot())
    assert touched
    assert {name.split(".")[-2] for name in touched} == {"q_proj", "v_proj"}


def test_what_is_published_is_the_merged_model(folder: Path) -> None:
    """A plain model with the published weights gives the logprobs of the model with its adapters."""
    backend = TorchBackend(folder, seed=3, published_dtype="fp32", lora=LORA)
    for seed in range(3):
        backend.train_step(samples(seed=seed), AIPO, lr=1e-2)
    plain = TorchBackend(folder, backend.snapshot(), published_dtype="fp32")
    for found, expected in zip(plain.logprobs(samples()), backend.logprobs(samples()), strict=True):
        assert found == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("placement", [PLAIN, Placement(recompute=True)])
def test_adapted_layers_compute_with_exactly_the_published_weights(folder: Path, placement: Placement) -> None:
    """Workers round the merged weights to bf16, which loses most of what the adapters add. So the trainer rounds them as well."""
    backend = TorchBackend(folder, seed=3, lora=LORA, placement=placement)
    for seed in range(3):
        backend.train_step(samples(seed=seed), AIPO, lr=1e-3)
    plain = TorchBackend(folder, backend.snapshot(), published_dtype="fp32")
    for found, expected in zip(plain.logprobs(samples()), backend.logprobs(samples()), strict=True):
        assert found == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_merged_layer_are_those_of_the_unmerged_one(bias: bool) -> None:
    """Without rounding, in fp32. The layer is `x W^T + scale * (x A^T) B^T`."""
    torch.manual_seed(0)
    shapes = {"x": (2, 3, 8), "W": (6, 8), "A": (4, 8), "B": (6, 4), "bias": (6,)}
    drawn = {name: torch.randn(*shape) for name, shape in shapes.items()}
    upstream = torch.randn(2, 3, 6)

    def gradients(merged: bool) -> list[torch.Tensor]:
        x, A, B = (drawn[name].clone().requires_grad_() for name in ("x", "A", "B"))
        added = drawn["bias"] if bias else None
        if merged:
            W = merged_weight(drawn["W"], A, B, 2.0, torch.float32).detach()
            output = MergedLinear.apply(x, W, added, A, B, 2.0)
        else:
            output = torch.nn.functional.linear(x, drawn["W"], added) + 2.0 * (x @ A.T) @ B.T
        output.backward(upstream)
        return [output, *(each.grad for each in (x, A, B))]

    for found, expected in zip(gradients(merged=True), gradients(merged=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("published_dtype", ["fp32", "bf16"])
def test_a_checkpoint_holds_the_adapters_and_resumes_bit_exactly(
    folder: Path, tmp_path: Path, published_dtype: str
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    backend = TorchBackend(folder, seed=3, published_dtype=published_dtype, lora=LORA)
    backend.train_step(samples(seed=1), AIPO, lr=1e-2)
    backend.save(saved)()
    backend.train_step(samples(seed=2), AIPO, lr=1e-2)
    again = TorchBackend(folder, seed=3, published_dtype=published_dtype, lora=LORA)
    again.load(saved)
    again.train_step(samples(seed=2), AIPO, lr=1e-2)
    assert root_of(again.snapshot()) == root_of(backend.snapshot())
    everything = tmp_path / "everything"
    everything.mkdir()
    plain = TorchBackend(folder)
    plain.train_step(samples(seed=1), AIPO, lr=1e-2)
    plain.save(everything)()
    sizes = [sum(path.stat().st_size for path in each.iterdir()) for each in (saved, everything)]
    assert sizes[0] < sizes[1] / 4


def test_the_seed_draws_the_adapters(folder: Path) -> None:
    def after_a_step(seed: int) -> str:
        weights = TorchBackend(folder, seed=3, published_dtype="fp32").snapshot()
        backend = TorchBackend(folder, weights, seed=seed, published_dtype="fp32", lora=LORA)
        backend.train_step(samples(), AIPO, lr=1e-2)
        return root_of(backend.snapshot())

    assert after_a_step(1) == after_a_step(1) != after_a_step(2)


def test_a_target_that_the_model_lacks_is_reported(folder: Path) -> None:
    with pytest.raises(LocalError, match=r"trainer\.lora: .*not_there"):
        TorchBackend(folder, lora=LoraSettings(rank=2, alpha=2, targets=("not_there",)))


def test_another_optimizer_comes_by_its_import_path(folder: Path, tmp_path: Path) -> None:
    """Adafactor's states have other shapes than the parameters; they are saved and restored."""
    settings = OptimizerSettings(import_path="torch.optim.Adafactor", kwargs={"weight_decay": 0.1})
    saved = tmp_path / "saved"
    saved.mkdir()
    backend = TorchBackend(folder, seed=3)
    backend.new_optimizer(settings)
    backend.train_step(samples(seed=1), AIPO, lr=1e-2)
    backend.save(saved)()
    backend.train_step(samples(seed=2), AIPO, lr=1e-2)
    again = TorchBackend(folder, seed=4)
    again.load(saved)
    again.train_step(samples(seed=2), AIPO, lr=1e-2)
    assert root_of(again.snapshot()) == root_of(backend.snapshot())


@pytest.mark.parametrize(
    ("path", "kwargs", "match"),
    [
        ("torch.optim.Adafactor", {"betas": 1}, "betas"),
        ("torch.optim.Nothing", {}, "has no Nothing"),
        ("torch.zeros_like", {}, "torch.zeros_like"),
    ],
)
def test_an_unknown_optimizer_is_reported(folder: Path, path: str, kwargs: dict[str, float], match: str) -> None:
    with pytest.raises(LocalError, match=match):
        TorchBackend(folder).new_optimizer(OptimizerSettings(import_path=path, kwargs=kwargs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads it
def test_compiled_layers_give_the_same_step(folder: Path) -> None:
    plain = TorchBackend(folder, seed=3).train_step(samples(4), AIPO, lr=1e-3)
    compiled = TorchBackend(folder, seed=3, placement=Placement(compile_backend="aot_eager"))
    found = compiled.train_step(samples(4), AIPO, lr=1e-3)
    assert found.loss == pytest.approx(plain.loss, abs=1e-6)
    assert found.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    torch.compiler.reset()
