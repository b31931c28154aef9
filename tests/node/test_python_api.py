"""`prime_node.join` and `prime_node.verify`, as docs/python.md shows them to programs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.node.table_engine import table_weights
from tests.node.worker_world import MemorySource, make_run
from tests.source_tree import ROOT

import prime_node
from prime_node.cli.api import OptionConflict, confined_worker
from prime_node.envs.settings import EnvironmentSettings
from prime_node.worker.config import WorkerConfig
from prime_node.worker.worker import Ending
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.invite import Invite

VERIFY_EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)[0]
RUN = make_run()
LINK = f"http://127.0.0.1:9/#{RUN.digest}"
FREE = {"worker": {"sandbox": {"unsafe_off": True}}}
"""Settings with which this process stays as it is."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the run `runs/mine`, whose coordinator has published two policies."""
    source = MemorySource(RUN)
    first = source.publish(table_weights(0))
    source.publish(table_weights(1), base=(first, table_weights(0)))
    source.save(tmp_path / "runs" / "mine" / "coordinator" / "public")
    return tmp_path


def run_example(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = "import prime_node, sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert not loaded & {"aiohttp", "asyncio", "numpy", "pydantic", "torch", "typer"}
    assert {name for name in loaded if name.startswith("prime_")} == {"prime_node"}


def test_the_package_offers_what_it_lists_and_nothing_else() -> None:
    assert all(getattr(prime_node, name) for name in prime_node.__all__)
    with pytest.raises(AttributeError, match="no attribute 'leave'"):
        getattr(prime_node, "leave")  # noqa: B009 (a type checker would refuse the attribute)


def test_the_example_verifies_a_run_folder(folder: Path) -> None:
    ran = run_example(VERIFY_EXAMPLE, folder)
    assert ran.returncode == 0, ran.stderr
    *checks, last = ran.stdout.splitlines()
    assert [line.split()[0] for line in checks] == [str(number) for number in range(1, 10)]
    assert all(" holds " in line for line in checks)
    assert last == "policy 1"


def test_the_example_fails_on_a_damaged_run_folder(folder: Path) -> None:
    blobs = (folder / "runs" / "mine" / "coordinator" / "public" / "blobs").rglob("*")
    largest = max((path for path in blobs if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    ran = run_example(VERIFY_EXAMPLE, folder)
    assert ran.returncode == 1
    assert "does not hold" in ran.stdout.splitlines()[-1]


async def test_verify_reports_its_progress_and_the_tensor_asked_for(folder: Path) -> None:
    stages: list[tuple[str, int, int | None]] = []
    found = await prime_node.verify(
        folder / "runs" / "mine", run=RUN.digest, on_progress=lambda *stage: stages.append(stage)
    )
    assert found.ok
    assert found.pinned
    assert stages[-1][1] == stages[-1][2] == found.report.num_bytes
    name = next(iter(table_weights(0)))
    proven = await prime_node.verify(folder / "runs" / "mine", tensor=name)
    assert proven.proof is not None
    assert proven.proof.name == name


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"tensor": "a", "chain": True}, "tensor"),
        ({"sign": Path("key")}, "sign"),
        ({"base": Path("base")}, "base"),
    ],
)
async def test_options_that_exclude_each_other_are_refused(folder: Path, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(OptionConflict) as refused:
        await prime_node.verify(folder / "runs" / "mine", **options)
    assert refused.value.option == fault


async def test_verify_of_a_folder_without_a_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no published checkpoint"):
        await prime_node.verify(tmp_path)


async def test_a_worker_that_waits_for_its_coordinator_leaves_when_it_is_asked_to(tmp_path: Path) -> None:
    stop = asyncio.Event()
    worker = asyncio.create_task(prime_node.join(LINK, folder=tmp_path / "worker", settings=FREE, stop=stop))
    stop.set()
    assert await worker is Ending.STOPPED
    assert (tmp_path / "worker" / "identity.key").exists()


@pytest.mark.parametrize(
    ("link", "settings", "fault"),
    [
        ("not a link", FREE, "join link"),
        (LINK, {"worker": {"engin": "vllm"}}, "did you mean engine"),
        (LINK, {"workers": {}}, r"unknown table \[workers\]"),
    ],
)
async def test_a_wrong_link_or_setting_raises_before_anything_is_confined(
    tmp_path: Path, link: str, settings: dict[str, Any], fault: str
) -> None:
    with pytest.raises(LocalError, match=fault):
        await prime_node.join(link, folder=tmp_path, settings=settings)


OWN = seal(
    Invite(run=LINK.partition("#")[2], invite="b" * 32, keys_max=1, expires_at_ms=1),
    PayloadType.INVITE,
    SigningKey(bytes(32)),
).to_base64()


@pytest.mark.parametrize(("link", "invite"), [(f"{LINK}.from-link==", "from-link=="), (LINK, OWN)])
def test_an_invitation_in_the_link_replaces_that_of_the_settings(tmp_path: Path, link: str, invite: str) -> None:
    settings = WorkerConfig.load({"worker": {**FREE["worker"], "invite": OWN}})
    worker = confined_worker(link, settings, EnvironmentSettings(), folder=tmp_path, identity=None)
    worker.machine.close()
    if worker.launcher is not None:
        worker.launcher.close()
    assert worker.settings.invite == invite
