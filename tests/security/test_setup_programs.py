"""The set-up installs the programs that restrictions and their tests need, or reports what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the programs are Linux's")
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import setup_native
setup_native.SYSTEM_FOLDERS = ()
print(getattr(setup_native, sys.argv[2])())
"""
MANAGER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *{package}*) printf '#!/bin/sh\\n' > {folder}/{program}; /bin/chmod 755 {folder}/{program};; esac
"""
PROGRAMS = [("install_bubblewrap", "bwrap", "bubblewrap"), ("install_nftables", "nft", "nftables")]


def installed(function: str, path: Path) -> str:
    """Return the function's message if `path` is the only folder of programs."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(SCRIPTS), function],
        env={**os.environ, "PATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


@pytest.mark.parametrize(("function", "program", "package"), PROGRAMS)
def test_a_missing_program_is_named_with_the_command_that_installs_it(
    tmp_path: Path, function: str, program: str, package: str
) -> None:
    message = installed(function, tmp_path)
    assert message.startswith(f"{package} is not installed: ")
    assert f"sudo apt install {package}" in message


@pytest.mark.parametrize(("function", "program", "package"), PROGRAMS)
def test_root_gets_a_missing_program_from_the_systems_packages(
    tmp_path: Path, function: str, program: str, package: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root installs packages")
    log = tmp_path / "log"
    manager = tmp_path / "apt-get"
    manager.write_text(MANAGER.format(log=log, package=package, folder=tmp_path, program=program))
    manager.chmod(0o755)
    assert installed(function, tmp_path) == ""
    assert log.read_text().splitlines()[-1].endswith(f"--no-install-recommends {package}")
    log.unlink()
    assert installed(function, tmp_path) == ""
    assert not log.exists(), "what is installed is not fetched again"
