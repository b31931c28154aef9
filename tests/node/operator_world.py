"""Shared parts of the tests of operators' commands: keys on disk, and a run's folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.node.coordinator_world import (
    COORDINATOR,
    World,
    make_run,
)
from typer.testing import CliRunner

from prime_node.cli.main import app
from prime_node.cli.run_dir import RunDir
from prime_node.keyfile import keep_secret
from prime_protocol.identity import SigningKey


def write_key(path: Path, key: SigningKey) -> Path:
    keep_secret(path, key.to_bytes())
    return path


def make_run_folder(folder: Path) -> Path:
    """Make a folder with nothing but a RunSpec."""
    folder.mkdir()
    (folder / "run.json").write_bytes(make_run().envelope.to_bytes())
    return folder


def run_dir_of(world: World, folder: Path) -> RunDir:
    place = RunDir(folder / "run")
    write_key(place.key("coordinator"), COORDINATOR)
    place.run_spec.write_bytes(world.run.envelope.to_bytes())
    place.join_link_file.write_text(f"{world.url}/#{world.run.digest}\n")
    return place


async def operate(*arguments: object) -> str:
    """Run the command in a separate thread and return its output. Raises its errors."""
    words = ["operate", *map(str, arguments)]
    result = await asyncio.to_thread(CliRunner().invoke, app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(result.stdout)
