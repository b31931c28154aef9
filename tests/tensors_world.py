"""Memory that this process holds in tensors."""

from __future__ import annotations

import gc

import torch


def held_bytes() -> int:
    """Return the bytes of all tensors that are in use; those that share memory count once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
