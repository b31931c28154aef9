"""The built wheel in an environment for each role, outside of the checkout: the commands of the tutorials run."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.node.clean_world import make_role_environment
from tests.source_tree import ROOT

from prime_node.cli.missing_extra import ROLES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
TUTORIALS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "tutorials.py"))
RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "release.py"))
HAS = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if u.find_spec(name)])"
MODULES = ("torch", "transformers", "prometheus_client", "obstore", "asyncpg", "libp2p", "vllm", "prime_lab", "pytest")
EXPECTED = {
    "worker": ["torch", "transformers"],
    "operator": ["prometheus_client", "obstore", "asyncpg"],
    "trainer": ["torch", "transformers"],
    "validator": ["torch", "transformers"],
    "verifier": [],
}


def test_the_tutorials_run_from_the_wheel_with_the_packages_of_each_role(tmp_path: Path) -> None:
    wheel = RELEASE["Packages"](ROOT, tmp_path / "dist", "wheel").wheel
    made: dict[tuple[str, ...], Path] = {}
    for role, parts in ROLES.items():
        if parts not in made:
            made[parts] = make_role_environment(tmp_path / role, wheel, role)
    programs = {role: made[parts] for role, parts in ROLES.items()}
    for role, folder in programs.items():
        ran = subprocess.run(
            [str(folder / "python"), "-c", HAS, *MODULES], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert ran.stdout.strip() == str(EXPECTED[role]), role
    home = tmp_path / "home"
    home.mkdir()
    done = list(TUTORIALS["follow"](programs, home))
    assert {line.split()[1] for line in done if line.startswith("prime-node")} == set(TUTORIALS["ROLE_OF"])
    assert (home / "out" / "PROVENANCE.json").is_file()
    assert str(ROOT) not in (home / "join.log").read_text(), "no code of the checkout was used"
    assert sys.prefix not in {str(folder) for folder in programs.values()}
