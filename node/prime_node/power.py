"""The machine's power supply, as Linux shows it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SUPPLIES = Path("/sys/class/power_supply")


class PowerSupply:
    """Opened before a process confines itself, as a confined one may not open these files. Reads show the present state."""

    def __init__(self, folder: Path = SUPPLIES) -> None:
        """Open the files of all supplies. A machine without any, or without Linux, counts as one on mains power."""
        self._online: list[int] = []
        self._charging: list[int] = []
        with contextlib.suppress(OSError):
            for supply in sorted(folder.iterdir()):
                if _text(supply / "scope") == "Device":  # a mouse's
                    continue
                is_battery = _text(supply / "type") == "Battery"
                name, opened = ("status", self._charging) if is_battery else ("online", self._online)
                with contextlib.suppress(OSError):
                    opened.append(os.open(supply / name, os.O_RDONLY | os.O_CLOEXEC))

    def on_battery(self) -> bool:
        """Return whether no line supplies power, or, if no line is known, whether a battery is discharged."""
        if self._online:
            return not any(state == "1" for state in _states(self._online))
        return any(state == "Discharging" for state in _states(self._charging))

    def close(self) -> None:
        """Close the files. Idempotent."""
        for descriptor in (*self._online, *self._charging):
            os.close(descriptor)
        self._online, self._charging = [], []


def _states(descriptors: list[int]) -> Iterator[str]:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # unplugged
            yield os.pread(descriptor, 64, 0).decode(errors="replace").strip()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
