"""Python processes that we start do not import modules from the current folder."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.source_tree import parsed

from prime_node.cli import launch, up_session
from prime_node.cli.supervisor import Child, Supervisor

NODE = Path(launch.__file__).parents[1]
PLANTED = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a current folder with modules named like imported ones. Return the file that proves that one ran."""
    for name in ("json", "numba", "typing", "prime_node", "torch"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ran"


def has_run(planted: Path) -> bool:
    return planted.exists()


async def test_children_of_up_import_nothing_from_the_current_folder(planted: Path) -> None:
    supervisor = Supervisor()
    arguments = ["-m", "prime_node", "--help"]
    await supervisor.start(Child("child", arguments, planted.with_name("log"), environment={"PYTHONPATH": ""}))
    child = await supervisor.wait("child")
    assert child.exit_code == 0, planted.with_name("log").read_text()
    assert not has_run(planted)


async def test_the_compiler_of_kernels_imports_nothing_from_the_current_folder(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    await up_session.compile_for_children()
    assert not has_run(planted)


async def test_ranks_of_the_trainer_import_nothing_from_the_current_folder(planted: Path) -> None:
    """This holds by -P for torchrun and by PYTHONSAFEPATH for the processes that it starts."""
    command = launch.torchrun_command(1, restarts_max=0)
    assert command[:2] == [sys.executable, "-P"]
    program = "import os, subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import json']))"
    assert await launch.launch([sys.executable, "-c", program], [], asyncio.Event(), unfinished=9) == 0
    assert not has_run(planted)


@pytest.mark.xdist_group("source tree")
def test_every_python_that_we_start_leaves_the_current_folder_out() -> None:
    starts = 0
    for path in NODE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            words = node.elts if isinstance(node, ast.List | ast.Tuple) else getattr(node, "args", None)
            if not isinstance(words, list):
                continue
            for word, after in pairwise([*words, None]):
                if isinstance(word, ast.Attribute) and ast.unparse(word) == "sys.executable":
                    starts += 1
                    assert isinstance(after, ast.Constant), f"{path}:{word.lineno}"
                    assert after.value == "-P", f"{path}:{word.lineno}"
    assert starts >= 6


def test_relative_folders_of_modules_do_not_reach_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such entries would name the folder that environment code writes."""
    from prime_node.adapters.environments.variables import module_folders, passed_on

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((".", str(tmp_path), "", "modules")))
    assert module_folders() == [tmp_path]
    assert passed_on(tmp_path)["PYTHONPATH"] == str(tmp_path)
