"""The overview, completion in shells, and manual pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prime_node.cli.main import GROUPS, SUMMARIES, app
from prime_node.cli.man import man_pages


def test_every_command_is_in_one_group_of_the_overview() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(SUMMARIES)
    shown = CliRunner().invoke(app, ["--help"]).output
    places = [shown.index(f"{title}:") for title in GROUPS]
    assert places == sorted(places)
    assert all(f"\n  {name} " in shown for name in SUMMARIES)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_accepts_its_completion_script(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(CliRunner().invoke(app, ["completion", shell]).output)
    assert "_PRIME_NODE_COMPLETE" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True)


COMPLETE = 'source "$1"; COMP_WORDS=($2); COMP_CWORD=$3; _prime_node_completion "$4"; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("prime-node coord", ["coordinator"]),
        ("prime-node operate un", ["unban"]),
        ("prime-node join --engi", ["--engine"]),
        ("prime-node join --engine v", ["vllm"]),
    ],
)
def test_bash_completes_commands_options_and_values(words: str, found: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(CliRunner().invoke(app, ["completion", "bash"]).output)
    program = tmp_path / "prime-node"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m prime_node "$@"\n')
    program.chmod(0o755)
    index = str(len(words.split()) - 1)
    ran = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(script), words, index, str(program)],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == found, ran.stderr


def test_there_is_a_page_for_every_command_and_none_for_a_hidden_option() -> None:
    pages = dict(man_pages())
    assert {f"prime-node-{name}" for name in SUMMARIES} < set(pages)
    assert "prime-node-operate-ban" in pages
    assert r"\-\-engine" in pages["prime-node-join"]
    assert not any("cheat" in text for name, text in pages.items() if name == "prime-node-join")


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed (Debian: apt-get install man-db)")
def test_man_formats_every_page_without_a_warning(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["man", "--to", str(tmp_path)], catch_exceptions=False)
    assert ran.exit_code == 0
    files = sorted(map(str, (tmp_path / "man1").iterdir()))
    assert len(files) == len(dict(man_pages()))
    done = subprocess.run(
        ["man", "--warnings", "-l", *files],
        capture_output=True,
        text=True,
        env=os.environ | {"MANPAGER": "cat", "LC_ALL": "C.UTF-8"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Lend this machine to a run" in done.stdout
