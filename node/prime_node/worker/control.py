"""A contributor's control of a worker: run, pause or finish, and the limits on when it computes.

A file in the worker's folder carries it. `prime-node pause`, `resume`, `finish` and `limit` write the file; the worker reads it
a few times a second, and after a restart. So a command needs no connection to the worker, and works inside every sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, time
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from prime_node.files import write_durably
from prime_node.inside import read_regular
from prime_protocol.errors import LocalError

CONTROL = "control.json"
_HOURS = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", re.ASCII)


class WorkLimits(BaseModel):
    """When a worker computes. Outside of these limits it is paused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    hours: str = ""
    """Hours of the day in which it computes, in local time, for example "22:00-07:00". Empty: all hours."""
    on_battery: bool = True
    """Compute on battery power too. Only Linux shows the power supply; elsewhere it counts as mains power."""

    @field_validator("hours")
    @classmethod
    def _check_hours(cls, hours: str) -> str:
        if hours and (_HOURS.fullmatch(hours) is None or hours[:5] == hours[6:]):
            raise ValueError(f"{hours!r} are not hours of the day; write for example 22:00-07:00")
        return hours

    def admits(self, now: time) -> bool:
        """Return whether a time of the day is within the hours. Their end is not; they may span midnight."""
        if not self.hours:
            return True
        begin, end = map(time.fromisoformat, self.hours.split("-"))
        return begin <= now < end if begin < end else now >= begin or now < end


class Wanted(StrEnum):
    """What a contributor wants of a worker."""

    RUN = "run"
    PAUSE = "pause"
    FINISH = "finish"
    """Finish the leases in generation, upload, and leave the run."""


class Control(BaseModel):
    """Content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wanted: Wanted = Wanted.RUN
    limits: WorkLimits | None = None
    """Limits set by `prime-node limit`, instead of those of the worker's settings."""
    at_ms: int = Field(default=0, ge=0)
    """Time of the command. A worker's status names it once the worker has read the command."""


def pause_reason(control: Control, limits: WorkLimits, *, now: datetime, on_battery: Callable[[], bool]) -> str:
    """Return why a worker must not compute; empty if it may. `now` is in local time."""
    if control.wanted is Wanted.PAUSE:
        return "on request, until `prime-node resume`"
    if control.wanted is Wanted.FINISH:
        return ""  # what is begun is finished at any hour
    if not limits.admits(now.time()):
        return f"until {limits.hours[:5]}, as its hours are {limits.hours}"
    if not limits.on_battery and on_battery():
        return "until this machine has mains power"
    return ""


def read_control(folder: Path) -> Control:
    """Read what a contributor wants of the worker in `folder`. Raises LocalError if the file is damaged."""
    path = folder / CONTROL
    try:
        return Control.model_validate_json(read_regular(path))
    except FileNotFoundError:
        return Control()
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}; `prime-node resume {folder}` writes it again") from None
    except ValidationError:
        raise LocalError(f"{path} is damaged; `prime-node resume {folder}` writes it again") from None


def write_control(folder: Path, control: Control) -> None:
    """Write what a contributor wants of the worker in `folder`, durably. Raises LocalError."""
    try:
        write_durably(folder / CONTROL, control.model_dump_json().encode())
    except OSError as error:
        raise LocalError(f"{folder / CONTROL}: {error.strerror}") from None
