"""Folders of dead processes are removed by the next process; those of living ones are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from prime_node.scratch import Scratch

KILLED = """
import os, signal
from prime_node.scratch import Scratch
print(Scratch("test").path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(path: Path) -> None:
    os.utime(path, (0, 0))


def test_what_a_killed_process_left_is_removed_by_the_next(place: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED],
        env={**os.environ, "TMPDIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    left = Path(ran.stdout.strip())
    assert left.parent == place
    (left / "file").write_text("x")
    Scratch("test").close()
    assert left.exists(), "it is young: its maker might not have locked it yet"
    aged(left)
    Scratch("another").close()
    assert left.exists(), "another kind's"
    Scratch("test").close()
    assert not left.exists()


def test_a_living_process_keeps_its_folder_until_it_closes_it(place: Path) -> None:
    first = Scratch("test")
    aged(first.path)
    second = Scratch("test")
    assert first.path.exists()
    for each in (first, second, first):
        each.close()
    assert list(place.iterdir()) == []


def test_links_and_files_of_that_name_are_left_alone(place: Path) -> None:
    (place / "precious").mkdir()
    (place / "prime-test-link").symlink_to(place / "precious")
    (place / "prime-test-file").write_text("x")
    os.utime(place / "prime-test-link", (0, 0), follow_symlinks=False)
    aged(place / "prime-test-file")
    Scratch("test").close()
    assert {path.name for path in place.iterdir()} == {"precious", "prime-test-link", "prime-test-file"}
