"""Rows of metrics in Weights & Biases. `WANDB_MODE=offline` keeps them in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wandb

from prime_protocol.errors import LocalError


class WandbRows:
    """Implementation of observe.Recorder. After a restart rows continue under the same id. Raises LocalError without a login."""

    def __init__(self, folder: Path, *, project: str, run_id: str, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project, id=run_id, name=name, dir=str(folder), resume="allow")
        except wandb.Error as error:
            raise LocalError(
                f"Weights & Biases: {error} Or set WANDB_MODE=offline: then the rows stay in {folder}, for `wandb sync`"
            ) from None
        # W&B's own step counts calls, which is meaningless after a resume and with rows of several kinds.
        self._run.define_metric("*", step_metric="step", step_sync=False)
        self._run.define_metric("sft/*", step_metric="sft/sft_step", step_sync=False)

    def record(self, **fields: Any) -> None:
        """Log one row."""
        prefix = "sft/" if "sft_step" in fields else ""
        self._run.log({prefix + name: value for name, value in fields.items() if isinstance(value, int | float)})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
