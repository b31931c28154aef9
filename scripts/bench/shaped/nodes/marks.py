"""Common parts of all systems' programs: their description, and marker files as signals between them and the race."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace


def description() -> SimpleNamespace:
    """The node's JSON file: role, index, address, port, file, size, digest, out, shared, origin, receivers, options."""
    return SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text()))


def mark(name: str) -> None:
    """`up`: others may link to it. `ready`: set up, waiting for `go`. `done`: holds the whole file, verified and written."""
    Path(name).touch()


def wait_for_go(node: SimpleNamespace) -> None:
    while not Path(node.go).exists():
        time.sleep(0.003)


async def until_everyone(node: SimpleNamespace) -> None:
    """Wait until all that are there from the start are up."""
    while not Path(node.everyone).exists():  # noqa: ASYNC110, ASYNC240 - a file sends no notification
        await asyncio.sleep(0.05)


async def until_go(node: SimpleNamespace) -> None:
    await asyncio.to_thread(wait_for_go, node)


def wait_until_over(node: SimpleNamespace) -> None:
    """Wait until every host is done. What follows is not part of the race."""
    while not Path(node.over).exists():
        time.sleep(0.05)
