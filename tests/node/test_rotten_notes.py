"""A file that a role can do without is a folder, or holds what no role wrote: the role warns of it and works.

A file that it needs is named in one line, with what to do.
"""

from __future__ import annotations

import errno
import json
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import ANNA
from tests.node.rotten_world import RUN
from tests.node.spool_world import Receiver, flush_all, make_spool

from prime_node.broadcast.swarm.uplink import DataCap
from prime_node.cli import kernels
from prime_node.cli.gather import progress_of
from prime_node.cli.outcome import outcome_of
from prime_node.cli.plot import curve_of
from prime_node.cli.run_dir import RunDir
from prime_node.cli.wire_node import forget_address
from prime_node.files import DAMAGED, DAMAGED_MAX, read_or_begin, write_durably
from prime_node.inside import write_inside
from prime_node.observe import BestEffort, JsonLines, read_json_lines
from prime_node.ports.clock import Clock
from prime_node.training_data.feed import KeptBundles
from prime_node.worker.receipts import ReceiptBook
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError

LEASE = "00" * 16


def test_a_file_that_cannot_be_read_is_kept_under_another_name_and_a_new_one_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notes"
    assert (read_or_begin(path), caplog.text) == (b"", "")
    path.mkdir()
    assert read_or_begin(path) == b""
    assert f"{path} cannot be read" in caplog.text
    write_durably(path, b"new")
    assert (read_or_begin(path), (tmp_path / "notes.damaged").is_dir()) == (b"new", True)


def test_a_folder_keeps_the_newest_of_what_could_not_be_read(tmp_path: Path) -> None:
    for number in range(2 * DAMAGED_MAX):
        path = tmp_path / f"{number}"
        path.mkdir()
        (path / "kept").touch()
        assert read_or_begin(path) == b""
        left = sorted(tmp_path.iterdir())
        assert (tmp_path / f"{number}{DAMAGED}" / "kept").exists()
        assert len(left) == min(number + 1, DAMAGED_MAX)
    for _ in range(2):  # it had a further suffix after each start, until its name was too long
        assert read_or_begin(path.with_name(f"{path.name}{DAMAGED}")) == b""
        assert sorted(tmp_path.iterdir()) == left


def test_a_folder_in_the_place_of_a_file_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "timestamp.json"
    path.mkdir()
    for use in (
        path.read_bytes,
        lambda: write_durably(path, b"x"),
        lambda: write_inside(tmp_path, path.name, b"x"),
        lambda: JsonLines(path).record(step=1),
    ):
        with pytest.raises(OSError, match=r"directory|not a file") as raised:
            use()
        known = outcome_of(raised.value)
        assert known is not None
        assert known[0] == 3
        assert str(path) in known[1], "not the temporary file"
        assert "move the folder of this name away" in known[1]


def test_rows_that_cannot_be_written_end_no_role_and_are_written_once_they_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, older = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.1"
    path.mkdir()
    rows = BestEffort(JsonLines(path, bytes_max=1))
    rows.record(step=1)
    assert "cannot write metrics" in caplog.text
    path.rmdir()
    rows.record(step=2)
    older.mkdir()
    (older / "file").touch()
    rows.record(step=3)  # may not be renamed to the older one
    rows.record(step=4)
    (older / "file").unlink()
    older.rmdir()
    rows.record(step=5)
    rows.close()
    assert [[row["step"] for row in read_json_lines(each)] for each in (older, path)] == [[2], [5]]


@pytest.mark.parametrize(
    "line",
    [
        *(b"5", b"[]", b'"x"', b"null", b'{"raw_bytes": 1}', b'{"reward_mean": "x"}', b'{"reward_mean": 0.5}'),
        *(b'{"sft_step": {}}', b'{"eval_greedy": 1, "eval_sampled": null}', b'{"eval_greedy": 1, "step": []}', b"\xff"),
    ],
)
def test_a_row_of_metrics_that_a_disk_has_changed_is_left_out_of_the_screen(tmp_path: Path, line: bytes) -> None:
    run_dir = RunDir(tmp_path)
    write_rows(run_dir.trainer_metrics, line, json.dumps({"step": 1, "reward_mean": 0.25}).encode())
    rows = read_json_lines(run_dir.trainer_metrics)
    status: dict[str, Any] = {"head": -1}
    progress = progress_of(run_dir, RUN, rows, status, {}, elapsed_s=1.0)
    assert progress.rewards[-1] == 0.25
    assert curve_of(rows).rewards == [0.25]


def write_rows(path: Path, *lines: bytes) -> None:
    """Write lines of metrics."""
    path.parent.mkdir()
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def test_metrics_that_cannot_be_read_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_json_lines(tmp_path) == []
    assert f"the rows of {tmp_path} are left out" in caplog.text


async def test_a_worker_without_readable_notes_uploads_and_notes_refusals(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    await spool.put(b"bad", LEASE)
    (tmp_path / "refused.jsonl").mkdir()
    (tmp_path / f"000000000009-{LEASE}.parcel").mkdir()
    await flush_all(make_spool(tmp_path), Receiver(RemoteError(ErrorCode.WRONG_RUN, "another run")))
    assert b"wrong_run" in (tmp_path / "refused.jsonl").read_bytes()


def book(folder: Path) -> object:
    """Read receipts."""
    return ReceiptBook(folder, run=RUN, worker=ANNA.key_id).cursor


def copies(folder: Path) -> object:
    """Read the copy of a bundle."""
    return KeptBundles(folder).read(digest_of(b"a bundle"), 3)


def address(folder: Path) -> object:
    """Forget the page."""
    forget_address(folder)
    return None


@pytest.mark.parametrize(
    ("name", "read", "found"),
    [("receipts.cursor", book, 0), (digest_of(b"a bundle"), copies, None), ("page.json", address, None)],
    ids=["cursor", "copy", "page"],
)
def test_a_folder_in_the_place_of_a_hint_is_named_and_ends_no_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, read: Callable[[Path], object], found: object
) -> None:
    (tmp_path / name).mkdir()
    assert read(tmp_path) == found
    assert name in caplog.text


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b'{"days": 1, "period": 0, "used_bytes": 1e999}'])
def test_a_damaged_count_of_a_data_cap_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    path = tmp_path / "uploaded.json"
    assert DataCap(9, days=1, file=path, clock=Still()).used_bytes == 0
    assert not caplog.text
    path.write_bytes(data)
    assert DataCap(9, days=1, file=path, clock=Still()).used_bytes == 0
    assert f"{path} is damaged" in caplog.text


class Still(Clock):
    """A clock that shows 0."""

    def now_ms(self) -> int:
        """Return 0."""
        return 0

    def monotonic_s(self) -> float:
        """Return 0."""
        return 0.0

    async def sleep(self, seconds: float) -> None:
        """Do nothing."""


@pytest.mark.parametrize("kind", ["nbi", "nbc", "marker"])
@pytest.mark.parametrize("change", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"\x80" + data])
def test_damaged_machine_code_is_compiled_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    change: Callable[[bytes], bytes],
) -> None:
    """An emptied index, as a power loss leaves it, ended each role that decodes with a traceback at each start."""
    key = "0123abcd-89abcdef"
    index, code = (tmp_path / f"decode.apply-0123abcd-61.py311.{end}" for end in ("nbi", "1.nbc"))
    written = {index: pickle.dumps("0.61") + pickle.dumps(b"index"), code: b"machine code"}
    for path, data in written.items():
        path.write_bytes(data)
    monkeypatch.setattr(kernels, "cache_place", lambda: (str(tmp_path), key))
    monkeypatch.setattr(sys, "executable", "/bin/true")
    said: list[str] = []
    assert kernels.compile_once(said.append)
    said.clear()
    assert kernels.compile_once(said.append)
    assert not said
    path = {"nbi": index, "nbc": code, "marker": tmp_path / f"kernels-{key}.compiled"}[kind]
    path.write_bytes(change(path.read_bytes()))
    caplog.set_level(logging.WARNING)
    assert kernels.compile_once(said.append)
    if not (kind == "marker" and not change(b"x")):  # an earlier release's is empty
        assert said[0].startswith("compiling")
        assert f"{tmp_path} are damaged" in caplog.text
        assert not code.exists()


def test_a_fault_without_a_name_has_advice() -> None:
    assert "move the folder" in str(outcome_of(IsADirectoryError(errno.EISDIR, "Is a directory", "x")))
