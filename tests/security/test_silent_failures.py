"""The end of a task is expected or loud: each failure of a background task is reported."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import make_run, memory_parts

from prime_node.cli.supervisor import Child, ChildState, Supervisor
from prime_node.coordinator.assembly import open_coordinator
from prime_node.coordinator.page import live_feed
from prime_node.coordinator.page.run_page import RunPage
from prime_node.patience import first_of, unless
from prime_node.trainer.trainer import log_failed_save


class DiskFull(Exception):
    pass


async def fails() -> None:
    raise DiskFull


async def waits() -> None:
    await asyncio.Event().wait()


async def test_what_ends_the_first_of_several_is_raised() -> None:
    with pytest.raises(DiskFull):
        await first_of(waits(), fails())
    with pytest.raises(DiskFull):
        await unless(waits(), fails())
    with pytest.raises(DiskFull):
        await unless(fails(), waits())


async def test_a_checkpoint_that_cannot_be_written_is_reported_at_once(caplog: pytest.LogCaptureFixture) -> None:
    saving = asyncio.create_task(fails())
    saving.add_done_callback(log_failed_save)
    await asyncio.gather(saving, return_exceptions=True)
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(0)
    assert "the checkpoint of the training state could not be written" in caplog.text


@pytest.mark.timeout(60)
async def test_a_child_that_cannot_be_started_again_is_given_up_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, folder = Supervisor(), tmp_path / "logs"
    flag = tmp_path / "flag"
    code = f"import time, pathlib, sys\nwhile not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.01)\nsys.exit(1)"
    await supervisor.start(Child("worker", ("-c", code), folder / "worker.log"))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("a file where the log's folder was")
    flag.touch()
    child = await supervisor.wait("worker")
    assert child.state is ChildState.FAILED
    assert "worker cannot be restarted" in caplog.text


async def test_a_bug_in_a_look_at_the_run_page_is_loud_and_costs_that_look(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, it ended the task that serves all viewers, and the page stood still."""
    monkeypatch.setattr(live_feed, "TICK_S", 0.01)
    coordinator, calls = await open_coordinator(memory_parts(make_run())), 0
    feed = coordinator.feed
    frames = feed.frames(feed.document()["version"])
    right = RunPage.now

    def wrong_once(page: RunPage) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return right(page)

    monkeypatch.setattr(RunPage, "now", wrong_once)
    feed.enter("198.51.100.0/24")
    assert (await anext(frames)).startswith(b"retry:")
    coordinator.history.record(kind="check", step=1)
    assert b'"events"' in await anext(frames)
    feed.leave("198.51.100.0/24")
    await frames.aclose()  # type: ignore[attr-defined]
    assert "ZeroDivisionError" in caplog.text
