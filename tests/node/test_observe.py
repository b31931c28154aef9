"""Metrics on disk, and readers while the files grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_node import observe
from prime_node.observe import BestEffort, JsonLines, JsonLinesReader, read_json_lines


def test_what_was_recorded_is_read_back_with_its_time(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "new" / "metrics.jsonl")
    metrics.record(step=1, reward=0.5)
    metrics.close()
    [row] = read_json_lines(tmp_path / "new" / "metrics.jsonl")
    assert (row["step"], row["reward"]) == (1, 0.5)
    assert row["time"] > 0


def test_a_reader_takes_each_line_once_and_waits_for_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = JsonLinesReader(path)
    assert reader.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert reader.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert reader.read() == [{"step": 1}, {"step": 2}]


def test_a_line_that_a_crash_cut_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    assert [row["step"] for row in read_json_lines(path)] == [1, 3]


def test_a_reader_says_once_that_it_leaves_out_older_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a summary of the last 256 MiB looked like one of the whole run."""
    monkeypatch.setattr(observe, "ROWS_BYTES_MAX", 2**20)
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "more": "x" * 1_000}) + "\n" for step in range(1_500)]
    path.write_text("".join(rows[:1_000]))
    reader = JsonLinesReader(path)
    assert reader.read()[0]["step"] == 0
    assert caplog.messages == []
    for _ in range(2):
        with path.open("a") as file:
            file.write("".join(rows + rows))
        assert reader.read()[-1]["step"] == 1_499
    assert caplog.messages == [f"of {path} the last 1 MiB are read; older rows are left out"]


def test_a_full_file_is_kept_when_the_next_one_begins(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "timeline.jsonl", bytes_max=100)
    for number in range(9):
        lines.record(number=number)
    lines.close()
    older, newer = (read_json_lines(tmp_path / name) for name in ("timeline.jsonl.1", "timeline.jsonl"))
    assert [row["number"] for row in [*older, *newer]] == list(range(9 - len(older) - len(newer), 9))
    assert (tmp_path / "timeline.jsonl.1").stat().st_size < 200


def test_a_full_disk_costs_the_metrics_and_not_the_role(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def record(self, **fields: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            """Do nothing: nothing is open."""

    recorder = BestEffort(Full())
    recorder.record(step=1)
    recorder.record(step=2)
    assert caplog.text.count("No space left") == 1


LOGS = """
import logging, sys
from prime_node.observe import setup_logging
setup_logging("worker")
try:
    raise ValueError("an\\x1b[31m odd error")
except ValueError:
    logging.getLogger("prime_node.test").exception("two\\nlines of %s", "text")
"""


def test_log_lines_are_json_objects_if_that_is_asked_for() -> None:
    def lines(wanted: str) -> list[str]:
        environment = os.environ | {"PRIME_LOG_FORMAT": wanted}
        ran = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, env=environment)
        return ran.stderr.splitlines()

    [line] = lines("json")
    shown = json.loads(line)
    assert {name: shown[name] for name in ("level", "role", "module")} == {
        "level": "ERROR",
        "role": "worker",
        "module": "prime_node.test",
    }
    assert shown["message"].startswith("two")
    assert "\n" not in shown["message"]
    assert "odd error" in shown["traceback"]
    assert "\x1b" not in shown["traceback"]
    assert " ERROR   worker prime_node.test: two" in lines("text")[0]
    assert "log lines are text or json" in lines("xml")[-1]
