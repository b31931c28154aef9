"""Other users of a machine see the arguments of each process, and so no secret belongs there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prime_node.cli.doctor import trial_command
from prime_node.cli.place import given_link, parse_link
from prime_protocol import limits
from prime_protocol.errors import LocalError

INVITE = "A" * 40


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads the list of processes in /proc")
def test_an_invitation_from_standard_input_is_in_no_list_of_processes(tmp_path: Path) -> None:
    """Before, the link was an argument, and its invitation there for all users."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = f"http://127.0.0.1:{silent.getsockname()[1]}/#{'0' * 64}.{INVITE}"
        command = [sys.executable, "-m", "prime_node", "join", "-", "--folder", str(tmp_path / "worker")]
        options = ["--set", "worker.sandbox.unsafe_off=true", "--set", "worker.page.enabled=false"]
        worker = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        try:
            assert worker.stdin is not None
            worker.stdin.write(f"{link}\n".encode())
            worker.stdin.close()
            silent.settimeout(60.0)
            asking, _ = silent.accept()  # it has read the link
            asking.close()
            seen = b"".join(map(_arguments, Path("/proc").glob("[0-9]*")))
            assert str(tmp_path).encode() in seen
            assert INVITE.encode() not in seen
        finally:
            worker.kill()
            worker.wait()


def test_the_child_of_the_doctor_gets_no_invitation(tmp_path: Path) -> None:
    """Before, it got the whole link, also one that the doctor had read from standard input."""
    command = trial_command(f"http://192.0.2.1:8400/#{'0' * 64}.{INVITE}", tmp_path)
    assert f"http://192.0.2.1:8400/#{'0' * 64}" in command
    assert not any(INVITE in argument for argument in command)


def _arguments(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_the_longest_link_comes_whole_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = f"http://{'a' * 250}.example:8400/#{'0' * 64}.{'A' * limits.INVITE_CHARS_MAX}"
    (tmp_path / "link").write_text(f"{link}\nmore\n")
    with (tmp_path / "link").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert parse_link(given_link("-")) == parse_link(link)
    assert given_link(link) == link
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(LocalError, match="a join link looks like"):
        parse_link(given_link("-"))
