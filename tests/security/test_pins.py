"""A folder that a stranger hands over cannot pin its own run: only the user can, by `--run` or a link's fragment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import COORDINATOR, folder_parts, running
from tests.node.coordinator_world import make_run as coordinated_run
from tests.node.ledger_world import command
from tests.node.operator_world import write_key
from tests.node.table_engine import table_weights
from tests.node.worker_world import MemorySource, make_run
from typer.testing import CliRunner

from prime_node.cli.main import app
from prime_node.cli.place import named_in
from prime_node.cli.run_dir import RunDir
from prime_node.cli.target import expected_run
from prime_protocol.errors import LocalError

RUN = make_run()


@pytest.fixture
def handed(tmp_path: Path) -> RunDir:
    """A run directory with a published policy and a join link that its maker wrote."""
    place = RunDir(tmp_path / "release")
    source = MemorySource(RUN)
    source.publish(table_weights(0))
    source.save(place.public)
    place.join_link_file.write_text(f"http://honest-run.example:8400/#{RUN.digest}")
    return place


def verify(target: Path, *options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["verify", str(target), "--json", *options])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("options", [[], ["--tensor", next(iter(table_weights(0)))]], ids=["whole", "tensor"])
def test_a_folders_own_join_link_is_shown_and_pins_nothing(handed: RunDir, options: list[str]) -> None:
    code, report = verify(handed.path, *options)
    assert (code, report["ok"], report["pinned"]) == (0, True, False)
    assert "checked against the folder's own link; not pinned" in report["checks"][0]["detail"]
    assert "not pinned" in CliRunner().invoke(app, ["verify", str(handed.path), *options]).stdout
    code, report = verify(handed.path, "--run", RUN.digest, *options)
    assert (code, report["pinned"]) == (0, True)
    assert "not pinned" not in report["checks"][0]["detail"]


def test_a_folder_that_contradicts_its_own_join_link_fails(handed: RunDir) -> None:
    handed.join_link_file.write_text(f"http://honest-run.example:8400/#{'0' * 64}")
    code, report = verify(handed.path)
    assert (code, report["ok"], report["pinned"]) == (1, False, False)


def test_only_the_fragment_of_a_link_names_a_run(handed: RunDir) -> None:
    assert named_in(f"http://127.0.0.1:9/#{RUN.digest}") == RUN.digest
    assert named_in("http://127.0.0.1:9/#") is None
    assert named_in(str(handed.path)) is None
    assert expected_run(str(handed.path)) == RUN.digest


async def test_a_ledger_in_a_run_directory_is_pinned_by_the_option_alone(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    async with running(await folder_parts(coordinated_run(), place.coordinator)) as world:
        await world.publish()
        digest = world.run.digest
        place.run_spec.write_bytes(world.run.envelope.to_bytes())
    write_key(place.key("coordinator"), COORDINATOR)
    place.join_link_file.write_text(f"http://honest-run.example:8400/#{digest}")
    alone = await asyncio.to_thread(command, "verify", str(place.path), "--json")
    named = await asyncio.to_thread(command, "verify", str(place.path), "--json", "--run", digest)
    assert [json.loads(one.stdout)["pinned"] for one in (alone, named)] == [False, True]
    with pytest.raises(LocalError, match="holds run"):
        await asyncio.to_thread(command, "verify", str(place.path), "--run", "0" * 64)
