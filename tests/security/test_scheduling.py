"""A confined process changes its own scheduling and priority, and no foreign process's.

It keeps CAP_SYS_NICE, as a role of root does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.security.sandbox_world import PREAMBLE, inside, scheduling

from prime_node.adapters.sandbox import landlock

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or landlock.abi() < landlock.ABI_SCOPES, reason="needs Landlock of Linux 6.12"
)

ATTACKS = """
import struct
from prime_node.adapters.sandbox.privileges import SYS_NICE
from prime_node.adapters.sandbox.seccomp import architecture
numbers = architecture().numbers
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if libc.syscall(numbers[name], *arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
def attack(pid):
    batch = struct.pack("=IIQiIQQQ", 48, os.SCHED_BATCH, 0, 5, 0, 0, 0, 0)
    return {
        "affinity": tried(lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})),
        "scheduler": tried(lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))),
        "parameters": tried(lambda: os.sched_setparam(pid, os.sched_param(0))),
        "attributes": tried(lambda: call("sched_setattr", pid, batch, 0)),
        "priority": tried(lambda: os.setpriority(os.PRIO_PROCESS, pid, 5)),
        "input and output": tried(lambda: call("ioprio_set", 1, pid, 3 << 13)),
    }
"""


@pytest.fixture
def victim() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def test_no_foreign_process_is_rescheduled(tmp_path: Path, victim: int) -> None:
    before = scheduling(victim)
    program = (
        ATTACKS
        + "confine(SandboxRules(**USUAL, keep_capabilities=(SYS_NICE,)))\nprint(json.dumps(attack(options['victim'])))"
    )
    found = inside(tmp_path, program, victim=victim)
    assert scheduling(victim) == before
    assert {name for name, outcome in found.items() if outcome == "done"} <= {"affinity", "scheduler", "parameters"}


def test_without_walls_the_same_process_is_rescheduled(tmp_path: Path, victim: int) -> None:
    """Proves that the test above passes because of the filter."""
    before = scheduling(victim)
    found = inside(tmp_path, ATTACKS + "print(json.dumps(attack(options['victim'])))", victim=victim)
    assert set(found.values()) == {"done"}
    assert scheduling(victim) != before


def test_groups_and_users_are_not_rescheduled(tmp_path: Path) -> None:
    program = (
        ATTACKS
        + """
confine(SandboxRules(**USUAL, keep_capabilities=(SYS_NICE,)))
print(json.dumps([
    *(tried(lambda: os.setpriority(kind, 0, 0)) for kind in (os.PRIO_PGRP, os.PRIO_USER)),
    *(tried(lambda: call("ioprio_set", kind, 0, 0)) for kind in (2, 3)),
]))
"""
    )
    assert inside(tmp_path, program) == ["PermissionError"] * 4


def test_a_process_still_changes_its_own_scheduling(tmp_path: Path) -> None:
    program = (
        ATTACKS
        + """
confine(SandboxRules(**USUAL, keep_capabilities=(SYS_NICE,)))
found = attack(0)
print(json.dumps([found, len(os.sched_getaffinity(0)), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)]))
"""
    )
    found, processors, policy, niceness = inside(tmp_path, program)
    assert set(found.values()) == {"done"}
    assert (processors, policy, niceness) == (1, os.SCHED_BATCH, 5)


def test_libraries_that_name_their_own_threads_still_work(tmp_path: Path) -> None:
    """libzmq aborts where it cannot set a thread's policy, and libgomp where it cannot pin one."""
    pytest.importorskip("zmq", reason="comes with vLLM")
    pytest.importorskip("torch")
    program = """
confine(SandboxRules(**USUAL, families=NETWORK | {Family.UNIX}))
import zmq
with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    push.send(b"heard")
    received = pull.recv().decode()
import torch
torch.set_num_threads(3)
print(json.dumps([received, (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item()]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, str(tmp_path), "{}"],
        env={**os.environ, "OMP_PROC_BIND": "true", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == '["heard", 216000000.0]'
