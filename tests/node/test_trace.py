"""`prime-node trace`: from the files that the roles write to lanes, and to the format that Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prime_node.cli.run_dir import RunDir
from prime_node.cli.timeline import TRAINER, Activity, Timeline, read_timeline
from prime_node.cli.trace import chrome_trace
from prime_node.worker.status import Status, write_status
from prime_protocol.errors import LocalError
from prime_protocol.requests import WorkerState


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def span(kind: str, begin_ms: int, end_ms: int, **fields: Any) -> dict[str, Any]:
    return {"time": 0.0, "kind": kind, "begin_ms": begin_ms, "end_ms": end_ms, **fields}


def step_row(step: int, ended_s: float) -> dict[str, Any]:
    """Return a trainer's row: waits 1 s, trains 2 s, saves 0.5 s, waits for the publisher 0.5 s."""
    phases = {"idle_seconds": 1.0, "train_seconds": 2.0, "save_seconds": 0.5, "submit_seconds": 0.5}
    return {"time": ended_s, "step": step, "step_seconds": 4.0, **phases}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    write(
        run.coordinator / "timeline.jsonl",
        span("policy", 100_000, 100_000, policy_version=0),
        span("usable", 100_000, 100_400, worker="key-of-anna", policy_version=0),
        span("usable", 100_000, 100_900, worker="key-of-ben", policy_version=0),
        span("lease", 100_500, 102_000, worker="key-of-anna", name="anna", step=0, policy_version=0, num_groups=3),
        span("lease", 101_000, 103_000, worker="key-of-ben", name="anna", step=0, policy_version=0, outcome="lapsed"),
        span("check", 102_000, 102_500, worker="key-of-anna", name="anna", step=0, outcome="accepted"),
        span("check", 102_100, 102_900, worker="key-of-ben", name="anna", step=0, outcome="stale"),
        {"nonsense": 1},
    )
    publication = {"time": 100.0, "policy_version": 0, "publish_seconds": 0.7, "upload_seconds": 0.2}
    write(run.trainer_metrics, {"time": 90.0, "sft_step": 3}, publication, step_row(0, 104.0), step_row(1, 108.0))
    run.worker(1).mkdir(parents=True, exist_ok=True)
    write_status(run.worker(1) / "status.json", Status("key-of-anna", WorkerState.IDLE, 0, 0, 0, 0.0, 0, 0, 0, 0))
    write(
        run.worker(1) / "timeline.jsonl",
        span("swap", 100_500, 100_600, policy_version=0),
        span("generate", 100_600, 101_900, step=0, policy_version=0, first_slot=0, num_groups=3),
    )
    return run


def lane(timeline: Timeline, name: str) -> list[tuple[str, float, float]]:
    return [(each.name, each.begin_s, each.end_s) for each in timeline.activities if each.lane == name]


def test_each_role_has_a_lane_with_what_it_did(run_dir: RunDir) -> None:
    timeline = read_timeline(run_dir)
    assert timeline.lanes == ("trainer", "publisher", "broadcast", "anna -ben", "worker-1", "checks")
    assert lane(timeline, "trainer")[:4] == [
        ("wait", 100.0, 101.0),
        ("train", 101.0, 103.0),
        ("save", 103.0, 103.5),
        ("submit", 103.5, 104.0),
    ]
    assert lane(timeline, "publisher") == [("encode", 99.3, 99.8), ("upload", 99.8, 100.0)]
    assert lane(timeline, "broadcast") == [("until the slowest could use it", 100.0, 100.9)]


def test_a_worker_of_this_folder_is_drawn_from_its_own_word_and_others_from_their_leases(run_dir: RunDir) -> None:
    timeline = read_timeline(run_dir)
    assert lane(timeline, "worker-1") == [("swap", 100.5, 100.6), ("generate", 100.6, 101.9)]
    assert lane(timeline, "anna -ben") == [("lease", 101.0, 103.0)]  # another key under the same name


def test_the_trace_is_one_that_perfetto_reads(run_dir: RunDir) -> None:
    timeline = read_timeline(run_dir)
    events = json.loads(json.dumps(chrome_trace(timeline)))["traceEvents"]
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(threads) == list(timeline.lanes)
    complete = [event for event in events if event["ph"] == "X"]
    assert all({"name", "cat", "pid", "tid", "ts", "dur", "args"} <= event.keys() for event in complete)
    assert min(event["ts"] for event in complete) == 0
    trained = next(event for event in complete if event["name"] == "train, step 1")
    assert (trained["ts"], trained["dur"], trained["tid"]) == (5_700_000, 2_000_000, threads["trainer"])
    begun = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert sorted(ended[number] - begun[number] for number in begun) == [500_000, 800_000]


def test_steps_can_be_selected_and_a_missing_step_is_reported(run_dir: RunDir) -> None:
    timeline = read_timeline(run_dir)
    assert {each.name for each in timeline.between(1, 1).activities} == {"wait", "train", "save", "submit"}
    with pytest.raises(LocalError, match="no step from 7 to 9"):
        timeline.between(7, 9)


def test_a_run_without_a_timeline_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no timeline yet"):
        read_timeline(RunDir(tmp_path))


def test_the_picture_shows_the_lanes(run_dir: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from prime_node.cli.plot import save_timeline_png

    save_timeline_png(read_timeline(run_dir), tmp_path / "trace.png", title="run")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from prime_node.cli.plot import save_timeline_png

    lanes = (TRAINER, "anna")
    save_timeline_png(Timeline(lanes, (Activity("anna", "lease", 1.0, 3.0),)), tmp_path / "trace.png", title="run")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_a_worker_whose_name_looks_like_a_formula_stops_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from prime_node.cli.plot import save_timeline_png

    lanes = (TRAINER, r"$\x$ 12D3KooW")
    activities = (Activity(TRAINER, "train", 1.0, 4.0, step=1), Activity(lanes[1], "lease", 1.0, 3.0))
    save_timeline_png(Timeline(lanes, activities), tmp_path / "trace.png", title=r"$\frac")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_many_keys_has_a_bounded_height_and_shows_the_busiest(tmp_path: Path) -> None:
    """Before, 2,000 keys of one stranger took 80 s, and 20,000 the memory of the machine."""
    pytest.importorskip("matplotlib")
    from prime_node.cli.plot import LANES_MAX, drawn_lanes, save_timeline_png

    heights = []
    for count in (LANES_MAX - 2, 5_000):
        idle = [Activity(f"a {number:05}", "lease", 1.0, 1.0) for number in range(count)]
        activities = (Activity(TRAINER, "train", 1.0, 4.0, step=1), Activity("honest", "lease", 1.0, 3.0), *idle)
        timeline = Timeline((TRAINER, *(each.lane for each in activities[1:])), activities)
        save_timeline_png(timeline, tmp_path / "trace.png", title="run")
        heights.append(int.from_bytes((tmp_path / "trace.png").read_bytes()[20:24], "big"))
        assert "honest" in drawn_lanes(timeline)
    assert heights[1] <= heights[0]
