"""Who meets a run for the first time, at a source that shows an old state, is warned."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.node.swarm_world import LOCAL, swarm

from prime_node.adapters.web.http_client import HttpClient
from prime_node.cli.fetch import fetch_policy
from prime_node.worker.config import WorkerConfig
from prime_protocol.envelope import Envelope
from prime_protocol.run_spec import JoinLink


async def test_fetch_warns_where_a_newer_policy_than_the_shown_one_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, `fetch` took the head of a source that hides newer ones, and did not say so."""
    caplog.set_level(logging.WARNING)
    settings = WorkerConfig(swarm=LOCAL.model_copy(update={"enabled": False}), poll_seconds=0.05)
    async with swarm(tmp_path) as made:
        first = (await made.publish()).envelope

        async def old_head(client: HttpClient, *, wait_s: float = 0.0) -> Envelope:
            return first

        link = JoinLink(made.world.url, made.world.run.digest)
        await fetch_policy(link, settings, tmp_path / "one", None, tmp_path / "fresh")
        assert "may not be the newest" not in caplog.text
        await made.publish()
        monkeypatch.setattr(HttpClient, "head", old_head)
        await fetch_policy(link, settings, tmp_path / "two", None, tmp_path / "frozen")
        assert "policy 0 may not be the newest: policy 1 is published" in caplog.text
