"""The end of a task is expected or loud: each failure of a background task is reported."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from prime_node.cli.supervisor import Child, ChildState, Supervisor
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
