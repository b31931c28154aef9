"""The evaluation's engine over the trainer's own weights: the same answers as from a model of its own, without a second copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.node.batch_coordinator import write_model

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.lora import LoraSettings
from prime_node.adapters.training.packed_attention import TreeLayout, expand_heads
from prime_node.adapters.training.ranks import ALONE, Ranks
from prime_node.adapters.training.sharding import PLAIN, Placement
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.packing import pack
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.train_samples import TrainSample
from prime_protocol.assignment import Sampling

SAMPLES = [TrainSample((258, 10, 20 + n, 259), (30, 31, 32 + n), (-5.5,) * 3, 1.0 - n) for n in range(3)]
SAMPLING = Sampling(completion_tokens_max=6, stop_token_ids=())
REQUESTS = [GenerateRequest((258, 10, 11 + n), seed=n) for n in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize("sharded", [False, True])
async def test_the_evaluation_computes_with_the_trainers_own_weights(folder: Path, sharded: bool) -> None:
    """`sharded`: as on one GPU, where FSDP2 manages the parameters."""
    ranks = Ranks.single(device="cpu") if sharded else ALONE
    placement = Placement(compute_dtype="bf16") if sharded else PLAIN
    backend = TorchBackend(folder, ranks=ranks, placement=placement)
    tensors = backend.shared_tensors()
    assert tensors is not None
    shared, own = TransformersEngine(folder, tensors=tensors), TransformersEngine(folder)
    for version in (1, 2):
        backend.train_step(SAMPLES, find_loss("aipo"), lr=1e-2)
        weights = backend.snapshot()
        await own.load(weights, policy_version=version)
        await shared.load(weights, policy_version=version)
        assert await shared.generate(REQUESTS, SAMPLING) == await own.generate(REQUESTS, SAMPLING)
    backend.train_step(SAMPLES, find_loss("aipo"), lr=1e-2)
    with pytest.raises(ValueError, match="is shared and has other values"):
        await shared.load(weights, policy_version=3)
    await shared.close()
    await own.close()


def test_adapters_and_weights_in_the_hosts_memory_are_not_shared(folder: Path) -> None:
    assert TorchBackend(folder, lora=LoraSettings(rank=2, alpha=4)).shared_tensors() is None
    offloaded = TorchBackend(folder, ranks=Ranks.single(device="cpu"), placement=Placement(offload=True))
    assert offloaded.shared_tensors() is None


def test_expanded_heads_attend_as_grouped_ones_do() -> None:
    packed = pack(SAMPLES, row_tokens=16, micro_batch_tokens=64)[0]
    layout = TreeLayout.of(packed, device=torch.device("cpu"), dtype=torch.float32)
    tokens = layout.trunk_tokens + layout.num_rows * layout.mask_R1WK.shape[2]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, tokens, 8) for heads in (4, 2, 2))
    grouped = layout.attend(query, key, value, scaling=0.3)
    expanded = layout.attend(query, expand_heads(key, 4), expand_heads(value, 4), scaling=0.3)
    torch.testing.assert_close(expanded, grouped, rtol=0.0, atol=1e-6)
