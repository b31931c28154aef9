"""`prime-node coordinator replay`: the archived journal folds to state, ledger and batches, or the first row is named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cases_world import check_each
from tests.node.archive_world import RECORDED, offer, replayable, unpacked
from tests.node.coordinator_world import ANNA, COORDINATOR, World, folder_parts, make_run, running
from tests.node.operator_world import write_key
from typer.testing import CliRunner

from prime_lab.postgres_server import PostgresServer
from prime_node.adapters.storage.row_digests import row_digest
from prime_node.cli.main import app
from prime_node.cli.run_dir import STATE, RunDir
from prime_node.coordinator.journal_segments import decode_segment, encode_segment
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import CHOICE_RULES, Ready, choose_ready, is_overdue, stale
from prime_node.ports.documents import batch_name
from prime_node.ports.store import LoggedEvent, Segment
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import LocalError
from prime_protocol.ledger import LedgerChain, LedgerEntry
from prime_protocol.replies import TrainBatch
from prime_protocol.schedule import Selection

RUN = replayable()


async def work(world: World, steps: range) -> None:
    for step in steps:
        await world.fill(step)
        await offer(world)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Folder of a stopped run that was started twice."""
    place = RunDir(tmp_path_factory.mktemp("replayed") / "run")
    asyncio.run(run_twice(place))
    write_key(place.key("coordinator"), COORDINATOR)
    place.run_spec.write_bytes(RUN.envelope.to_bytes())
    return place


async def run_twice(place: RunDir) -> None:
    async with running(await folder_parts(RUN, place.coordinator, snapshot_events=7)) as world:
        await offer(world)
        await world.join(ANNA)
        await work(world, range(2))
        head, batch = world.head, world.batch
    async with running(await folder_parts(RUN, place.coordinator, snapshot_events=9)) as world:
        world.head, world.batch = head, batch
        await world.join(ANNA)
        await work(world, range(2, 4))
        await world.get("/v1/ledger")


@pytest.fixture
def place(made: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(made.path, tmp_path / "run"))


def folded(place: RunDir) -> dict[str, Any]:
    """Return what the command prints, with its exit code."""
    shown = CliRunner().invoke(app, ["coordinator", "replay", str(place.path), "--json"])
    assert shown.exit_code in (0, 1, 14), shown.exception
    found: dict[str, Any] = json.loads(shown.stdout)
    assert found["ok"] is (shown.exit_code == 0)
    return found


def database(place: RunDir) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(place.coordinator / STATE, isolation_level=None))


def segments_of(place: RunDir) -> list[Segment]:
    with database(place) as disk:
        rows = disk.execute("SELECT first, number, chapter, at_ms, payload FROM journal ORDER BY number").fetchall()
    return [Segment(*row) for row in rows]


def write_segment(place: RunDir, segment: Segment) -> None:
    """Replace a segment as someone who can write to the database would."""
    values = (segment.last, segment.first, segment.chapter, segment.at_ms, len(segment.payload), segment.payload)
    with database(place) as disk:
        disk.execute("REPLACE INTO journal VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, row_digest(*values)))


def change_event(
    place: RunDir, number: int, change: Callable[[LoggedEvent], LoggedEvent], *, chained: bool = True
) -> None:
    """Change one archived event; `chained`: and all digests that segments name of each other."""
    previous = ""
    for segment in segments_of(place):
        one = decode_segment(segment)
        events = [change(logged) if logged.number == number else logged for logged in one.events]
        header = replace(one.header, previous=previous) if chained else one.header
        changed = replace(segment, payload=encode_segment(header, one.state, events))
        previous = digest_of(changed.payload.encode())
        if events != list(one.events) or chained:
            write_segment(place, changed)


def number_of(place: RunDir, kind: type, nth: int = 0) -> int:
    """Return the number of an archived event of a kind."""
    logged = [each for segment in segments_of(place) for each in decode_segment(segment).events]
    return [each.number for each in logged if isinstance(ev.event_from_json(each.payload), kind)][nth]


def edited(text: str, **fields: object) -> str:
    return json.dumps(json.loads(text) | fields, separators=(",", ":"))


def test_state_ledger_and_batches_follow_over_a_restart(place: RunDir) -> None:
    found = folded(place)
    assert (found["row"], found["first"], found["num_segments"]) == ("", 1, len(segments_of(place)))
    assert len({segment.chapter for segment in segments_of(place)}) > 1, "a chapter for each start"
    assert found["num_batches"] == found["num_published"] == 4
    with database(place) as disk:
        ((lines,),) = disk.execute("SELECT count(*) FROM ledger")
        ((number, payload),) = disk.execute("SELECT number, payload FROM snapshots")
    assert found["num_lines"] == found["ledger"]["num_lines"] == lines > 3
    assert (found["last"], found["state"]) == (number, digest_of(payload.encode()))
    text = CliRunner().invoke(app, ["coordinator", "replay", str(place.path)]).stdout
    assert f"ok   events 1 to {number} in {found['num_segments']} segments fold to state {found['state'][:16]}" in text


async def test_the_archive_moves_to_postgresql_with_the_run(place: RunDir, postgres: PostgresServer) -> None:
    before = await asyncio.to_thread(folded, place)
    url = postgres.make_database()
    moved = await asyncio.to_thread(CliRunner().invoke, app, ["coordinator", "move", str(place.path), url])
    assert moved.exit_code == 0, moved.exception
    assert await asyncio.to_thread(folded, place) == before
    async with running(await folder_parts(RUN, place.coordinator, store=url, snapshot_events=1)) as world:
        await world.join(COORDINATOR)
    after = await asyncio.to_thread(folded, place)
    assert after["ok"]
    assert after["num_segments"] > before["num_segments"]


def rot(place: RunDir) -> str:
    with database(place) as disk:
        disk.execute("UPDATE journal SET at_ms = at_ms + 1 WHERE number = (SELECT max(number) FROM journal)")
    return f"row {segments_of(place)[-1].last} of journal"


def changed_and_not_chained(place: RunDir) -> str:
    first = segments_of(place)[0]
    change_event(place, 2, lambda logged: logged._replace(at_ms=logged.at_ms + 1), chained=False)
    return f"segment of events {first.first} to {first.last}"


def changed_and_chained(place: RunDir) -> str:
    number = number_of(place, ev.WorkerJoined)
    change_event(place, number, lambda logged: logged._replace(payload=edited(logged.payload, software="2")))
    return next(
        f"segment of events {it.first} to {it.last}" for it in segments_of(place) if it.first <= number <= it.last
    )


def missing_segment(place: RunDir) -> str:
    lost = segments_of(place)[1]
    with database(place) as disk:
        disk.execute("DELETE FROM journal WHERE number = ?", (lost.last,))
    return f"segment of events {lost.first} to {lost.last}"


def missing_end(place: RunDir) -> str:
    lost = segments_of(place)[-1]
    with database(place) as disk:
        disk.execute("DELETE FROM journal WHERE number = ?", (lost.last,))
    return f"snapshot of event {lost.last}"


def unreadable(place: RunDir) -> str:
    segment = segments_of(place)[1]
    write_segment(place, replace(segment, payload=segment.payload[:-8]))
    return f"segment of events {segment.first} to {segment.last}"


def other_batch(place: RunDir) -> str:
    number = number_of(place, ev.BatchFixed, 1)
    change_event(place, number, lambda logged: logged._replace(payload=edited(logged.payload, step=0)))
    return f"event {number}"


def unknown_event(place: RunDir) -> str:
    change_event(place, 3, lambda logged: logged._replace(payload='{"type":"miracle"}'))
    return "event 3"


def impossible_event(place: RunDir) -> str:
    number = number_of(place, ev.ManifestPublished, 1)
    change_event(place, number, lambda logged: logged._replace(payload=edited(logged.payload, policy_version=7)))
    return f"event {number}"


def lines_of(place: RunDir) -> list[str]:
    with database(place) as disk:
        return [line for (line,) in disk.execute("SELECT line FROM ledger ORDER BY number")]


def write_lines(place: RunDir, lines: list[str]) -> None:
    with database(place) as disk:
        disk.execute("DELETE FROM ledger")
        rows = [(number, line, row_digest(number, line)) for number, line in enumerate(lines)]
        disk.executemany("INSERT INTO ledger VALUES (?, ?, ?)", rows)


def reordered_ledger(place: RunDir) -> str:
    lines = lines_of(place)
    write_lines(place, [lines[0], lines[2], lines[1], *lines[3:]])
    return "line 1 of the ledger"


def rewritten_ledger(place: RunDir) -> str:
    """Two receipts change places, and the chain is made again, with dates that ascend."""
    receipts = [parse_json(line.encode(), LedgerEntry).receipt for line in lines_of(place)]
    first, second = receipts[1:3]
    swap = {"at_ms": first.at_ms}, {"at_ms": second.at_ms}
    receipts[1:3] = [second.model_copy(update=swap[0]), first.model_copy(update=swap[1])]
    chain = LedgerChain(RUN.digest)
    write_lines(place, [chain.add(receipt.model_dump_json().encode()).decode() for receipt in receipts])
    return "line 1 of the ledger"


def shortened_ledger(place: RunDir) -> str:
    lines = lines_of(place)
    write_lines(place, lines[:-1])
    (place.coordinator / f"{STATE}-tail").unlink()
    return f"line {len(lines) - 1} of the ledger"


def other_published_batch(place: RunDir) -> str:
    file = place.public / batch_name(1, 0)
    batch = parse_json(open_envelope(file.read_bytes()).payload, TrainBatch)
    first = batch.groups[0].model_copy(update={"rewards": (0.5, 0.5)})
    changed = batch.model_copy(update={"groups": (first, *batch.groups[1:])})
    file.write_bytes(seal(changed, PayloadType.BATCH, COORDINATOR).to_bytes())
    return "batch 0 of step 1"


FAULTS = (
    rot, changed_and_not_chained, changed_and_chained, missing_segment, missing_end, unreadable, other_batch, unknown_event,
    impossible_event, reordered_ledger, rewritten_ledger, shortened_ledger, other_published_batch,
)  # fmt: skip


def test_the_first_row_that_does_not_follow_is_named(made: RunDir, tmp_path: Path) -> None:
    def check(fault: Callable[[RunDir], str]) -> None:
        place = RunDir(shutil.copytree(made.path, tmp_path / fault.__name__))
        named = fault(place)
        found = folded(place)
        assert (found["ok"], found["row"]) == (False, named), found["detail"]

    check_each([(fault.__name__, fault) for fault in FAULTS], check)


def chosen_by(rules: int, slots: tuple[int, ...] | None = None) -> Callable[[LoggedEvent], LoggedEvent]:
    """Return a change of a batch's event: another release chose it, perhaps other slots."""

    def change(logged: LoggedEvent) -> LoggedEvent:
        fields = {"rules": rules} | ({} if slots is None else {"slots": slots})
        return logged._replace(payload=edited(logged.payload, **fields))

    return change


def test_batches_by_the_rules_of_another_release_are_an_outcome_of_their_own(place: RunDir) -> None:
    """Before, a release that chooses otherwise accused the coordinator of an earlier one."""
    for nth in range(3):
        change_event(place, number_of(place, ev.BatchFixed, nth), chosen_by(CHOICE_RULES + 6))
    found = folded(place)
    assert (found["ok"], found["outcome"], found["row"]) == (False, "other rules", "")
    assert (found["other_rules"], found["num_batches"], found["num_published"]) == ({str(CHOICE_RULES + 6): 3}, 4, 4)
    shown = CliRunner().invoke(app, ["coordinator", "replay", str(place.path)])
    assert shown.exit_code == 14
    said = f"made by other rules (version {CHOICE_RULES + 6}); cannot be checked by this release"
    assert f"3 choices of batches were {said}" in shown.stdout


def test_an_event_that_only_another_release_knows_accuses_no_coordinator(place: RunDir) -> None:
    segment = segments_of(place)[-1]
    one = decode_segment(segment)
    events = [one.events[0]._replace(payload='{"type": "from_the_future"}'), *one.events[1:]]
    write_segment(
        place, replace(segment, payload=encode_segment(replace(one.header, software="99.0"), one.state, events))
    )
    shown = CliRunner().invoke(app, ["coordinator", "replay", str(place.path)])
    assert isinstance(shown.exception, LocalError)
    assert "release 99.0 wrote this part of the journal" in str(shown.exception)


CHOICES = {
    Selection.READY_FIRST: [(3, 8), (0, 3, 5, 8), None],
    Selection.WINDOW: [(0, 3), (0, 1, 3, 5), None],
    Selection.LOWEST_SLOT_FIRST: [(0, 1), (0, 1, 3, 5), None],
    Selection.LOWEST_VERSION_FIRST: [(0, 8), (0, 1, 5, 8), None],
    Selection.VERSION_FIFO: [(0, 8), None, None],
}


def test_a_change_of_what_is_chosen_raises_the_version_of_the_rules() -> None:
    """Archives name this version. If this test fails because other groups are chosen, raise CHOICE_RULES and its number here."""
    assert CHOICE_RULES == 1
    ready = [Ready(8, 2, 0), Ready(3, 4, 1), Ready(0, 2, 2), Ready(5, 3, 3), Ready(1, 3, 4), Ready(9, 5, 5)]
    found = {
        selection: [
            choose_ready(ready, count, selection=selection, slots_end=6, begun_versions=[2]) for count in (2, 4, 7)
        ]
        for selection in CHOICES
    }
    assert found == CHOICES
    assert stale(ready, step=5, lag_max=2) == (0, 8)
    assert [is_overdue([3], step=step, lag_max=2) for step in (4, 5)] == [False, True]


def test_the_archive_of_earlier_code_follows(tmp_path: Path) -> None:
    """Its events say nothing of their rules: they are the first ones. A release that raises CHOICE_RULES adds a recording."""
    unpacked(RECORDED / "run-09d08924.tar.xz", tmp_path)
    place = RunDir(tmp_path)
    write_key(place.key("coordinator"), COORDINATOR)
    shutil.copy(place.public / "run.json", place.run_spec)
    found = folded(place)
    assert (found["outcome"], found["num_batches"] > 0, found["num_segments"] > 0) == ("follows", True, True), found


async def test_the_oldest_chapters_are_deleted_by_size_and_the_rest_still_folds(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    kept = 12_000
    settings = {"snapshot_events": 2, "journal_gib_max": kept / 2**30}
    async with running(await folder_parts(make_run(), place.coordinator, **settings), ANNA) as world:
        for step in range(6):
            await world.fill(step)
            await world.publish()
    write_key(place.key("coordinator"), COORDINATOR)
    place.run_spec.write_bytes(make_run().envelope.to_bytes())
    segments = segments_of(place)
    assert segments[0].first == segments[0].chapter > 1
    newest = sum(len(each.payload) for each in segments if each.chapter == segments[-1].chapter)
    assert sum(len(each.payload) for each in segments) <= max(kept, newest)
    found = await asyncio.to_thread(folded, place)
    assert (found["ok"], found["first"]) == (True, segments[0].first)
    text = (await asyncio.to_thread(CliRunner().invoke, app, ["coordinator", "replay", str(place.path)])).stdout
    assert f"note the archive begins at event {segments[0].first}" in text


async def test_a_run_that_keeps_no_archive_says_so(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    async with running(await folder_parts(RUN, place.coordinator, snapshot_events=1, journal_days=0.0)) as world:
        await offer(world)
    write_key(place.key("coordinator"), COORDINATOR)
    place.run_spec.write_bytes(RUN.envelope.to_bytes())
    assert segments_of(place) == []
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["coordinator", "replay", str(place.path)])
    assert isinstance(shown.exception, LocalError)
    assert re.search(r"up to event \d+ is not archived: coordinator\.journal_days", str(shown.exception))
