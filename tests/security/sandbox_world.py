"""Shared parts of the sandbox's tests: programs that are confined and try what they may not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PREAMBLE = """
import ctypes, fcntl, json, os, resource, socket, subprocess, sys, termios
from pathlib import Path
from prime_node.adapters.sandbox import system_paths
from prime_node.adapters.sandbox.confine import confine
from prime_node.adapters.sandbox.rules import NETWORK, Family, ModeChanges, ProcessLimits, SandboxRules

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
USUAL = dict(read=(*system_paths.system_paths(), *system_paths.python_paths()), write=(folder,), devices=system_paths.devices())

def tried(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"
"""


def inside(folder: Path, program: str, **options: Any) -> Any:
    """Run a program that confines itself, and return what it prints as JSON. It gets `options` by that name."""
    ran = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, str(folder), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def scheduling(pid: int) -> tuple[object, ...]:
    line = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    niceness, policy = line[16], line[38]
    return os.sched_getaffinity(pid), niceness, policy
