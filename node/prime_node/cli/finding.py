"""One line of `prime-node doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `needed_for` is empty if nothing works without it."""

    what: str
    ok: bool
    seen: str
    advice: str = ""
    needed_for: str = ""
    tokens_per_s: float | None = None
    """Measured speed of the engine, in its own line."""
