"""A role that still waits for its coordinator handles Ctrl-C and ends in order. Real processes, real signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_node.keyfile import load_or_create

ROLES = [("join", 0), ("validator", 0), ("trainer", 5)]
"""Command, and its exit code after an early stop."""
STOP_SECONDS_MAX = 5.0


def start(role: str, coordinator: socket.socket, folder: Path) -> subprocess.Popen[str]:
    key = folder / "role.key"
    load_or_create(key)
    link = f"http://127.0.0.1:{coordinator.getsockname()[1]}/#{'ab' * 32}"
    option = "--identity" if role == "join" else "--key"
    command = [sys.executable, "-m", "prime_node", role, link, option, str(key), "--folder", str(folder / role)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the output."""
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began_s < STOP_SECONDS_MAX
    return process.returncode, errors


@pytest.mark.slow
@pytest.mark.parametrize(("role", "exit_code"), ROLES)
def test_ctrl_c_ends_a_role_whose_coordinator_is_dead(role: str, exit_code: int, tmp_path: Path) -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # and never listens: connections are refused
        process = start(role, dead, tmp_path)
        try:
            assert process.stderr is not None
            assert any("the run's description" in line for line in process.stderr)
            code, errors = interrupt(process)
        finally:
            process.kill()
    assert code == exit_code
    assert "Traceback" not in errors


def test_ctrl_c_ends_a_worker_whose_coordinator_is_silent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = start("join", silent, tmp_path)
        try:
            silent.settimeout(30)
            connection, _ = silent.accept()
            with connection:
                code, errors = interrupt(process)
        finally:
            process.kill()
    assert code == 0
    assert "Traceback" not in errors
