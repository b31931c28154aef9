"""The trainer under torchrun: real ranks that are killed at random moments end with the policies of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from tests.node.cluster_process import FolderCoordinator
from tests.time_world import wait_until

from prime_node.cli.launch import rank_variables, torchrun_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
STEPS = 24
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, *, ranks: int, restarts_max: int = 8) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    command = torchrun_command(ranks, restarts_max=restarts_max)
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder, ranks=2, restarts_max=0).wait(120) == 0, (folder / "out").read_text()[-3_000:]
    found = roots(folder)
    assert len(set(found)) == STEPS + 1
    return found


@pytest.mark.parametrize("seed", range(int(os.environ.get("PRIME_TEST_KILLS", "1"))))
def test_ranks_killed_at_random_moments_end_with_the_policies_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: list[str], seed: int
) -> None:
    rng, killed = random.Random(seed), [""]
    process = start(tmp_path, ranks=2)
    try:
        for after in sorted(rng.sample(range(STEPS - 2), 2)):
            killed = kill_one(tmp_path, rng, after=after, process=process, old=killed)
        assert process.wait(120) == 0, (tmp_path / "out").read_text()[-3_000:]
    finally:
        process.kill()
    assert roots(tmp_path) == undisturbed
