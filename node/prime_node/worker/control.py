"""A contributor's control of a worker: run, pause or finish, and the limits on when it computes.

A file in the worker's folder carries it. `prime-node pause`, `resume`, `finish` and `limit` write the file; the worker reads it
a few times a second, and after a restart. So a command needs no connection to the worker, and works inside every sandbox.
"""

from __future__ import annotations

import re
from datetime import datetime, time
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from prime_node.files import write_durably
from prime_node.inside import read_regular
from prime_protocol.errors import LocalError

CONTROL = "control.json"
CONTROL_BYTES_MAX = 2**20
ON_REQUEST = "on request, until `prime-node resume`"
"""Reason of a pause that the contributor has ordered."""
_HOURS = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", re.ASCII)


class WorkLimits(BaseModel):
    """When a worker computes, and how much of the machine it uses. Outside of the limits on when, it is paused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hours: str = ""
    """Hours of the day in which it computes, in local time, for example "22:00-07:00". Empty: all hours."""
    on_battery: bool = True
    """Compute on battery power too. Only Linux shows the power supply; elsewhere it counts as mains power."""
    when_busy: bool = True
    """Compute while other programs use the processor too. false: only while they use less than a quarter of all processors,
    for a minute. Only Linux shows that; elsewhere other programs count as idle. Another worker is another program."""
    when_gpu_busy: bool = True
    """Compute while other programs use the GPU too. false needs nvidia-smi; where it shows nothing, they count as idle."""
    when_in_use: bool = True
    """Compute while a person uses this machine's keyboard and mouse too. false: only while systemd-logind calls its seat idle: a
    desktop decides that by its own settings, usually after minutes. Elsewhere, and over a network, no use is seen."""
    upload_mbit_per_s: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Upload limit for serving peers, in megabits per second; 0 is no limit. None: swarm.upload_mbit_per_s."""
    download_mbit_per_s: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Download limit for fetching policies, in megabits per second; 0 is no limit. None: swarm.download_mbit_per_s."""
    threads: int | None = Field(default=None, ge=1, le=4_096)
    """CPU threads of the engine. None: worker.threads. The transformers engine follows at its next lease, vLLM at its next
    start."""
    gpu_memory_share: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    """Share of a GPU's memory that vLLM takes, from the next start on. None: worker.gpu_memory_share."""

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


class Surroundings(Protocol):
    """What else happens on this machine. Each answer is quick: it may be a few seconds old."""

    def on_battery(self) -> bool:
        """Return whether the machine runs on battery power."""

    def is_busy(self) -> bool:
        """Return whether other programs have used the processor within the last minute."""

    def is_gpu_busy(self) -> bool:
        """Return whether other programs have used the GPU within the last minute."""

    def is_in_use(self) -> bool:
        """Return whether a person uses the machine's keyboard and mouse."""


class NoSurroundings:
    """A machine that does nothing else."""

    def on_battery(self) -> bool:
        """Return False."""
        return False

    def is_busy(self) -> bool:
        """Return False."""
        return False

    def is_gpu_busy(self) -> bool:
        """Return False."""
        return False

    def is_in_use(self) -> bool:
        """Return False."""
        return False


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


def pause_reason(control: Control, limits: WorkLimits, *, now: datetime, around: Surroundings) -> str:
    """Return why a worker must not compute; empty if it may. `now` is in local time."""
    if control.wanted is Wanted.PAUSE:
        return ON_REQUEST
    if control.wanted is Wanted.FINISH:
        return ""  # what is begun is finished at any hour
    if not limits.admits(now.time()):
        return f"until {limits.hours[:5]}, as its hours are {limits.hours}"
    if not limits.on_battery and around.on_battery():
        return "until this machine has mains power"
    if not limits.when_busy and around.is_busy():
        return "until other programs leave the processor idle for a minute"
    if not limits.when_gpu_busy and around.is_gpu_busy():
        return "until other programs leave the GPU idle for a minute"
    if not limits.when_in_use and around.is_in_use():
        return "until this machine's desktop says that no one uses it"
    return ""


def read_control(folder: Path) -> Control:
    """Read what a contributor wants of the worker in `folder`. Raises LocalError if the file is damaged."""
    path = folder / CONTROL
    try:
        return Control.model_validate_json(read_regular(path, bytes_max=CONTROL_BYTES_MAX))
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
