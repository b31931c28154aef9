"""The coordinator's page over loopback: its files, the history and its bounds, live changes, and a restart."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    ROOT,
    TRAINER,
    World,
    folder_parts,
    make_run,
    memory_parts,
    running,
)

from prime_node.adapters.system_clock import SystemClock
from prime_node.coordinator.api.page import PACKAGE
from prime_node.coordinator.assembly import open_coordinator
from prime_node.coordinator.measure.history import STEPS_MAX, RunHistory
from prime_node.coordinator.page.live_feed import TICK_S, VIEWERS_EACH_MAX
from prime_node.coordinator.page.roster import Roster
from prime_node.coordinator.state import events as ev
from prime_node.pages.assets import page_files
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import open_envelope
from prime_protocol.requests import AdminRequest, BatchRequest
from prime_protocol.telemetry import DownloadReport, HeldOutFigures, Interval


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A daemon with policy 0 and one worker."""
    async with running(memory_parts(make_run(title="Sums", description="Learns to add.")), ANNA) as world:
        yield world


async def read_json(world: World, path: str) -> dict[str, Any]:
    status, body, _ = await world.get(path)
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


async def next_change(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the data of the next event with any."""
    while True:
        line = await asyncio.wait_for(answer.content.readline(), 10)
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            return found


async def test_a_join_link_opens_a_page_that_runs_only_its_own_files(world: World) -> None:
    status, body, headers = await world.get("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert not re.search(rb"https?://|<script>|<style|\son\w+=|style=", body)
    named = re.findall(rb'(?:href|src)="(/page/[^"]+)"', body)
    assert len(named) >= 3
    for path in named:
        status, _, headers = await world.get(path.decode())
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
        assert "immutable" in headers["Cache-Control"]


@pytest.mark.parametrize(
    "name", ["app.js", "0123456789ab-app.js", "{digest}-index.html", "{digest}-..%2Fassets.py", "{digest}-"]
)
async def test_only_the_files_of_this_version_are_served(world: World, name: str) -> None:
    status, _, _ = await world.get("/page/" + name.replace("{digest}", page_files(PACKAGE).digest))
    assert status == 404


async def test_the_history_shows_what_is_trained_and_whether_it_learns(world: World) -> None:
    await world.fill(0)
    await world.publish()
    held_out = HeldOutFigures(policy_version=1, greedy=Interval(mean=0.5, low=0.4, high=0.6))
    for _ in range(2):  # the trainer repeats its newest figures
        await world.client(TRAINER).batch(BatchRequest(step=1, durable_step=0, held_out=held_out))
    found = await read_json(world, "/v1/history")
    (evaluation,) = found["evaluations"]
    figures = tuple(evaluation[name] for name in ("policy", "by", "greedy", "greedy_low", "greedy_high"))
    assert figures == (1, "trainer", 0.5, 0.4, 0.6)
    assert (found["run"]["title"], found["run"]["description"]) == ("Sums", "Learns to add.")
    assert (found["steps"]["step"], found["steps"]["reward"]) == ([0], [0.5])
    assert found["now"]["head"] == 1
    assert found["contributors"] == [[ANNA.key_id, f"node {ANNA.key_id[-4:]}", 8, 1]]
    roster = await read_json(world, "/v1/roster")
    assert [roster["named"][name] for name in ("key", "accepted", "tokens")] == [[ANNA.key_id], [8], [8]]


async def test_the_roster_is_sent_once_as_a_whole_and_then_by_its_changes(world: World) -> None:
    coordinator = await open_coordinator(memory_parts(make_run()))
    roster = Roster(coordinator.feed.page)

    def join(key: str, name: str) -> None:
        coordinator.decisions.decide(ev.WorkerJoined(key, name, "1", "toy", 64))

    def changes(version: int) -> dict[str, Any]:
        roster.look()
        return roster.since(version)

    join("a", "Anna")
    join("b", "Ben")
    whole = changes(0)["named"]
    assert [whole[name] for name in ("key", "name", "policy")] == [["a", "b"], ["Anna", "Ben"], [-1, -1]]
    first = roster.version
    coordinator.presence.reported("b", HEARTBEAT, 0.0)
    join("c", "Carl")
    change = changes(first)
    assert (change["moved"]["number"], change["moved"]["policy"]) == ([1], [0])
    assert (change["named"]["number"], change["named"]["name"], change["gone"]) == ([2], ["Carl"], [])
    coordinator.decisions.decide(ev.WorkersLost(("a",)))
    join("b", "Benno")
    change = changes(roster.version)
    assert (change["named"]["name"], change["gone"]) == (["Benno"], [0])
    for unknown in (0, 5):
        found = changes(unknown)
        assert (found["since"], found["named"]["key"], found["gone"]) == (
            0,
            ["b", "c"],
            [],
        )


async def test_the_roster_over_http_repeats_nothing_that_a_viewer_has(world: World) -> None:
    whole = await read_json(world, "/v1/roster")
    change = await read_json(world, f"/v1/roster?since={whole['version']}")
    assert (change["since"], change["moved"]["number"], change["named"]["number"]) == (whole["version"], [], [])


async def test_the_ledger_and_the_swarm_are_shown_as_far_as_the_coordinator_knows_them(world: World) -> None:
    await world.fill(0)
    await world.publish()
    now = (await read_json(world, "/v1/history"))["now"]
    lines = (await world.get("/v1/ledger/0"))[1].splitlines()
    assert now["ledger"] == {"entries": len(lines), "digest": digest_of(lines[-1])}
    assert now["swarm"] == {"announced": 0, "listed": 0, "guests": 0, "linked": 0}
    whole, *_ = now["routes"]
    assert whole == [None, now["bytes_published"] // 2]


async def test_downloads_are_shown_as_workers_report_them_and_a_lie_moves_the_means_by_one_workers_part(
    world: World,
) -> None:
    async def downloads(**reports: tuple[int, int, int, int, int]) -> dict[str, Any]:
        for name, (peers, operators, links, done, whole) in reports.items():
            claim = DownloadReport(
                peer_bytes=peers, operator_bytes=operators, links=links, done_bytes=done, all_bytes=whole
            )
            beat = HEARTBEAT.model_copy(update={"downloads": claim})
            await world.client({"anna": ANNA, "ben": BEN}[name]).heartbeat(beat)
        found: dict[str, Any] = (await read_json(world, "/v1/history"))["now"]["downloads"]
        return found

    await world.join(ANNA, BEN)
    nothing = {"workers": 0, "links": 0.0, "operator_share": 0.0, "fetching": 0, "shown": []}
    assert await downloads() == nothing
    found = await downloads(anna=(900, 100, 4, 0, 0), ben=(0, 0, 2, 30, 100))
    assert (found["workers"], found["links"], found["operator_share"]) == (1, 4.0, 0.1), "of Ben nothing has come yet"
    assert (found["fetching"], found["shown"]) == (1, [[f"node {BEN.key_id[-4:]}", 30, 100]])
    found = await downloads(ben=(0, limits.CLAIMED_BYTES_MAX, 2, 100, 100))
    assert (found["operator_share"], found["fetching"]) == (0.55, 0)


async def test_events_are_numbered_and_asked_for_from_a_number_on(world: World) -> None:
    await world.fill(0)
    first = await read_json(world, "/v1/events?since=0")
    numbers = [event["number"] for event in first["events"]]
    assert numbers == sorted(set(numbers))
    assert {"policy", "lease", "check", "batch"} <= {event["kind"] for event in first["events"]}
    later = await read_json(world, f"/v1/events?since={numbers[-2]}")
    assert [event["number"] for event in later["events"]] == numbers[-1:]
    for wrong in ("x", "-1", "1e9", "9" * 16, ""):
        assert (await world.get(f"/v1/events?since={wrong}"))[0] == 400


def test_frequent_events_do_not_displace_a_ban_from_what_a_viewer_gets() -> None:
    parts = memory_parts(make_run())
    history = RunHistory(parts.private, parts.clock)
    before = history.number
    history.record(kind="ban", end_ms=1, worker="a")
    for _ in range(50):
        history.record(kind="lease", end_ms=2, worker="b")
    kinds = [event["kind"] for event in history.events(before, 20)]
    assert kinds == ["ban", *["lease"] * 19]


async def test_a_ban_comes_with_its_dossier(world: World) -> None:
    await world.client(ROOT).admin(AdminRequest(action="ban", worker=ANNA.key_id, reason="<img src=x>"))
    (ban,) = (await read_json(world, "/v1/history"))["bans"]
    assert (ban["key"], ban["reason"]) == (ANNA.key_id, "<img src=x>")
    path = f"/v1/evidence/{ban['dossier']}"

    async def is_written() -> bool:
        return (await world.get(path))[0] == 200

    await world.until(is_written)
    _, body, headers = await world.get(path)
    assert next(open_envelope(line).digest for line in body.splitlines()) == world.run.envelope.digest
    assert "attachment" in headers["Content-Disposition"]


@pytest.mark.parametrize(
    "name", ["history.json", "ban-x.jsonl", "..%2Fstate.sqlite", "ban-a-1.jsonl", "equivocation-a-b.jsonl"]
)
async def test_no_other_private_document_can_be_read(world: World, name: str) -> None:
    assert (await world.get(f"/v1/evidence/{name}"))[0] == 404


async def test_viewers_get_the_changes_of_the_run_as_they_happen(world: World) -> None:
    version = (await read_json(world, "/v1/history"))["version"]
    async with world.session.get(f"{world.url}/v1/live?since={version}") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        await world.fill(0)
        await world.publish()
        steps: list[float] = []
        while not steps:
            steps = (await next_change(answer)).get("steps", {}).get("step", [])
        assert steps == [0]


async def test_a_viewer_of_an_unknown_version_gets_a_reset(world: World) -> None:
    async with world.session.get(f"{world.url}/v1/live?since=5") as answer:
        assert [await answer.content.readline() for _ in range(3)] == [b"retry: 3000\n", b"\n", b"event: reset\n"]


async def test_one_network_cannot_take_all_places_of_viewers(world: World) -> None:
    answers = [await world.session.get(f"{world.url}/v1/live") for _ in range(VIEWERS_EACH_MAX)]
    status, body, _ = await world.get("/v1/live")
    assert (status, json.loads(body)["code"]) == (503, "unavailable")
    for answer in answers:
        answer.close()


class WithoutNews(SystemClock):
    """A clock by which the page's next tick never comes."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(3_600.0 if seconds == TICK_S else seconds)


async def test_a_viewer_that_leaves_frees_its_place_before_there_is_news() -> None:
    async with running(replace(memory_parts(make_run()), clock=WithoutNews())) as world:
        for answer in [await world.session.get(f"{world.url}/v1/live") for _ in range(VIEWERS_EACH_MAX)]:
            answer.close()

        async def has_room() -> bool:
            async with world.session.get(f"{world.url}/v1/live") as one:
                return one.status == 200

        await world.until(has_room)


async def test_streams_do_not_delay_the_end_of_the_coordinator() -> None:
    async with running(memory_parts(make_run(), grace_seconds=60.0)) as world:
        answer = await world.session.get(f"{world.url}/v1/live")
        assert await answer.content.readline() == b"retry: 3000\n"
    async with asyncio.timeout(10):
        await answer.read()


async def test_the_history_survives_a_restart(tmp_path: Path) -> None:
    run = make_run()
    async with running(await folder_parts(run, tmp_path), ANNA) as world:
        await world.fill(0)
        await world.publish()
        before = await read_json(world, "/v1/history")
    async with running(await folder_parts(run, tmp_path)) as world:
        after = await read_json(world, "/v1/history")
    assert before["steps"]["step"] == [0]
    assert {**after, "now": 0, "version": 0, "server_time": 0} == {**before, "now": 0, "version": 0, "server_time": 0}
    assert after["now"]["tokens"] == 8
    assert after["version"] > before["version"]


EMPTY: dict[str, object] = {"steps": [], "evaluations": [], "events": [], "tokens": {}}
CHANGES: list[dict[str, object]] = [
    {"steps": 1},
    {"steps": [5]},
    {"steps": [{"at": 1}]},
    {"steps": [{"step": math.inf}]},
    {"steps": [{"step": 1, "reward": "x"}]},
    {"evaluations": [{}]},
    {"events": [{"kind": "ban"}]},
    {"events": [{"kind": "ban", "number": "a"}]},
    {"tokens": {"key": math.inf}},
]
BROKEN = [
    b"{",
    b"[]",
    b"[" * 100_000,
    *(json.dumps(EMPTY | changes).encode() for changes in CHANGES),
]


async def test_a_broken_history_begins_again(tmp_path: Path) -> None:
    """Before, a document of another form kept the coordinator from starting, or its status from answering."""
    parts = await folder_parts(make_run(), tmp_path)
    for broken in BROKEN:
        await parts.private.write("history.json", broken)
        history = RunHistory(parts.private, parts.clock)
        await history.restore()
        assert (history.last_step, len(history.evaluations), history.events(0)) == (-1, 0, []), broken[:80]
    await parts.store.close()


def test_a_long_history_keeps_its_newest_steps_and_thins_out_the_old_ones() -> None:
    parts = memory_parts(make_run())
    history = RunHistory(parts.private, parts.clock)
    for step in range(3 * STEPS_MAX):
        history.record(step=step, reward_mean=step / 10, eval=1)
    steps = [int(step or 0) for step in history.columns()["step"]]
    assert len(steps) <= STEPS_MAX
    assert steps[-400:] == list(range(3 * STEPS_MAX - 400, 3 * STEPS_MAX))
    assert steps[0] == 0
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 64
    assert history.columns(3 * STEPS_MAX - 3)["reward"] == [pytest.approx((3 * STEPS_MAX - n) / 10) for n in (2, 1)]


def test_an_evaluation_is_kept_once_with_its_interval() -> None:
    parts = memory_parts(make_run())
    history = RunHistory(parts.private, parts.clock)
    figures = {"eval_sampled": 0.5, "eval_sampled_low": 0.4, "eval_sampled_high": 0.6, "eval_sampled/words": 0.3}
    for _ in range(2):
        history.record(policy_version=4, **figures, eval_problems=64, eval_by="workers")
    (one,) = history.evaluations
    assert (one["policy"], one["by"], one["sampled"], one["sampled_low"]) == (4, "workers", 0.5, 0.4)
    assert [event["kind"] for event in history.events(0)] == ["evaluation"]
