"""What browsers show in tests, benchmarks and pictures: a history of invented numbers, and names of hostile strangers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "{{7*7}} javascript:alert(1)",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u0334algo",
    "'; DROP TABLE workers;--",
    "工作者 🦊",
    "a" * 60,
)
UNSEEN = "\u202egnp.exe"
"""A name that the wire refuses, since it turns the direction of what follows. An older state may hold it."""
MACHINES = ("RTX 4090, 24 GB", "H100, 80 GB", "M3 Max, 64 GB", "2 cores, x86_64", "RTX 3060, 12 GB", "L40S, 48 GB")
VIEWS = ("run", "workers", "swarm", "checks", "ledger", "join")


def recorded_history(num_steps: int, tokens: Mapping[str, int], *, now_ms: int, step_ms: int = 90_000) -> bytes:
    """Return a `history.json` in which a model learns for `num_steps` steps."""
    draw = random.Random(7)

    def learned(step: int) -> float:
        return 0.3 + 0.55 * (1 - math.exp(-step / 90))

    def beside(value: float, spread: float) -> float:
        return round(abs(draw.gauss(value, spread)), 4)

    steps: list[dict[str, float]] = [
        {
            "step": step,
            "at": now_ms - (num_steps - step) * step_ms,
            "reward": beside(learned(step), 0.04),
            "seconds": beside(step_ms / 1_000, 9),
            "train": beside(28, 2),
            "generate": beside(41, 6),
            "check": beside(5, 1),
            "broadcast": beside(12, 3),
            "swap": beside(1.2, 0.2),
            "queue": beside(14, 5),
            "idle": 0.1,
            "lag": draw.choice([1.2, 1.5, 1.8, 2.0]),
            "closeness": 0.9,
            "workers": 9_200.0,
        }
        for step in range(num_steps)
    ]
    evaluations = []
    for policy in range(0, num_steps, 25):
        row: dict[str, Any] = {"policy": policy, "by": "trainer", "at": now_ms - (num_steps - policy) * step_ms}
        for name, more in (("greedy", 0.07), ("sampled", 0.0)):
            mean = round(learned(policy) + more + draw.gauss(0, 0.01), 4)
            row |= {name: mean, f"{name}_low": round(mean - 0.04, 4), f"{name}_high": round(mean + 0.04, 4)}
        evaluations.append(row)
    return json.dumps({"steps": steps, "evaluations": evaluations, "tokens": dict(tokens), "events": []}).encode()


def name_of(number: int) -> str:
    """Return the name of a worker: the first ones are hostile. Example: name_of(123) == "rig-123"."""
    hostile = (*HOSTILE, UNSEEN)
    return hostile[number] if number < len(hostile) else f"rig-{number}"
