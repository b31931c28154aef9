"""Other users of a machine see the arguments of each process, and so no secret belongs there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prime_node.cli.doctor import trial_command
from prime_node.cli.options import Options
from prime_node.cli.place import given_link, invite_for, parse_link
from prime_protocol import limits
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.invite import Invite
from prime_protocol.run_spec import JoinLink

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


def test_a_typed_invitation_gets_a_warning_and_a_setting_of_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    plain = f"http://192.0.2.1:8400/#{'0' * 64}"
    assert given_link(plain) == plain
    assert caplog.messages == []
    assert given_link(f"{plain}.{INVITE}") == f"{plain}.{INVITE}"
    given_link(f" HTTP{plain[4:]}.{INVITE}")  # before, this one got none
    assert len(caplog.messages) == 2
    assert INVITE not in caplog.text
    with pytest.raises(LocalError, match="other users of this machine see what --set holds") as raised:
        Options(None, [f"worker.invite ={INVITE}"])
    assert INVITE not in str(raised.value)


@pytest.mark.parametrize("text", ["", "~no-such-user/link", f"my.host:8400/#{'0' * 64}.{'A' * 300}"])
def test_what_can_be_no_name_of_a_file_is_no_link_either(text: str) -> None:
    """Before, a home of no user and a name that is too long ended in a traceback."""
    with pytest.raises(LocalError, match="a join link looks like"):
        parse_link(given_link(text))


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a binary file"])
def test_what_is_no_file_of_a_link_is_an_error_of_one_line(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "link"
    match kind:
        case "a folder":
            file.mkdir()
        case "a pipe":
            os.mkfifo(file)
        case _:
            file.write_bytes(bytes(range(256)))
    with pytest.raises(LocalError):
        parse_link(given_link(str(file)))


def test_the_longest_link_comes_whole_from_standard_input_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = f"http://{'a' * 250}.example:8400/#{'0' * 64}.{'A' * limits.INVITE_CHARS_MAX}"
    (tmp_path / "link").write_text(f"{link}\nmore\n")
    with (tmp_path / "link").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert parse_link(given_link("-")) == parse_link(link)
    assert given_link(link) == link
    assert given_link("") == ""
    assert parse_link(given_link(str(tmp_path / "link"))) == parse_link(link)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(LocalError, match="a join link looks like"):
        parse_link(given_link("-"))


def test_an_invitation_of_the_settings_is_sent_to_its_own_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Before, a service that was installed for another run sent the new coordinator the invitation of the former run."""
    invite = Invite(run="a" * 64, invite="b" * 32, keys_max=1, expires_at_ms=1)
    setting = seal(invite, PayloadType.INVITE, SigningKey(bytes(32))).to_base64()
    own, other = (JoinLink("http://192.0.2.1:8400", digit * 64) for digit in "ac")
    assert (invite_for(own, setting), invite_for(own, "")) == (setting, "")
    assert caplog.messages == []
    assert invite_for(other, setting) == ""
    assert caplog.messages == ["worker.invite is for run aaaaaaaaaaaa: it is not sent to run cccccccccccc"]
    assert invite_for(JoinLink(other.url, other.run, INVITE), setting) == INVITE
    with pytest.raises(LocalError, match=r"worker\.invite is damaged"):
        invite_for(own, setting[:-9])
