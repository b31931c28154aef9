"""Commands import only what they need, so that they start quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prime_node import __version__
from prime_node.cli import doctor
from prime_node.cli.main import SUMMARIES, Commands, app
from prime_node.cli.wire_classes import has_gpu_driver
from prime_node.folder_lock import FolderLock
from prime_protocol.errors import LocalError

HAS_GPU = has_gpu_driver()
PROGRAM = """
import sys
from prime_node.cli.main import main
sys.argv = ["prime-node", *sys.argv[1:]]
try:
    main()
finally:
    print("imported:", *sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "needless"),
    [
        (("--help",), {"pydantic", "numpy", "rich.console", "asyncio", "prime_protocol.limits"}),
        (("version",), {"numpy", "rich.console", "asyncio", "prime_protocol.limits"}),
        (("verify", "no-such-folder"), {"torch", "transformers", "numba", "aiohttp", "asyncpg"}),
        (("ledger", "verify", "no-such-file"), {"torch", "transformers", "numba", "asyncpg"}),
        (("operate", "drain", "no-such-folder"), {"torch", "transformers", "numba", "aiohttp", "asyncpg"}),
        (("join", "http://no.digest:8400"), {"torch", "transformers", "numba", "aiohttp", "asyncpg"}),
        (("doctor",), {"transformers", "numba", "aiohttp", "asyncpg", *(() if HAS_GPU else ("torch",))}),
        (("config",), {"torch", "transformers", "numba", "aiohttp", "asyncpg"}),
    ],
)
def test_a_command_imports_only_what_it_needs(command: tuple[str, ...], needless: set[str], tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, cwd=tmp_path)
    output, _, imported = ran.stdout.rpartition("imported: ")
    assert output or ran.stderr.startswith("prime-node: "), ran.stderr
    assert needless.isdisjoint(imported.split())


def test_a_second_worker_in_one_folder_is_refused_at_once(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(LocalError, match="already uses it"):
        CliRunner().invoke(
            app, ["join", f"http://127.0.0.1:1/#{'0' * 64}", "--folder", str(tmp_path)], catch_exceptions=False
        )
    lock.release()


def test_the_overview_knows_every_command_and_no_other() -> None:
    commands = Commands()
    assert set(commands) == set(SUMMARIES)
    assert len(commands) == len(SUMMARIES)
    assert "no-such-command" not in commands


AT_EXIT = """
import atexit, gc, sys
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))
sys.argv = ["prime-node", "--version"]
from prime_node.cli.main import main
main()
"""


def test_a_command_that_has_ended_does_not_search_for_garbage_before_it_exits() -> None:
    ran = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n") == [__version__, "frozen: True", ""]


def test_doctors_json_agrees_with_its_screen() -> None:
    shown = CliRunner().invoke(app, ["doctor"])
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = json.loads(result.stdout)["findings"]
    assert {"Python", "disk", "sandbox", "torch"} <= {finding["what"] for finding in findings}
    for finding in findings:
        assert finding["what"] in shown.stdout


def test_doctor_names_the_place_of_files_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HOME", tmp_path / "nobody" / ".prime-node")
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    (disk,) = (finding for finding in report["findings"] if finding["what"] == "disk")
    assert disk["seen"].endswith(f"free in {tmp_path}")


def test_doctor_says_that_no_coordinator_answers_at_a_link() -> None:
    ran = CliRunner().invoke(app, ["doctor", f"http://127.0.0.1:1/#{'0' * 64}"])
    assert "!!  coordinator" in ran.stdout
    assert "cannot read a status" in ran.stdout
    assert "cannot take part: coordinator" in str(ran.exception)
