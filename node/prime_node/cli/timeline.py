"""Activities of all roles over time, from the files in a run's folder.

    coordinator/timeline.jsonl   leases, verdicts, policies, and when each worker could use them
    trainer/metrics.jsonl        one row per step and per policy: when it ended, and how long each phase took
    worker-N/timeline.jsonl      swaps and generation of the workers on this machine

For workers elsewhere there are only leases. Times are the coordinator's clock; the trainer's are its own machine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_node.cli.run_dir import RunDir
from prime_node.observe import read_json_lines
from prime_node.worker.status import read_status
from prime_protocol.errors import LocalError
from prime_protocol.limits import COUNT_MAX

TRAINER, PUBLISHER, BROADCAST, CHECKS = "trainer", "publisher", "broadcast", "checks"


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity with a duration. Example: Activity("worker-1", "generate", 10.0, 12.5, step=4, policy_version=3)."""

    lane: str
    name: str
    begin_s: float
    """Start, in seconds since 1970."""
    end_s: float
    step: int = -1
    policy_version: int = -1
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for numbers of a damaged row that cannot be drawn."""
        numbers = (self.step, self.policy_version)
        is_whole = all(isinstance(one, int) and abs(one) <= COUNT_MAX for one in numbers)
        if not (is_whole and 0 <= self.begin_s <= self.end_s <= COUNT_MAX):  # false for NaN
            raise ValueError(self)

    @property
    def title(self) -> str:
        """Label with name, step and policy version."""
        parts = [self.name]
        if self.step >= 0:
            parts.append(f"step {self.step}")
        if self.policy_version >= 0:
            parts.append(f"policy {self.policy_version}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Activities in order of their start; `lanes` are in the order of the picture, from the top."""

    lanes: tuple[str, ...]
    activities: tuple[Activity, ...]

    def between(self, first_step: int, last_step: int) -> Timeline:
        """Return the activities during these steps of the trainer. Raises LocalError if it trained none of them."""
        steps = [each for each in self.activities if each.lane == TRAINER and first_step <= each.step <= last_step]
        if not steps:
            raise LocalError(f"the trainer's rows hold no step from {first_step} to {last_step}")
        begin_s, end_s = min(each.begin_s for each in steps), max(each.end_s for each in steps)
        inside = tuple(each for each in self.activities if each.end_s >= begin_s and each.begin_s <= end_s)
        return Timeline(self.lanes, inside)


def read_timeline(run_dir: RunDir) -> Timeline:
    """Read the timeline of a run. Raises LocalError if the run has no timeline, or one of another form."""
    recorded = _read(run_dir.coordinator / "timeline.jsonl")
    names, own = _own_workers(run_dir)
    try:
        activities = [
            *_of_trainer(read_json_lines(run_dir.trainer_metrics)),
            *_of_coordinator(recorded, names, own.keys()),
        ]
        for key, rows in own.items():
            activities += [_activity(names[key], str(row["kind"]), row) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise LocalError(f"{run_dir.path}: a row of its timeline has another form ({error!r:.100})") from None
    if not activities:
        raise LocalError(f"{run_dir.path} has no timeline yet: start the run, or look for coordinator/timeline.jsonl")
    activities.sort(key=lambda each: (each.begin_s, each.lane))
    fixed = (TRAINER, PUBLISHER, BROADCAST)
    workers = sorted({each.lane for each in activities} - {*fixed, CHECKS})
    return Timeline((*fixed, *workers, CHECKS), tuple(activities))


def _of_trainer(rows: Iterable[Mapping[str, Any]]) -> list[Activity]:
    found = []
    for row in rows:
        if "publish_seconds" in row:
            version, end_s = row["policy_version"], row["time"]
            encoded_s = end_s - row.get("upload_seconds", 0.0)
            found.append(
                Activity(PUBLISHER, "encode", end_s - row["publish_seconds"], encoded_s, policy_version=version)
            )
            found.append(Activity(PUBLISHER, "upload", encoded_s, end_s, policy_version=version))
        elif "step_seconds" in row:
            at_s = row["time"] - row["step_seconds"]
            for name, key in (("wait", "idle"), ("train", "train"), ("save", "save"), ("submit", "submit")):
                seconds = row[f"{key}_seconds"]
                numbers = {"lag_mean": row.get("lag_mean"), "reward_mean": row.get("reward_mean")}
                found.append(Activity(TRAINER, name, at_s, at_s + seconds, step=row["step"], details=numbers))
                at_s += seconds
    return found


def _of_coordinator(rows: Iterable[Mapping[str, Any]], names: Mapping[str, str], own: Iterable[str]) -> list[Activity]:
    """Return the coordinator's activities, with leases only for workers without a timeline of their own."""
    tells_more = set(own)
    found = []
    broadcasts: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        match row["kind"]:
            case "lease" if row["worker"] not in tells_more:
                found.append(_activity(_lane(row, names), "lease", row))
            case "check":
                found.append(_activity(CHECKS, f"check of {_lane(row, names)}", row))
            case "usable":
                slowest = broadcasts.get(row["policy_version"])
                if slowest is None or row["end_ms"] > slowest["end_ms"]:
                    broadcasts[row["policy_version"]] = row
            case _:
                pass
    return found + [_activity(BROADCAST, "until the slowest could use it", row) for row in broadcasts.values()]


def _own_workers(run_dir: RunDir) -> tuple[dict[str, str], dict[str, list[dict[str, Any]]]]:
    """Return key -> folder name and key -> rows of the workers that ran in this folder."""
    names: dict[str, str] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for folder in sorted(run_dir.path.glob("worker-*")):
        found = _read(folder / "timeline.jsonl")
        try:
            key = read_status(folder / "status.json").worker
        except LocalError:
            continue
        if found:
            names[key], rows[key] = folder.name, found
    return names, rows


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file and of its full predecessor, ignoring lines that are no timeline rows."""
    rows = [*read_json_lines(path.with_name(path.name + ".1")), *read_json_lines(path)]
    return [row for row in rows if isinstance(row, dict) and {"kind", "begin_ms", "end_ms"} <= row.keys()]


def _lane(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return a worker's lane. Names prove nothing, so a remote worker's name carries the end of its key."""
    key = str(row["worker"])
    return names.get(key) or f"{row.get('name') or 'worker'} {key[-4:]}"


def _activity(lane: str, name: str, row: Mapping[str, Any]) -> Activity:
    details = {key: row[key] for key in ("outcome", "first_slot", "num_groups") if row.get(key) not in (None, "", -1)}
    return Activity(
        lane,
        name,
        row["begin_ms"] / 1_000,
        max(row["begin_ms"], row["end_ms"]) / 1_000,
        step=row.get("step", -1),
        policy_version=row.get("policy_version", -1),
        details=details,
    )
