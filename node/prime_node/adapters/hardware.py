"""What this machine computes with."""

from __future__ import annotations

import torch


def has_gpu() -> bool:
    """True where torch can use a CUDA device."""
    return bool(torch.cuda.is_available())
