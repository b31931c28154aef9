"""One process that computes as many do: `Ranks.single`."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh

from prime_node.adapters.training.ranks import Ranks


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cuda:0", 0), ("cuda", 3)])
def test_a_single_rank_shards_onto_the_gpu_that_the_settings_name(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    """`fully_shard` puts parameters on the process's current GPU, which no mesh names. Before, that was the first one.

    The machine of this test has no GPU: the test keeps which one is current, and asks torch's own code. "cuda" leaves it.
    """
    current = [3]
    Ranks.single(device="cpu")  # NCCL needs GPUs, and a process has one group
    monkeypatch.setattr(torch.cuda, "set_device", lambda named: current.append(torch.device(named).index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    mesh = Ranks.single(device=device).mesh
    assert mesh is not None
    assert _get_device_from_mesh(mesh) == torch.device("cuda", index)
