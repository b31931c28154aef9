"""Whether a person uses the machine: a real child asks a program in the place of loginctl."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.time_world import VirtualClock, wait_until

from prime_node.at_desk import Desk
from prime_node.other_programs import LOOK_S, ThisMachine
from prime_node.power import PowerSupply


@pytest.fixture
def loginctl(tmp_path: Path) -> Path:
    """Return a program that says what the file `says` next to it holds, and fails without that file."""
    program = tmp_path / "loginctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexec cat {tmp_path}/says\n')
    program.chmod(0o700)
    return program


def test_a_machine_is_in_use_as_logind_says_and_is_asked_from_time_to_time(tmp_path: Path, loginctl: Path) -> None:
    clock, says = VirtualClock(), tmp_path / "says"
    says.write_text("IdleHint=no\n")
    machine = ThisMachine(PowerSupply(tmp_path / "none"), clock, desk=Desk(loginctl, tmp_path))
    assert not (tmp_path / "asked").exists(), "no one asks before the limit needs it"
    wait_until(machine.is_in_use)
    says.write_text("IdleHint=yes\n")
    assert machine.is_in_use(), "not asked again yet"
    clock.seconds += LOOK_S
    wait_until(lambda: not machine.is_in_use())
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["show-seat seat0 --property=IdleHint"] * 2
    machine.close()
    machine.close()


def test_without_an_answer_no_one_uses_the_machine(tmp_path: Path, loginctl: Path) -> None:
    desk = Desk(loginctl, tmp_path)
    desk.ask()
    wait_until(lambda: (tmp_path / "asked").exists())
    assert not desk.is_in_use()
    desk.close()
    desk.ask()
    assert not desk.is_in_use()
    for absent in (Desk(tmp_path / "none", tmp_path), Desk(loginctl, tmp_path / "none")):
        absent.ask()
        assert not absent.is_known()
        assert not absent.is_in_use()
        absent.close()


def test_the_child_ends_with_its_parent_and_not_by_ctrl_c(tmp_path: Path, loginctl: Path) -> None:
    loginctl.write_text(f"#!/bin/sh\necho $PPID > {tmp_path}/part && mv {tmp_path}/part {tmp_path}/shell\n")
    desk = Desk(loginctl, tmp_path)
    desk.ask()
    wait_until(lambda: (tmp_path / "shell").exists())
    shell = int((tmp_path / "shell").read_text())
    assert os.getsid(shell) == shell, "the terminal's Ctrl-C does not reach it"
    desk.close()
    with pytest.raises(ProcessLookupError):
        os.kill(shell, 0)
