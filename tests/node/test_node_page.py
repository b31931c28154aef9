"""The worker's page: what it shows, its orders, the minutes that it keeps, and the address for `prime-node open`."""

from __future__ import annotations

import asyncio
import json
import re
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.node.memory_coordinator import WorkerWorld
from tests.node.node_page_world import opened_addresses, shown_worker
from tests.node.swarm_world import ANNA, LOCAL, swarm
from tests.node.table_engine import TableEngine
from tests.node.together_world import Together
from tests.node.worker_world import make_run
from tests.page_world import HOSTILE
from tests.time_world import VirtualClock, until

from prime_node.cli import control as command
from prime_node.cli.wire_node import PAGE_FILE, limit_links, limited_settings, links_of
from prime_node.patience import RateLimit
from prime_node.ports.engine import ThreadedEngine
from prime_node.worker.config import WorkerConfig
from prime_node.worker.control import Control, Wanted, WorkLimits, read_control, write_control
from prime_node.worker.loop import run_worker
from prime_node.worker.recent import FILE, MINUTE_MS, MINUTES_MAX, RecentMinutes, RecentWork
from prime_node.worker.status import REASONS, Status, doing, reason_in_words
from prime_node.worker.worker import Ending
from prime_protocol.errors import LocalError
from prime_protocol.requests import WorkerState
from prime_protocol.verdict import RejectReason

BUNDLED_BYTES_MAX = 80_000

STATUS = Status(
    worker="w", state=WorkerState.GENERATING, policy_version=40, head=41, step=41, tokens_per_s=812.0,
    rollouts_generated=1, rollouts_accepted=100, rollouts_pending=8, tokens_accepted=1_000, at_ms=60 * MINUTE_MS,
)  # fmt: skip


async def test_the_page_pauses_resumes_and_finishes_a_running_worker(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Together(sequences_max=16)
    async with shown_worker(world, engine, grace_seconds=0.0) as (worker, client):
        working = asyncio.create_task(run_worker(worker, world.stop))
        await client.begin()
        await until(lambda: len(engine.calls) == 2)
        shown = await client.node()
        now = shown["doing"]
        assert (now["headline"], now["is_paused"]) == ("Generating", False)
        standing = shown["standing"]
        assert (standing["rank"], standing["contributors"], standing["person"]) == (1, 3, "")
        assert [one["key"] for one in standing["machines"]] == [worker.key.key_id]
        assert (await client.order(wanted="pause")).status == 200
        await until(lambda: worker.activity.paused and not worker.activity.in_hand)
        now = (await client.node())["doing"]
        assert (now["headline"], now["is_on_request"]) == ("Paused", True)
        assert "until it is resumed" in now["sentence"]
        assert read_control(tmp_path).wanted is Wanted.PAUSE, "it is kept over a restart"
        await client.order(wanted="run")
        await until(lambda: worker.activity.in_hand)
        begun = list(worker.activity.in_hand)
        await client.order(wanted="finish")
        await until(lambda: worker.activity.state is WorkerState.DRAINING)
        now = (await client.node())["doing"]
        assert (now["headline"], now["is_finishing"]) == ("Finishing", True)
        engine.release_all()
        assert await working is Ending.STOPPED
        assert not set(begun) & set(world.coordinator.returned[2:])


async def test_limits_of_the_page_are_those_of_the_command_and_hold_at_once(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    obeyed: list[WorkLimits] = []
    async with shown_worker(world, limits={"threads": 3}) as (worker, client):
        worker.limit_links = obeyed.append
        working = asyncio.create_task(run_worker(worker, world.stop))
        await client.begin()
        await until(lambda: worker.activity.limits)
        shown = await client.node()
        assert shown["limits"]["threads"] == 3, "those of the settings"
        begin = world.clock.now_ms() // 3_600_000 % 24 + 2
        hours = f"{begin % 24:02d}:00-{(begin + 1) % 24:02d}:00"
        changed = shown["limits"] | {"hours": hours, "upload_mbit_per_s": 2.0, "threads": None}
        assert (await client.order(limits=changed)).status == 200
        await until(lambda: len(obeyed) > 1 and obeyed[-1].upload_mbit_per_s == 2.0)
        assert read_control(tmp_path).limits == WorkLimits(hours=hours, upload_mbit_per_s=2.0)
        assert (await client.node())["limits"] == read_control(tmp_path).limits.model_dump(mode="json")  # type: ignore[union-attr]
        assert (await client.order(wanted="pause")).status == 200
        assert read_control(tmp_path).limits == WorkLimits(hours=hours, upload_mbit_per_s=2.0)
        world.stop.set()
        await working


async def test_texts_of_strangers_are_bounded_and_plain(tmp_path: Path) -> None:
    run = make_run(title=HOSTILE[0] * 15, description=HOSTILE[3])
    async with shown_worker(WorkerWorld(tmp_path, pinned=run), name=HOSTILE[0]) as (worker, client):
        await client.begin()
        worker.session.notice = f"{HOSTILE[1]}\x1b[2J\n" + "a" * 9_000
        shown = await client.node()
        assert shown["worker"]["name"] == HOSTILE[0]
        assert len(shown["doing"]["notice"]) <= 400
        assert not re.search(r"[\x00-\x1f]", json.dumps(shown, ensure_ascii=False))


async def test_the_first_load_is_small_and_asks_no_other_machine(tmp_path: Path) -> None:
    async with shown_worker(WorkerWorld(tmp_path)) as (_, client):
        index = await client.call("GET", "/", Accept_Encoding="gzip")
        found = await client.call("GET", "/")
        named = set(re.findall(rb'(?:href|src)="([^"]+)"', found.body))
        assert all(path.startswith(b"/page/") for path in named)
        sizes = [len(index.body)]
        for path in named:
            answer = await client.call("GET", path.decode(), Accept_Encoding="gzip")
            assert answer.status == 200
            sizes.append(len(answer.body))
        assert sum(sizes) < BUNDLED_BYTES_MAX
        assert (await client.call("GET", "/page/x-node.js")).status == 404


def minutes(work: RecentWork, name: str) -> list[int]:
    return work.minutes.columns()[name]


def test_minutes_are_kept_over_restarts_and_bounded(tmp_path: Path) -> None:
    work = RecentWork(tmp_path)
    work.note(STATUS)
    work.note(replace(STATUS, tokens_generated=500, rollouts_accepted=108, at_ms=STATUS.at_ms + 5_000))
    later = replace(
        STATUS,
        tokens_generated=600,
        rollouts_accepted=108,
        refused={"stale": 4},
        up_bytes=7,
        at_ms=STATUS.at_ms + 3 * MINUTE_MS,
    )
    work.note(later)
    assert minutes(work, "minute") == [60, 63]
    assert (minutes(work, "tokens"), minutes(work, "accepted")) == ([500, 100], [8, 0])
    assert (minutes(work, "rejected"), minutes(work, "up_bytes")) == ([0, 4], [0, 7])
    work.write()
    again = RecentWork(tmp_path)
    assert again.minutes == work.minutes
    again.note(replace(STATUS, tokens_generated=50, at_ms=later.at_ms + 1_000))
    assert minutes(again, "tokens") == [500, 100], "the first look of a start is the base of the next"
    again.note(replace(STATUS, tokens_generated=70, at_ms=later.at_ms + 2_000))
    assert minutes(again, "tokens") == [500, 120]
    assert again.since(63) == {name: column[1:] for name, column in again.minutes.columns().items()}
    assert again.since(64)["minute"] == []
    again.note(replace(STATUS, tokens_generated=71, at_ms=later.at_ms - 9 * MINUTE_MS))
    assert minutes(again, "minute") == [60, 63], "a clock that was set back begins no minute"
    for number in range(MINUTES_MAX + 5):
        again.note(replace(STATUS, at_ms=(100 + number) * MINUTE_MS))
    assert len(minutes(again, "minute")) == MINUTES_MAX
    assert all(len(column) == MINUTES_MAX for column in again.minutes.columns().values())
    assert minutes(again, "minute")[-1] == 100 + MINUTES_MAX + 4


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff", b'{"minute": [1]}', b'{"minute": [2, 1], "tokens": [1, 1]}', b" " * 2**21,
        json.dumps({name: [2, 1] for name in RecentMinutes.model_fields}).encode(),
    ],
)  # fmt: skip
def test_damaged_minutes_are_dropped(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert minutes(RecentWork(tmp_path), "minute") == []


def test_each_reason_of_a_rejection_has_words() -> None:
    assert REASONS.keys() == set(RejectReason)
    assert reason_in_words("stale").startswith("too late")
    assert reason_in_words("of_a_later_release") == "of a later release"


@pytest.mark.parametrize(
    ("changes", "headline", "part"),
    [
        ({}, "Generating", "step 41 with policy 40"),
        ({"paused": "until 22:00, as its hours are 22:00-07:00"}, "Paused", "nothing until 22:00, as its hours"),
        ({"coordinator_away_s": 35.4, "paused": "on request"}, "No answer", "for 35 s"),
        ({"state": WorkerState.DRAINING}, "Finishing", "leaves the run"),
        ({"waiting_for": "the engine is being loaded"}, "Waiting", "the engine is being loaded"),
        ({"state": WorkerState.FETCHING}, "Fetching", "policy 41"),
        ({"state": WorkerState.FETCHING, "head": -1}, "Fetching", "first policy"),
        ({"state": WorkerState.IDLE}, "Ready", "next work"),
        ({"ended": "stopped"}, "Ended", "stopped"),
    ],
)
def test_what_a_worker_does_is_a_sentence(changes: dict[str, Any], headline: str, part: str) -> None:
    word, sentence = doing(replace(STATUS, **changes))
    assert word == headline
    assert part in sentence
    assert sentence[0].isupper()
    assert sentence.endswith(".")


async def test_a_rate_may_change_while_some_wait() -> None:
    clock = VirtualClock()
    rate, began_s = RateLimit(0.0, clock), clock.seconds
    await rate.take(10**9)
    assert clock.seconds == began_s
    rate.change(1_000.0)
    for _ in range(20):
        await rate.take(1_000)
    assert clock.seconds - began_s >= 18.0
    rate.change(0.0)
    await rate.take(10**9)


class Threads(TableEngine):
    """An engine whose threads can change."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def set_threads(self, threads: int) -> None:
        self.threads.append(threads)


async def test_threads_change_while_the_engine_is_loaded(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Threads()
    assert isinstance(engine, ThreadedEngine)
    assert not isinstance(TableEngine(), ThreadedEngine)
    working = asyncio.create_task(run_worker(world.worker(engine, threads=2), world.stop))
    await until(lambda: engine.threads)
    write_control(tmp_path, Control(limits=WorkLimits(threads=4)))
    await until(lambda: engine.threads[-1] == 4)
    write_control(tmp_path, Control(limits=WorkLimits()))
    await until(lambda: engine.threads[-1] == 2)
    world.stop.set()
    await working


def test_limits_on_the_engine_hold_from_its_start(tmp_path: Path) -> None:
    settings = WorkerConfig(threads=2, gpu_memory_share=0.7, limits=WorkLimits(gpu_memory_share=0.5))
    assert limited_settings(settings, tmp_path).gpu_memory_share == 0.5
    write_control(tmp_path, Control(limits=WorkLimits(threads=3)))
    found = limited_settings(settings, tmp_path)
    assert (found.threads, found.gpu_memory_share) == (3, 0.7)
    (tmp_path / "control.json").write_text("{")
    assert limited_settings(settings, tmp_path) == settings


async def test_open_prints_an_address_that_opens_the_page_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    with pytest.raises(LocalError, match="no worker has run"):
        command.open_worker(tmp_path)
    async with shown_worker(WorkerWorld(tmp_path)) as (_, client):
        (tmp_path / "status.json").write_text("{}")
        command.open_worker(tmp_path)
        first = capsys.readouterr().out.strip()
        found = client.address()
        assert first == f"{found['address']}#{found['key']}"
        await client.begin()
        command.open_worker(tmp_path, print_only=True)
        assert capsys.readouterr().out.strip().partition("#")[0] == found["address"]
        assert client.address()["key"] != found["key"]
        (tmp_path / PAGE_FILE).write_text("{")
        with pytest.raises(LocalError, match=PAGE_FILE):
            command.open_worker(tmp_path)
        (tmp_path / PAGE_FILE).unlink()
        with pytest.raises(LocalError, match="serves no page"):
            command.open_worker(tmp_path)
    with pytest.raises(LocalError, match="no page to open"):
        command.open_worker(tmp_path)


async def test_open_uses_a_browser_with_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_addresses(monkeypatch)
    async with shown_worker(WorkerWorld(tmp_path)) as (_, client):
        (tmp_path / "status.json").write_text("{}")
        command.open_worker(tmp_path)
        assert opened == [f"{client.address()['address']}#{client.address()['key']}"]


async def test_bandwidth_follows_the_limits_at_once_and_the_settings_without_them(tmp_path: Path) -> None:
    async with swarm(tmp_path, ANNA) as world:
        follower, peer = world.workers[0]
        settings = WorkerConfig(swarm=LOCAL.model_copy(update={"upload_mbit_per_s": 8.0}))
        uplink = peer.service.uplink

        def rates(limits: WorkLimits) -> tuple[float, float]:
            limit_links(settings, follower, peer, limits)
            return uplink.rate.bytes_per_s, follower.rate.bytes_per_s

        assert rates(WorkLimits(upload_mbit_per_s=2.0, download_mbit_per_s=4.0)) == (250_000.0, 500_000.0)
        assert rates(WorkLimits(upload_mbit_per_s=0.0)) == (0.0, 0.0)
        assert rates(WorkLimits()) == (1_000_000.0, 0.0)
        await world.publish()
        await follower.wait_newer(-1)
        found = links_of(follower, peer)
        assert found.down_bytes > found.peer_bytes == 0, "all came from the trainer or the coordinator"
        assert (found.done_bytes, found.all_bytes) == (0, 0), "no download is in progress"
        assert (found.peers, found.text) == (peer.num_linked, peer.describe())
        assert links_of(follower, None).down_bytes == found.down_bytes
