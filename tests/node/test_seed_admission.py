"""What a seeder does at its start if the coordinator does not admit it at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, folder_parts, make_run, running

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.cli.seed import require_admission
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import PeersRequest


class WrongClock(SystemClock):
    """A clock that is eight minutes ahead, as on a machine that has not asked a time server yet."""

    def now_ms(self) -> int:
        return super().now_ms() + 480_000


async def test_a_seeder_whose_clock_is_wrong_starts_and_asks_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run()
    async with (
        running(await folder_parts(run, tmp_path)) as world,
        HttpClient(world.url, run=run.digest, clock=WrongClock(), key=ANNA) as client,
    ):
        with pytest.raises(RemoteError) as refused:
            await client.find_peers(PeersRequest())
        assert refused.value.code is ErrorCode.EXPIRED
        await require_admission(client, ANNA)
    assert "has not confirmed yet that this seeder may take part: expired" in caplog.text
