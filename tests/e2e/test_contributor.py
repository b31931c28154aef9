"""A contributor's afternoon: join a real run, look at the worker's page in a browser, pause, resume, set limits, finish.

The run is then used for a test of `up`, which saves a start.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import subprocess
from pathlib import Path

import pytest
from tests.chromium_world import MISSING, Tab, chromium_program, running_chromium
from tests.e2e.conftest import Up, joined
from tests.time_world import until, wait_until

from prime_node.cli import control as command
from prime_node.cli.wire_node import PAGE_FILE
from prime_node.worker.control import Wanted, read_control

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]
PROGRAM = chromium_program()
HEADLINE = "document.querySelector('.state .big')?.textContent"
SENTENCE = "document.querySelector('.state .now p').textContent"


async def test_a_contributor_controls_a_worker_by_its_page_and_nothing_is_orphaned_when_up_is_killed(
    up: Up, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up.start("up.unsafe_cheaters={}", "up.num_workers=1", "run.max_steps=5000")
    await asyncio.to_thread(up.until, lambda status: status["step"] >= 1, timeout_s=180, what="step 1")
    if PROGRAM is not None:
        with joined(up, tmp_path, "guest", "transformers") as guest:
            await _walk(up, guest, tmp_path / "guest", capsys)
    up.kill()
    await asyncio.to_thread(wait_until, lambda: not up.processes())
    if PROGRAM is None:
        pytest.skip(MISSING)


async def _walk(up: Up, guest: subprocess.Popen[bytes], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await until(lambda: (folder / PAGE_FILE).exists() and (folder / "status.json").exists(), seconds=120.0)
    command.open_worker(folder, print_only=True)
    address = capsys.readouterr().out.strip()
    assert PROGRAM is not None
    async with running_chromium(PROGRAM) as browser, browser.tab() as tab:
        await tab.go(address)
        await tab.until(f"{HEADLINE} === 'Generating'", seconds=120.0)
        await _pause_and_resume(up, tab, folder)
        await _limit(tab, folder)
        assert tab.errors == []
        assert not [url for url in tab.requested if not url.startswith((address.partition("#")[0], "data:"))]
        assert all(address.partition("#")[2] not in url for url in tab.requested), "the key is in no request's address"
        await tab.evaluate("document.querySelector('.actions .risky').click()")
        await tab.until("!document.querySelector('.actions[role=group]').hidden")
        await tab.evaluate("document.querySelector('.actions[role=group] .risky').click()")
        assert await asyncio.to_thread(guest.wait, 120.0) == 0, _log(folder)
        await tab.until(f"{HEADLINE} === 'Ended'")
    assert not (folder / PAGE_FILE).exists()
    assert read_control(folder).wanted is Wanted.RUN, "the next start computes"
    status = json.loads((folder / "status.json").read_text())
    assert (status["ended"], status["bundles_spooled"]) == ("stopped", 0)
    assert status["rollouts_accepted"] + status["rollouts_pending"] > 0
    log = _log(folder)
    assert "confined; " in log
    assert address.partition("#")[2] not in log, "a log file holds no key"


async def _pause_and_resume(up: Up, tab: Tab, folder: Path) -> None:
    await tab.evaluate("document.querySelector('.actions button').click()")
    await tab.until(f"{HEADLINE} === 'Paused'")
    assert "on request" in await tab.evaluate(SENTENCE)
    await asyncio.to_thread(
        up.until,
        lambda status: [one["open_leases"] for one in status["workers"] if one["name"] == "guest"] == [0],
        timeout_s=60.0,
        what="the leases that the guest handed back",
    )
    command.resume_worker(folder)
    await tab.until(f"{HEADLINE} && {HEADLINE} !== 'Paused'", seconds=50.0)


async def _limit(tab: Tab, folder: Path) -> None:
    now = dt.datetime.now().astimezone()
    begin, end = (f"{now + dt.timedelta(hours=hours):%H:%M}" for hours in (2, 3))
    await tab.evaluate(
        f"document.querySelector('#l-from').value = '{begin}', document.querySelector('#l-to').value = '{end}',"
        "document.querySelector('#l-threads').value = '2',"
        "document.querySelector('#l-to').dispatchEvent(new Event('input')), document.querySelector('form').requestSubmit()"
    )
    await tab.until(f"{HEADLINE} === 'Paused'")
    assert f"until {begin}, as its hours are {begin}-{end}" in await tab.evaluate(SENTENCE)
    limits = read_control(folder).limits
    assert limits is not None
    assert (limits.hours, limits.threads, limits.on_battery) == (f"{begin}-{end}", 2, True)
    command.limit_worker(folder, ["hours="])
    await tab.until(f"{HEADLINE} && {HEADLINE} !== 'Paused'", seconds=50.0)
    assert await tab.evaluate("document.querySelector('#l-from').value") == ""


def _log(folder: Path) -> str:
    return folder.with_name("guest.log").read_text()
