"""Hostile text of strangers, and whether some text is safe to show."""

from __future__ import annotations

import re
from typing import Any

from prime_protocol.visible import printable

RUN = "ab" * 32
CHARACTERS = (
    "\x00\x07\x08\t\n\r\x1b\x7f\x85\x9b\u00ad\u034f\u061c\u115f\u180e\u200b\u200d\u200e\u200f\u2028\u2029\u202a\u202e"
    "\u2060\u2066\u2069\u3164\ufe0f\ufeff\uffa0\ufff9\U0001d173\U000e0041"
)
HOSTILE = f"\x1b[2J\x1b]0;owned\x07[bold red]x[/] 2026-11-22 00:00:00,000 ERROR {CHARACTERS}"


def is_clean(text: str) -> bool:
    """Return whether only visible characters and our own line ends remain; colours of rich are left out."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return all(printable(line, len(line)) == line for line in plain.split("\n"))


def hostile_status() -> dict[str, Any]:
    """Return a hostile coordinator's status: hostile text in every text field."""
    worker = {
        "worker": HOSTILE, "name": HOSTILE, "state": HOSTILE, "active": True, "waiting_for": HOSTILE, "silent_s": 99.0,
        "refused": {HOSTILE: 3}, "banned": None, "strikes": 1,
    }  # fmt: skip
    return {
        "run": RUN, "name": HOSTILE, "step": 1, "head": 1, "max_steps": 9, "waiting_for": [HOSTILE, HOSTILE],
        "rollouts": {"accepted": 1, "refused": {HOSTILE: 2}}, "num_workers": 2, "steps": [{"step": 1}],
        "workers": [worker, worker | {"banned": {"step": 1, "reason": HOSTILE}, "active": False}],
    }  # fmt: skip
