"""A run whose coordinator and worker were of earlier code is upgraded role by role while it runs, and nothing is lost.

`recorded/roles-COMMIT.tar.xz` was made by both roles of that commit (upgrade_world.py). Its code is taken from the repository's
history; without that, only today's worker continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tarfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.coordinator_process import REPOSITORY
from tests.node.upgrade_world import STEPS_BEFORE, AgedProcess, around, source_of, train_one

from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.audit.audit import audit
from prime_protocol.envelope import open_envelope, parse_json
from prime_protocol.ledger import LedgerChain
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.verdict import Receipt

RECORDED = next((Path(__file__).parent / "recorded").glob("roles-*.tar.xz"))
COMMIT = RECORDED.name.split(".")[0].removeprefix("roles-")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Return the tree of the recording's commit."""
    folder = tmp_path / "earlier"
    folder.mkdir()
    made = subprocess.run(["git", "archive", COMMIT], cwd=REPOSITORY, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"commit {COMMIT} is not in this clone")
    subprocess.run(["tar", "x"], cwd=folder, input=made.stdout, check=True)
    process = Path("tests/node/aged_process.py")
    (folder / process).write_bytes((REPOSITORY / process).read_bytes())
    return folder


@pytest.fixture
def recorded(tmp_path: Path) -> PinnedRun:
    """Unpack the recording, and return its run."""
    with tarfile.open(RECORDED) as file:
        file.extractall(tmp_path, filter="data")
    envelope = open_envelope((tmp_path / "coordinator" / "public" / "run.json").read_bytes())
    return open_run_spec(envelope, pinned=envelope.digest)


@contextlib.asynccontextmanager
async def coordinator(folder: Path, *settings: str) -> AsyncIterator[str]:
    """Run today's coordinator in a folder, and yield its URL."""
    process = await AgedProcess.start(REPOSITORY, "coordinator", folder, "0", *settings)
    try:
        yield f"http://127.0.0.1:{await process.line()}"
    finally:
        await process.kill()


def receipts_in(folder: Path) -> list[Receipt]:
    lines = (folder / "receipts.jsonl").read_bytes().splitlines()
    return [parse_json(open_envelope(line).payload, Receipt) for line in lines]


async def continue_run(run: PinnedRun, folder: Path, *trees: Path) -> None:
    """Let workers of these trees, one after the other, continue a recording to its end; check what was promised."""
    public, earlier_receipts = folder / "coordinator" / "public", receipts_in(folder / "worker")
    source, trained = source_of(run, public), Counter[int]()
    assert earlier_receipts
    async with coordinator(folder / "coordinator") as url, around(run, url) as world:
        before = (await world.get("/v1/ledger/0"))[1].splitlines()
        assert before
        for number, tree in enumerate(trees):
            worker = await AgedProcess.start(tree, "worker", folder / "worker", url, run.digest)
            last = run.spec.max_steps if tree is trees[-1] else STEPS_BEFORE + 2 * (number + 1)
            for step in range(len(source.manifests) - 1, last):
                trained.update(group.slot for group in (await train_one(world, source, step)).groups)
            if tree is trees[-1]:
                assert await worker.line() == "drained"
            await worker.kill()
        after = (await world.get("/v1/ledger/0"))[1].splitlines()
        assert after[: len(before)] == before
        chain = LedgerChain(run.digest)
        settled = {chain.follow(line)[0].bundle for line in after}
        promised = {receipt.bundle for receipt in (*earlier_receipts, *receipts_in(folder / "worker"))}
        assert promised <= settled
        assert max(trained.values()) == 1
    report = await audit(FolderSource(public), run.digest, chain=True, now_ms=SystemClock().now_ms())
    assert report.passed, report.failure
    assert report.policy_version == run.spec.max_steps


@pytest.mark.slow
async def test_todays_roles_continue_the_files_of_earlier_ones(recorded: PinnedRun, tmp_path: Path) -> None:
    await continue_run(recorded, tmp_path, REPOSITORY)


@pytest.mark.slow
async def test_an_earlier_worker_works_with_todays_coordinator_until_it_is_upgraded_too(
    recorded: PinnedRun, earlier: Path, tmp_path: Path
) -> None:
    await continue_run(recorded, tmp_path, earlier, REPOSITORY)


@pytest.mark.slow
async def test_a_worker_that_is_too_old_is_told_what_to_do(recorded: PinnedRun, earlier: Path, tmp_path: Path) -> None:
    async with coordinator(tmp_path / "coordinator", "software_min=9.9") as url:
        worker = await AgedProcess.start(earlier, "worker", tmp_path / "worker", url, recorded.digest)
        said = await worker.line()
        await asyncio.wait_for(worker.process.wait(), 60.0)
    assert "needs prime-node 9.9 or newer, and you have prime-node 0.1.0: run `prime-node upgrade`" in said
