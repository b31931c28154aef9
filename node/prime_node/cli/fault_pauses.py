"""Pauses before a role begins again whose engine has failed, so that a lasting fault is no loop of restarts.

A service manager starts such a role again after seconds, since a new process often finds the machine in order. A role that
nobody watches then waits, twice as long after each further fault. In a terminal it begins at once.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prime_node.files import write_durably
from prime_node.inside import read_regular
from prime_node.patience import causes_of
from prime_node.ports.clock import Clock
from prime_node.ports.engine import EngineFault

log = logging.getLogger(__name__)

FAULTS = "engine-faults.json"
"""File of the role's folder with the number of faults in a row and the time of the last one."""
PAUSE_S_MIN, PAUSE_S_MAX = 60.0, 3_600.0
FORGOTTEN_S = 6 * 3_600.0
"""Time after a fault from which the next one counts as the first."""


async def pause_after_faults(folder: Path, clock: Clock) -> None:
    """Wait for as long as the faults in a row require, unless this is a terminal."""
    count, at_ms = _read(folder / FAULTS)
    ago_s = max(0.0, (clock.now_ms() - at_ms) / 1_000)
    left_s = min(PAUSE_S_MIN * 2 ** min(count - 1, 10), PAUSE_S_MAX) - ago_s if count else 0.0
    if left_s > 0 and not sys.stderr.isatty():
        log.error(
            "the engine of this machine has failed %d times in a row, last %.0f s ago: this role begins again in %.0f s. "
            "To begin now, fix what the log above says, remove %s, and restart it",
            *(count, ago_s, left_s, folder / FAULTS),
        )
        await clock.sleep(left_s)


@contextmanager
def counted_faults(folder: Path, clock: Clock) -> Iterator[None]:
    """Count an EngineFault that ends the `with` block."""
    try:
        yield
    except Exception as error:
        if any(isinstance(cause, EngineFault) for cause in causes_of(error)):
            (count, at_ms), now_ms = _read(folder / FAULTS), clock.now_ms()
            again = {"count": count + 1 if now_ms - at_ms < FORGOTTEN_S * 1_000 else 1, "at_ms": now_ms}
            with suppress(OSError):  # a full disk hides no fault of the engine
                write_durably(folder / FAULTS, json.dumps(again).encode())
        raise


def _read(file: Path) -> tuple[int, int]:
    """Return the number of faults in a row, and the time of the last one in milliseconds."""
    try:
        found = json.loads(read_regular(file, bytes_max=1_024))
        return max(0, int(found["count"])), int(found["at_ms"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0, 0
