"""Clients of a server with a name, in namespaces with an own /etc/hosts and an own network. test_networks.py starts it.

python -m tests.node.named_server_world moves HOSTS     a name without an address, then with one, then with another one
python -m tests.node.named_server_world only6 FOLDER    a whole run at an address of IPv6
python -m tests.node.named_server_world zones FOLDER    connections to addresses that are valid on one link alone
"""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace
from pathlib import Path

from tests.node.coordinator_world import ANNA, make_run, memory_parts, running
from tests.node.crowd_world import persist
from tests.node.served_world import serving_parts, work_through

from prime_node.adapters.name_lookups import patient_loop
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.transport import Unreachable

NAMED = {"hosts": ("run.test",)}


async def moves(hosts: Path) -> None:
    """Say where a client finds the coordinator, and why it does not."""
    run = make_run()
    async with running(memory_parts(run, **NAMED)) as world:
        port = int(world.url.rpartition(":")[2])
        async with HttpClient(f"http://run.test:{port}", run=run.digest, clock=SystemClock(), key=ANNA) as client:
            try:
                await client.run_spec()
            except Unreachable as error:
                print(error)
            await asyncio.to_thread(hosts.write_text, "127.0.0.1 run.test\n")
            await persist(client.run_spec)
            print("found at 127.0.0.1")
    async with running(memory_parts(run, host="127.0.0.2", port=port, **NAMED), at="127.0.0.2"):
        await asyncio.to_thread(hosts.write_text, "127.0.0.2 run.test\n")
        async with HttpClient(f"http://run.test:{port}", run=run.digest, clock=SystemClock(), key=ANNA) as client:
            await persist(client.run_spec)
        print("found at 127.0.0.2")


async def only6(folder: Path) -> None:
    """Run a whole run over IPv6."""
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=5.0)
    except OSError as error:
        print("no IPv4 here" if error.errno not in (None, 111) else error)
    parts = await serving_parts()
    parts = replace(
        parts, config=CoordinatorConfig.model_validate({**parts.config.model_dump(), "host": "::", **NAMED})
    )
    async with running(parts, at="run.test") as world:
        worker, _ = await work_through(world, folder)
        tally = worker.receipts.tally()
        assert tally.accepted > 0
        print(f"drained at {world.url.rpartition(':')[0]}, {'all accepted' if not tally.refused else tally.refused}")


async def zones(folder: Path) -> None:
    """Connect to an address of the link `own`, and to a name by IPv4 alone."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        print(f"connected to {writer.get_extra_info('sockname')[0]}")
        writer.close()

    for host, heard_at, family in (("fe80::1%own", "fe80::1%own", 0), ("both.test", "127.0.0.1", socket.AF_INET)):
        async with await asyncio.start_server(serve, heard_at) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(host, port, family=family)
            await reader.read()
            writer.close()
            await writer.wait_closed()


if __name__ == "__main__":
    if sys.argv[1] == "zones":
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # it guesses a link
    with asyncio.Runner(loop_factory=patient_loop) as runner:
        runner.run({"moves": moves, "only6": only6, "zones": zones}[sys.argv[1]](Path(sys.argv[2])))
