"""Rows of metrics as TensorBoard scalars, in a folder that `tensorboard --logdir` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorboardRows:
    """Implementation of observe.Recorder. A row is at its `step`, or else at its `policy_version` or `sft_step`."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = SummaryWriter(str(folder))

    def record(self, **fields: Any) -> None:
        """Write the numbers of one row as scalars."""
        at = next((fields[name] for name in ("step", "policy_version", "sft_step") if name in fields), None)
        for name, value in fields.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"sft/{name}" if "sft_step" in fields else name, value, at)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()
