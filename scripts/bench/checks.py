"""Bars of the benchmarks: each value with its bar, as lines of text or as JSON alone on stdout.

`--json` of every benchmark prints exactly {"checks": [{"name", "value", "bar", "ok"}, ...]}, and "rows" where a benchmark has
such: what its checks are computed from. `results.py record` reads that.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One value against its bar."""

    name: str
    value: float
    """Infinite: the event that is counted never happened."""
    bar: str
    """With its relation: ">= 0.5"."""
    ok: bool


def at_least(name: str, value: float, bar: float) -> Check:
    """Check that `value` reaches `bar`."""
    return Check(name, value, f">= {bar:,g}", value >= bar)


def at_most(name: str, value: float, bar: float) -> Check:
    """Check that `value` does not pass `bar`."""
    return Check(name, value, f"<= {bar:,g}", value <= bar)


def digits(value: float) -> float | None:
    """Return four significant digits, or None for what JSON cannot hold."""
    if not math.isfinite(value):
        return None
    return round(value) if abs(value) >= 1_000 else float(f"{value:.4g}")


class Output:
    """The place where a benchmark reports. With `as_json`, stdout receives the checks alone.

    File descriptor 1 leads to stderr from here on, so that lines of other libraries and of child processes go there too.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._json_fd: int | None = None
        if as_json:
            sys.stdout.flush()
            self._json_fd = os.dup(1)
            os.dup2(2, 1)

    def finish(self, checks: Sequence[Check], rows: Sequence[Mapping[str, float | str]] = ()) -> int:
        """Print the checks, as JSON with the rows. Return the exit code: 1 where a bar was missed (stretch aims do not count)."""
        if self._json_fd is None:
            for check in checks:
                print(f"{'ok  ' if check.ok else 'MISS'} {check.name}: {check.value:,.4g}, bar {check.bar}")
        else:
            sys.stdout.flush()
            with os.fdopen(self._json_fd, "w") as file:
                found: dict[str, Any] = {
                    "checks": [{**asdict(check), "value": digits(check.value)} for check in checks]
                }
                if rows:
                    found["rows"] = [
                        {name: value if isinstance(value, str) else digits(value) for name, value in row.items()}
                        for row in rows
                    ]
                file.write(json.dumps(found, allow_nan=False) + "\n")
        return 0 if all(check.ok or "stretch" in check.name for check in checks) else 1
