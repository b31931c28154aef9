"""What others do with a real run: compute for it by the worker's page, serve and fetch its policies through the swarm.

The tests share one run, which saves starts.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chromium_world import MISSING, Tab, chromium_program, running_chromium
from tests.e2e.conftest import Up, joined, read, until_found, up_in
from tests.time_world import until, wait_until

from prime_node.cli import control as command
from prime_node.cli.supervisor import last_lines
from prime_node.cli.wire_node import PAGE_FILE
from prime_node.worker.control import Wanted, read_control

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]
PROGRAM = chromium_program()
LOCAL = ("--set", "worker.swarm.host=127.0.0.1", "--set", "worker.swarm.p2p=off")
HEADLINE = "document.querySelector('.state .big')?.textContent"
SENTENCE = "document.querySelector('.state .now p').textContent"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A run for all tests of this file. The last one kills `up`."""
    with up_in(tmp_path_factory.mktemp("contributor")) as up:
        up.start("up.unsafe_cheaters={}", "up.num_workers=2", "run.max_steps=5000")
        up.until(lambda status: status["step"] >= 2, timeout_s=180, what="step 2")
        yield up


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
async def test_a_contributor_controls_a_worker_by_its_page(
    run: Up, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with joined(run, tmp_path, "guest", "transformers") as guest:
        await _walk(run, guest, tmp_path / "guest", capsys)


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
    command.limit_worker([str(folder), "hours="])
    await tab.until(f"{HEADLINE} && {HEADLINE} !== 'Paused'", seconds=50.0)
    assert await tab.evaluate("document.querySelector('#l-from').value") == ""


def _log(folder: Path) -> str:
    return folder.with_name("guest.log").read_text()


def test_workers_seeders_and_downloads_do_without_the_coordinators_chunks(run: Up, tmp_path: Path) -> None:
    with (run.directory / "config.toml").open("a") as config:
        config.write("\n[coordinator]\nserve_chunks = false\n")
    os.kill(run.process_of("coordinator"), signal.SIGKILL)  # `up` starts it again, with the file's new settings
    cut_at = run.until(lambda status: gives_no_chunks(run, status["head"]), timeout_s=60, what="the cut")["step"]

    # A step is trained on rollouts of policies at most two steps old: so the workers hold policies from after the cut.
    run.until(lambda status: status["step"] >= cut_at + 6, timeout_s=120, what="six steps after the cut")

    link = (run.directory / "join-link").read_text().strip()
    log = tmp_path / "seed.log"
    command = [sys.executable, "-m", "prime_node", "seed", link, "--folder", str(tmp_path / "seed"), *LOCAL]
    with log.open("wb") as output:
        seeder = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        head = until_found(lambda: head_of_seeder(log), what=f"a policy at the seeder; its log: {log}")
        assert head > cut_at
        exported = tmp_path / "exported"
        fetched = subprocess.run(
            [sys.executable, "-m", "prime_node", "fetch", link, "--out", str(exported), "--log-level", "INFO",
             "--folder", str(tmp_path / "fetch"), *LOCAL],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert fetched.returncode == 0, fetched.stdout + fetched.stderr
        assert str(exported) in fetched.stdout
        assert policy_in((exported / "provenance" / "manifest.json").read_bytes()) >= head
        assert (exported / "model.safetensors").stat().st_size > 100_000
        seeder.send_signal(signal.SIGINT)
        assert seeder.wait(timeout=30) == 0, log.read_text()
    finally:
        seeder.kill()
        seeder.wait()


def test_nothing_is_orphaned_when_up_is_killed(run: Up) -> None:
    assert run.processes()
    run.kill()
    wait_until(lambda: not run.processes())


def head_of_seeder(log: Path) -> int | None:
    """Return the newest policy that it shows on its own port."""
    port = re.search(r"serving peers on port (\d+)", last_lines(log, 100))
    if port is None:
        return None
    envelope = read(f"http://127.0.0.1:{port[1]}/v1/head")  # nothing where it has no head yet
    return policy_in(envelope) if envelope else None


def policy_in(envelope: bytes) -> int:
    """Return what a caller without a key can read."""
    payload = json.loads(base64.b64decode(json.loads(envelope)["payload"]))
    version: int = payload["policy_version"]
    return version


def gives_no_chunks(up: Up, head: int) -> bool:
    """The coordinator refuses the first part of the newest policy."""
    url = (up.directory / "join-link").read_text().strip().partition("#")[0]
    manifest = json.loads(base64.b64decode(json.loads(read(f"{url}v1/manifests/{head}"))["payload"]))
    try:
        urllib.request.urlopen(f"{url}v1/blobs/{manifest['encodings'][0]['parts'][0]['digest']}", timeout=5).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 404 and b"serves no chunks" in error.read()
    return False
