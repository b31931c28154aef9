"""The parts of `prime-node up` that need no separate processes."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.node.worker_world import make_run
from typer.testing import CliRunner

from prime_node.cli.gather import progress_of
from prime_node.cli.lifetime import FINAL_CODES
from prime_node.cli.main import app
from prime_node.cli.outcome import MAY_PASS, outcome_of
from prime_node.cli.run_dir import RunDir
from prime_node.cli.screen import Row, RunProgress, one_line, render, size, sparkline
from prime_node.cli.supervisor import ChildState
from prime_node.folder_lock import FolderLock
from prime_node.worker.status import Status, write_status
from prime_protocol.errors import ErrorCode, LocalError, RemoteError, TransientFault
from prime_protocol.requests import WorkerState

RUN = make_run()


def test_a_second_process_in_a_folder_learns_which_process_uses_it(tmp_path: Path) -> None:
    held = FolderLock(tmp_path / "run")
    with pytest.raises(LocalError, match=r"process \d+ already uses it"):
        FolderLock(tmp_path / "run")
    held.release()
    FolderLock(tmp_path / "run").release()


def test_a_folder_that_is_a_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="choose another folder"):
        FolderLock(tmp_path / "file")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "none.toml"],
        ["--set", "up.num_workers=many"],
        ["--set", "run.max_steps=-1"],
        ["--set", "trainer.loss.import_path=no_such_losses:mine"],
    ],
)
def test_up_makes_no_folder_before_it_has_understood_its_command_line(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["up", str(tmp_path / "runs"), *arguments])
    assert isinstance(result.exception, LocalError)
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_purpose_is_one_line_though_a_task_group_wraps_it() -> None:
    full, banned = LocalError("the disk is full"), RemoteError(ErrorCode.BANNED, "forged")
    assert outcome_of(full) == (3, "the disk is full")
    assert outcome_of(ExceptionGroup("tasks", [banned, ExceptionGroup("more", [full])])) == (3, "the disk is full")
    away = TransientFault("the database cannot be reached")
    assert outcome_of(ExceptionGroup("tasks", [banned, away])) == (MAY_PASS, "the database cannot be reached")
    assert outcome_of(ExceptionGroup("tasks", [away, full])) == (3, "the disk is full")
    bucket = outcome_of(OSError(errno.EHOSTUNREACH, "cannot read in s3://b"))
    assert bucket == (MAY_PASS, "cannot read in s3://b; check the storage service, then start again")
    assert MAY_PASS not in FINAL_CODES
    assert outcome_of(ExceptionGroup("tasks", [banned])) == (4, "refused by the other side: banned: forged")
    assert outcome_of(ExceptionGroup("tasks", [full, KeyError("a bug")])) is None


def test_a_stranger_with_a_local_workers_name_does_not_take_its_row(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.worker(1).mkdir()
    write_status(run_dir.worker(1) / "status.json", Status("ours", WorkerState.IDLE, 0, 0, 0, 0.0, 0, 0, 0, 0))
    ours = {"worker": "ours", "name": "worker-1", "state": "generating", "policy_version": 3, "accepted": 8}
    stranger = {**ours, "worker": "stranger", "banned": {"step": 3, "reason": "forged"}, "accepted": 0}
    progress = progress_of(
        run_dir, RUN, [], {"workers": [ours, stranger]}, {"worker-1": ChildState.RUNNING}, elapsed_s=1.0
    )
    assert progress.rows == [Row("worker-1", "running", "generating", "3", 8)]


def test_names_are_shown_as_they_are_and_never_as_markup() -> None:
    row = Row("[/evil]", "running", "[red]", note="banned at step 3: [/]")
    console = Console(file=io.StringIO(), width=120)
    console.print(render(RunProgress("learning", 1, 2, 3.0, rewards=[0.5], rows=[row])))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[/evil]" in shown
    assert "[red]" in shown


def test_one_line_says_what_counts() -> None:
    line = one_line(RunProgress("learning", 7, 400, 12.3, rewards=[0.25, 0.75], lag_mean=1.9, refused={"stale": 2}))
    assert "step 7/400" in line
    assert "reward 0.50" in line
    assert "rejected 2 stale" in line


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1_536, "1.5 kB"), (2_500_000_000, "2.5 GB")])
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_a_sparkline_has_a_bar_for_each_column() -> None:
    assert sparkline([0.0, 1.0], width=10) == "▁█"
    assert len(sparkline([0.5] * 100, width=40)) == 40
