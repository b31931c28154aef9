"""A role that prepares a run while the network breaks waits, and does not end."""

from __future__ import annotations

from pathlib import Path

from tests.node.coordinator_world import CONFIG_JSON, make_run, memory_parts, running

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.cli.wire import pinned_run
from prime_node.ports.transport import Unreachable


class BreakingClient(HttpClient):
    """Client whose first download of a blob gets no answer."""

    broke = False

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        if not self.broke:
            self.broke = True
            raise Unreachable("no answer, or an answer without progress")
        return await super().blob(digest, start=start, end=end)


async def test_a_connection_that_breaks_while_model_files_are_fetched_is_waited_out(tmp_path: Path) -> None:
    parts = memory_parts(make_run())
    await parts.public.put(CONFIG_JSON)
    async with (
        running(parts) as world,
        BreakingClient(world.url, run=world.run.digest, clock=SystemClock()) as client,
    ):
        run = await pinned_run(client, world.run.digest, tmp_path)
    assert client.broke
    assert run.digest == world.run.digest
    assert (tmp_path / "model" / "config.json").read_bytes() == CONFIG_JSON
