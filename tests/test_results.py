"""Recorded figures: the page comes from the JSON files, and `--json` of a benchmark is JSON alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
SCRIPTS = [
    path
    for path in (*sorted(BENCH.glob("*.py")), BENCH.parent / "gpu_check.py")
    if 'add_argument("--json"' in path.read_text(encoding="utf-8")
]
"""Benchmarks that check bars."""


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import results

    return results


def test_the_page_is_what_the_script_writes_from_the_files(results: ModuleType) -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(results.read())


def test_every_benchmark_with_bars_is_recorded_or_listed_as_never_recorded(results: ModuleType) -> None:
    with_bars = {path.stem for path in SCRIPTS}
    recorded = {run.bench for run in results.read()}
    assert with_bars - recorded == set(results.NEVER_RECORDED)
    assert recorded - with_bars == set()


def test_every_recorded_run_says_when_where_and_how(results: ModuleType) -> None:
    for run in results.read():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", run.date), run.title
        assert run.command, run.title
        assert run.machine, run.title
        assert run.checks, run.title
        for check in run.checks:
            assert set(check) == {"name", "value", "bar", "ok"}, run.title
            assert "|" not in check["name"] + run.notes + run.command, run.title


def test_the_newest_value_of_a_bar_is_shown_and_a_missed_one_is_marked(results: ModuleType) -> None:
    old = {"name": "speed", "value": 2.0, "bar": ">= 1", "ok": True}
    new = {"name": "speed", "value": 0.5, "bar": ">= 1", "ok": False}
    other = {"name": "memory", "value": None, "bar": "<= 3", "ok": False}
    make = results.Run
    runs = [
        make("one", "", "python one.py", "2026-01-01", "", "here", "", (old, other)),
        make("one", "", "python one.py", "2026-01-02", "", "there", "", (new,)),
    ]
    page = results.page(runs)
    assert "| one | speed | 0.5 | >= 1 | **missed** |" in page
    assert "| one | memory | never | <= 3 | **missed** |" in page
    assert "2 bars, 2 missed." in page
    assert "| 2 | >= 1 |" not in page


NOISY = """
import os, subprocess, sys
from checks import Output, at_least
output = Output(as_json="--json" in sys.argv)
print("a library prints")
os.write(1, b"a library writes\\n")
subprocess.run(["echo", "a child prints"])
rows = [{"row": "seed 1", "ours": 1.23456}, {"row": "seed 2", "ours": float("inf")}] if "--rows" in sys.argv else []
raise SystemExit(output.finish([at_least("speed", 2.34567, 1.0), at_least("end", float("inf"), 1.0)], rows))
"""


def test_json_is_alone_on_stdout_whatever_else_prints() -> None:
    found = subprocess.run([sys.executable, "-c", NOISY, "--json"], cwd=BENCH, capture_output=True, text=True)
    assert json.loads(found.stdout) == {
        "checks": [
            {"name": "speed", "value": 2.346, "bar": ">= 1", "ok": True},
            {"name": "end", "value": None, "bar": ">= 1", "ok": True},
        ]
    }
    assert found.returncode == 0
    assert "a child prints" in found.stderr
    plain = subprocess.run([sys.executable, "-c", NOISY], cwd=BENCH, capture_output=True, text=True)
    assert "a library writes" in plain.stdout
    assert "ok   speed: 2.346, bar >= 1" in plain.stdout


def test_a_record_keeps_the_rows_of_a_run_and_the_page_shows_them(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    noisy = tmp_path / "noisy.py"
    noisy.write_text(f"import sys; sys.path.insert(0, {str(BENCH)!r})\n{NOISY}")
    results.record([sys.executable, str(noisy), "--rows"], variant="drawn", notes="")
    results.record([sys.executable, str(noisy)], variant="", notes="")
    without, kept = sorted(results.read(tmp_path), key=lambda run: run.variant)
    assert without.rows == ()
    assert kept.rows == ({"row": "seed 1", "ours": 1.235}, {"row": "seed 2", "ours": None})
    page = results.page([without, kept])
    assert "| row | ours |\n|---|---|\n| seed 1 | 1.235 |\n| seed 2 | never |" in page


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_json_option_goes_through_the_one_output(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "Output(as_json=" in text
    assert '{"checks"' not in text


def test_a_quick_run_of_learning_checks_only_what_a_few_steps_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import learning_report

    runs = [
        {
            "task": "words",
            "seed": 1,
            "steps": 6,
            "loss": loss,
            "async_level": level,
            "diverged": False,
            "evaluations": [{"sampled": 0.1}, {"sampled": 0.1}],
        }
        for loss in ("grpo_is", "grpo")
        for level in (0, 4)
    ]
    assert all(check.ok for check in learning_report.checks(runs, wanted=4, quick=True))
    assert not all(check.ok for check in learning_report.checks(runs[1:], wanted=4, quick=True))
    assert not all(check.ok for check in learning_report.checks(runs, wanted=4, quick=False))
