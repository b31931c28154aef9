"""Rows of metrics as TensorBoard's scalars, in a folder that `tensorboard --logdir` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorboardRows:
    """Implements observe.Recorder. A row is put at its `step`, or at the `policy_version` or `sft_step` that it has instead."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = SummaryWriter(str(folder))

    def record(self, **fields: Any) -> None:
        at = next((fields[name] for name in ("step", "policy_version", "sft_step") if name in fields), None)
        for name, value in fields.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"sft/{name}" if "sft_step" in fields else name, value, at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
