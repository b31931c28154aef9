"""Other users of a machine see the arguments of each process, and so no secret belongs there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_install import KEY, release

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


SEES = """
import pathlib, sys
def main():
    if "--version" in sys.argv:
        print("{version}")
        return
    seen = b""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            seen += (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            pass
    pathlib.Path("SEEN").write_bytes(seen)
    sys.exit("no way to " + sys.stdin.readline())
"""
"""A new version whose doctor writes down all arguments and environments that it sees, and fails."""
UPGRADES = "import sys; sys.prefix = sys.argv.pop(1); from prime_node.cli.main import main; main()"


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads the list of processes in /proc")
def test_an_upgrade_shows_no_process_the_invitation(tmp_path: Path) -> None:
    """Before, the installer and the doctor of the new version had it among their arguments, and the error repeated it."""
    record = {"source": "nowhere", "key": KEY.public.raw.hex(), "roles": ["verifier"], "bin": str(tmp_path / "bin")}
    (tmp_path / "install.json").write_text(json.dumps(record))
    newer = release(tmp_path / "newer", "0.2.0", SEES.replace("SEEN", str(tmp_path / "seen")))
    link = f"http://192.0.2.1:8400/#{'0' * 64}.{INVITE}"
    place = str(tmp_path / "versions" / "0.1.0")
    ran = subprocess.run(
        [sys.executable, "-c", UPGRADES, place, "upgrade", "--from", str(newer), "--link", "-"],
        input=f"{link}\n",
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert f"no way to {link}" in ran.stderr, ran.stderr  # the doctor got it
    assert "`prime-node doctor - --no-measure` ended with 1" in ran.stderr
    seen = (tmp_path / "seen").read_bytes()
    assert f"{newer}\0--link\0-\0".encode() in seen
    assert INVITE.encode() not in seen


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
