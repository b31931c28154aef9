"""AdamW with 8-bit running means: it trains the toy model, holds less, and resumes bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.node.batch_coordinator import write_model
from tests.tensors_world import held_bytes

from prime_node.adapters.training import eight_bit
from prime_node.adapters.training.eight_bit import BLOCK, SMALL, Blocks, EightBitAdamW, code_values
from prime_node.adapters.training.ranks import ALONE, Ranks
from prime_node.adapters.training.sharding import PLAIN, Placement
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.adapters.training.torch_optimizers import set_learning_rate
from prime_node.algo.losses import find_loss
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_protocol.weights import root_of

pytestmark = pytest.mark.slow
EIGHT_BIT = OptimizerSettings(moments="8bit", weight_decay=0.0)
SFT, AIPO = find_loss("sft"), find_loss("aipo", kwargs={"delta": 4.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def samples(*, seed: int = 0) -> list[TrainSample]:
    rng = random.Random(seed)
    found = []
    for _ in range(12):
        prompt, completion = (258, 10, rng.choice((20, 21)), 259), tuple(rng.choice((30, 31, 32)) for _ in range(4))
        found.append(TrainSample(prompt, completion, (-5.5,) * 4, rng.gauss(0.0, 1.0)))
    return found


def backend_of(
    folder: Path, settings: OptimizerSettings, *, dtype: str = "bf16", sharded: bool = False
) -> TorchBackend:
    """Return a backend with this optimizer; `sharded` as on a GPU: FSDP2, with one rank."""
    ranks = Ranks.single(device="cpu") if sharded else ALONE
    placement = Placement(compute_dtype="bf16") if sharded else PLAIN
    backend = TorchBackend(folder, published_dtype=dtype, ranks=ranks, placement=placement)
    backend.new_optimizer(settings)
    return backend


def taught() -> list[TrainSample]:
    return [
        TrainSample(one.prompt_token_ids, one.completion_token_ids, one.inference_logprobs, 1.0, TrainingMode.SFT)
        for one in samples()
    ]


@pytest.mark.parametrize("sharded", [False, True])
def test_it_learns_as_much_as_with_moments_in_fp32(folder: Path, sharded: bool) -> None:
    losses = {}
    for moments in ("fp32", "8bit"):
        backend = backend_of(folder, OptimizerSettings(moments=moments, weight_decay=0.0), sharded=sharded)
        losses[moments] = [backend.train_step(taught(), SFT, lr=3e-3).loss for _ in range(15)]
    assert losses["8bit"][-1] < 0.6 * losses["8bit"][0]
    assert losses["8bit"][-1] == pytest.approx(losses["fp32"][-1], rel=0.1)


def test_it_holds_less_although_small_tensors_keep_fp32(folder: Path) -> None:
    held = {}
    for moments in ("fp32", "8bit"):
        backend = backend_of(folder, OptimizerSettings(moments=moments))
        before = held_bytes()
        backend.train_step(samples(), AIPO, lr=1e-3)
        held[moments] = held_bytes() - before
    assert held["8bit"] < 0.7 * held["fp32"]


@pytest.mark.parametrize("sharded", [False, True])
def test_it_resumes_bit_for_bit(folder: Path, tmp_path: Path, sharded: bool) -> None:
    whole = backend_of(folder, EIGHT_BIT, sharded=sharded)
    for seed in (1, 2):
        whole.train_step(samples(seed=seed), AIPO, lr=1e-3)
    whole.save(tmp_path)()
    for seed in (3, 4):
        whole.train_step(samples(seed=seed), AIPO, lr=1e-3)

    resumed = backend_of(folder, EIGHT_BIT, sharded=sharded)
    resumed.train_step(samples(seed=9), AIPO, lr=1e-3)
    resumed.load(tmp_path)
    for seed in (3, 4):
        resumed.train_step(samples(seed=seed), AIPO, lr=1e-3)
    assert root_of(resumed.snapshot()) == root_of(whole.snapshot())


def test_the_learning_rate_is_that_of_each_step(folder: Path) -> None:
    moved = []
    for lr in (1e-4, 1e-3):
        backend = backend_of(folder, EIGHT_BIT, dtype="fp32")
        before = np.concatenate([tensor.data.view(np.float32).copy() for tensor in backend.snapshot().values()])
        backend.train_step(samples(), AIPO, lr=lr)
        after = np.concatenate([tensor.data.view(np.float32) for tensor in backend.snapshot().values()])
        moved.append(float(np.abs(after - before).max()))
    assert moved == pytest.approx([1e-4, 1e-3], rel=0.01)


@pytest.mark.parametrize("is_signed", [False, True])
def test_what_blocks_hold_is_near_and_becomes_the_same_blocks(is_signed: bool) -> None:
    """Half the distance between two neighbours of the largest decade is the largest error, as a share of the block's scale."""
    values = torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 3, 64)[:, None]
    values[0, :] = 0.0
    if not is_signed:
        values.square_()
    first, again = (Blocks.empty(values, is_signed=is_signed) for _ in range(2))
    first.write(slice(None), values)
    held = first.read(slice(None))
    scales = values.abs().amax(dim=1, keepdim=True)
    assert ((held - values).abs() <= scales * code_values(is_signed, values.device).diff().max() / 1.99).all()
    again.write(slice(None), held)
    assert torch.equal(first.codes_NB, again.codes_NB)
    assert torch.equal(first.scales_N1, again.scales_N1)


@pytest.mark.parametrize("shape", [(64, 256), (100, 41), (3,)])
def test_its_step_is_that_of_adamw_within_the_rounding(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit, "CHUNK", 16 * BLOCK)  # several chunks, of which the last one may be short
    random = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=random)
    settings = OptimizerSettings(moments="8bit", weight_decay=0.1)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    plain = torch.optim.AdamW([theirs], betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
    compact = EightBitAdamW([ours], settings)
    for optimizer in (plain, compact):
        set_learning_rate(optimizer, 1e-2)
    for _ in range(20):
        theirs.grad = torch.randn(shape, generator=random) + 0.5
        ours.grad = theirs.grad.clone()
        plain.step()
        compact.step()
        assert torch.equal(ours.grad, theirs.grad), "a step changes no gradient"
    moved, errors = (theirs - start).abs().mean(), (ours - theirs).abs()
    if ours.numel() >= SMALL and ours.numel() % BLOCK == 0:
        assert errors.mean() < 0.02 * moved
        assert errors.max() < 0.1 * moved
    else:
        assert errors.max() < 1e-6
