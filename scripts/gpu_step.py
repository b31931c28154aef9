"""One step of gpu_check.py: its shapes, its values and its checks."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from checks import Check, at_least, at_most

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("node", "protocol", "lab")]


class Skipped(Exception):
    """A step cannot run here."""


@dataclass
class Step:
    """One step's shapes and results."""

    dry: bool
    values: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured, by name."""
    checks: list[Check] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Device of the step."""
        return "cpu" if self.dry else "cuda"

    def at_most(self, name: str, value: float, bar: float) -> None:
        """Record a value, and a miss if it is not at most `bar`; NaN is a miss."""
        self.values[name] = value
        self.checks.append(at_most(name, value, bar))

    def at_least(self, name: str, value: float, bar: float) -> None:
        """Record a value, and a miss if it is not at least `bar`."""
        self.values[name] = value
        self.checks.append(at_least(name, value, bar))

    def seconds(self, work: Callable[[], object], *, repeat: int = 5) -> float:
        """Return the least time of a call, after one that is not timed."""
        import torch

        best = float("inf")
        for turn in range(1 if self.dry else repeat + 1):
            started = time.perf_counter()
            work()
            if not self.dry:
                torch.cuda.synchronize()
            if turn or self.dry:
                best = min(best, time.perf_counter() - started)
        return best


def need(*names: str) -> None:
    """Import modules. Raises Skipped with the missing packages."""
    missing = set()
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.add(error.name or name)
    if missing:
        raise Skipped(f"needs {', '.join(sorted(missing))}")


def model_folder(step: Step, folder: Path) -> Path:
    """Write a Qwen3 configuration with a tied head: the shape of Qwen3-0.6B, or a small one."""
    from prime_node.adapters.models.tiny_model import tiny_model_files

    for name, data in tiny_model_files().items():
        (folder / name).write_bytes(data)
    config = json.loads((folder / "config.json").read_bytes()) | {"tie_word_embeddings": True, "num_key_value_heads": 2}
    if not step.dry:
        config |= {"hidden_size": 1_024, "num_hidden_layers": 28, "intermediate_size": 3_072, "vocab_size": 151_936}
        config |= {
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
