"""A trainer under torchrun whose ranks are killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.node.cluster_process import FolderCoordinator
from tests.time_world import wait_until

from prime_node.cli.launch import rank_variables, torchrun_command

STEPS = 24
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = torchrun_command(2, restarts_max=8)
    module = command.index("prime_node")
    command[module:] = ["tests.node.cluster_process", str(folder), str(STEPS)]
    with (folder / "out").open("ab") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=rank_variables(Path(tempfile.mkdtemp(dir=folder))) | {"PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def published(folder: Path) -> int:
    return len(list((folder / "coordinator").glob("*.manifest")))


def roots(folder: Path) -> list[str]:
    return FolderCoordinator(folder / "coordinator", max_steps=STEPS).roots


def pids(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("rank-*.pid"))]


def kill_one(
    folder: Path, rng: random.Random, *, after: int, process: subprocess.Popen[bytes], old: list[str]
) -> list[str]:
    """Kill a rank with SIGKILL once enough policies are published and all ranks differ from `old`; return their processes."""

    def are_others() -> bool:
        assert process.poll() is None, (folder / "out").read_text()[-3_000:]
        return published(folder) >= after and len(pids(folder)) == 2 and not set(pids(folder)) & {*old, ""}

    wait_until(are_others, seconds=200.0)
    time.sleep(rng.random() * 0.2)  # anywhere within a step
    ranks = pids(folder)
    os.kill(int(rng.choice(ranks)), signal.SIGKILL)
    return ranks
