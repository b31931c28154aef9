"""The ledger of a running coordinator: its content, its durability, and the evidence against a coordinator that rewrites it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.ledger_world import Shown, command, payloads, receipts_of, rewritten
from tests.node.operator_world import write_key

from prime_node.adapters.prometheus_metrics import PrometheusMetrics
from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.broadcast.audit.ledger_audit import Account, audit_ledger
from prime_node.broadcast.audit.ledger_file import export_ledger, open_ledger_file
from prime_node.cli.ledger import open_ledger
from prime_node.cli.new import new
from prime_node.cli.run_dir import RunDir
from prime_node.cli.shipped import config_path
from prime_node.folder_lock import FolderLock
from prime_node.ports.store import StoredReceipt
from prime_protocol.assigned import Assigned
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.ledger import LedgerHead
from prime_protocol.limits import ENVELOPE_BYTES_MAX, LEASE_ROLLOUTS_MAX, LEDGER_PAGE_BYTES_MAX
from prime_protocol.requests import ReceiptsRequest
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason


async def work(world: World) -> None:
    """Anna's bundle is accepted, Ben's refused, and another of Anna's waits."""
    await world.join(ANNA, BEN)
    await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
    await world.judge()
    await world.client(BEN).upload(make_parcel(await world.lease(BEN, rollouts_max=2), BEN))
    await world.judge(reason=RejectReason.SEED_MISMATCH)
    await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))


async def test_what_is_settled_is_in_it_and_what_waits_is_not() -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await work(world)
        report = await audit_ledger(world.client(ANNA), world.run, receipts=await receipts_of(world))
    assert (report.faults, report.num_entries, report.num_receipts) == ([], 2, 1)
    assert report.accounts[ANNA.key_id] == Account(rollouts=2, tokens=2)
    assert report.accounts[BEN.key_id].refused == {"seed_mismatch": 2}


async def test_it_continues_after_a_restart_and_an_export_verifies_offline(tmp_path: Path) -> None:
    run, old, new = make_run(), tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    async with running(await folder_parts(run, tmp_path, snapshot_events=3)) as world:
        await world.publish()
        await work(world)
        assert await export_ledger(world.client(ANNA), run, old) == 2
        head = world.head
    async with running(await folder_parts(run, tmp_path, snapshot_events=3)) as world:
        world.head = head
        await world.judge()
        assert await export_ledger(world.client(ANNA), run, new) == 3
        mine = await receipts_of(world)
    (tmp_path / "receipts.jsonl").write_bytes(b"\n".join([*(one.to_bytes() for one in mine), b"half a li"]))
    arguments = ["verify", str(new), "--receipts", str(tmp_path), "--known", str(old), "--run", run.digest]
    result = await asyncio.to_thread(command, *arguments, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"], report["pinned"], report["num_receipts"]) == (0, True, True, 2)
    assert report["workers"][ANNA.key_id] == {"rollouts": 4, "tokens": 4, "refused": {}}
    shown = await asyncio.to_thread(command, *arguments)
    assert "all 2 settled receipts are in it" in shown.stdout
    columns = [line.split() for line in shown.stdout.splitlines()]
    assert ["worker", "rollouts", "tokens", "rejected"] in columns, "whole in a terminal of 80 columns"
    assert [ANNA.key_id[-8:], "4", "4"] in columns


async def test_two_heads_that_disagree_are_kept_as_evidence(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await work(world)
        client = world.client(ANNA)
        signed, lines = await client.ledger_head(), await client.ledger(0)
    other, kept = rewritten(world.run, payloads(lines)[::-1]), [Shown(lines, signed)]
    report = await audit_ledger(other, world.run, kept=kept)
    assert report.faults == ["an earlier signed head names another entry 1 than the ledger has"]
    assert report.evidence == [other.head, signed]
    shorter = rewritten(world.run, payloads(lines)[:1])
    report = await audit_ledger(shorter, world.run, kept=kept)
    assert report.faults == ["an earlier head counts 2 entries, this one 1"]
    assert report.evidence == [shorter.head, signed]


async def test_a_settled_receipt_that_is_left_out_convicts_the_coordinator() -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await work(world)
        lines, mine = await world.client(ANNA).ledger(0), await receipts_of(world)
    without = rewritten(world.run, payloads(lines)[1:])
    report = await audit_ledger(without, world.run, receipts=mine)
    assert len(report.faults) == 1
    assert "a signed receipt is missing" in report.faults[0]
    assert [one.payload_type for one in report.evidence] == [PayloadType.LEDGER_HEAD, PayloadType.RECEIPT]
    earlier = rewritten(world.run, [], at_ms=0)  # a head from before all of them proves nothing
    assert (await audit_ledger(earlier, world.run, receipts=mine)).faults == []


async def test_a_ledger_that_is_shorter_than_its_head_or_changed_under_way_does_not_hold() -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await work(world)
        signed, lines = await world.client(ANNA).ledger_head(), await world.client(ANNA).ledger(0)
    assert (await audit_ledger(Shown(lines[:1], signed), world.run)).faults == [
        "the signed head counts 2 entries, but the ledger has only 1"
    ]
    changed = [lines[0], lines[1].replace(b'"num_tokens":0', b'"num_tokens":9')]
    assert (await audit_ledger(Shown(changed, signed), world.run)).faults == [
        "the signed head names another entry 1 than the ledger has"
    ]
    (fault,) = (await audit_ledger(Shown([lines[0], lines[0]], signed), world.run)).faults
    assert fault.startswith("chain_broken")


async def test_an_export_of_another_run_and_another_file_are_distinguished(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await export_ledger(world.client(ANNA), world.run, tmp_path / "empty.jsonl")
    with open_ledger_file(tmp_path / "empty.jsonl", pinned=world.run.digest) as file:
        assert (await audit_ledger(file, file.run)).num_entries == 0
    with pytest.raises(RemoteError) as caught, open_ledger_file(tmp_path / "empty.jsonl", pinned="00" * 32):
        pass
    assert caught.value.code is ErrorCode.WRONG_RUN
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night.")
    with pytest.raises(RemoteError), open_ledger_file(tmp_path / "novel.txt", pinned=None):
        pass
    with pytest.raises(LocalError), open_ledger_file(tmp_path / "nothing", pinned=None):
        pass


async def test_it_is_read_from_a_url_while_the_coordinator_runs_and_from_its_folder_afterwards(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    async with running(await folder_parts(make_run(), place.coordinator)) as world:
        await world.publish()
        await work(world)
        by_url = await asyncio.to_thread(command, "verify", f"{world.url}/#{world.run.digest}", "--json")
        other = await asyncio.to_thread(
            command, "export", f"{world.url}/#{world.run.digest}", "--out", str(tmp_path / "x")
        )
    assert (by_url.exit_code, json.loads(by_url.stdout)["num_entries"]) == (0, 2)
    assert other.exit_code == 0
    write_key(place.key("coordinator"), COORDINATOR)
    place.run_spec.write_bytes(world.run.envelope.to_bytes())
    by_folder = await asyncio.to_thread(command, "verify", str(place.path), "--known", str(tmp_path / "x"), "--json")
    report = json.loads(by_folder.stdout)
    assert (by_folder.exit_code, report["ok"], report["pinned"], report["num_entries"]) == (0, True, False, 2)


async def test_the_folder_of_a_running_coordinator_is_read_through_it(tmp_path: Path) -> None:
    """A head that the command signs itself lacks what was settled meanwhile: evidence against the key."""
    place = RunDir(tmp_path / "run")
    async with running(await folder_parts(make_run(), place.coordinator)) as world:
        await world.publish()
        await work(world)
        write_key(place.key("coordinator"), COORDINATOR)
        place.run_spec.write_bytes(world.run.envelope.to_bytes())
        place.join_link_file.write_text(f"{world.url}/#{world.run.digest}", encoding="utf-8")
        lock = FolderLock(place.coordinator)
        result = await asyncio.to_thread(command, "export", str(place.path), "--out", str(tmp_path / "x"))
        lock.release()
    assert result.exit_code == 0
    with open_ledger_file(tmp_path / "x", pinned=world.run.digest) as file:
        assert (await audit_ledger(file, file.run)).num_entries == 2


async def test_a_coordinator_starts_while_the_ledger_of_its_folder_is_read(tmp_path: Path) -> None:
    """A supervisor may restart it at any time, and a long ledger takes minutes."""
    place = RunDir(tmp_path / "run")
    async with running(await folder_parts(make_run(), place.coordinator)) as world:
        head = await world.publish()
        await work(world)
        write_key(place.key("coordinator"), COORDINATOR)
        place.run_spec.write_bytes(world.run.envelope.to_bytes())
    async with open_ledger(str(place.path), None) as opened:
        lock = FolderLock(place.coordinator)
        parts = await folder_parts(make_run(), place.coordinator)
        await parts.store.close()
        store = await open_sqlite(place.coordinator / "state.sqlite", run=make_run().digest)
        async with running(replace(parts, store=store)) as world:
            world.head = head
            await work(world)
            report = await audit_ledger(opened.source, opened.run)
        lock.release()
    assert (report.faults, report.num_entries) == ([], 2)


async def test_an_export_by_another_key_than_the_first_leaves_no_wrong_secret_behind(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    new(place.path, config=config_path("demo.toml"))
    await (await open_sqlite(place.coordinator / "state.sqlite", run=place.load_run().digest)).close()
    place.key("coordinator").unlink()
    place.assignment_secret.unlink()
    write_key(place.key("coordinator"), ANNA)
    with pytest.raises(LocalError, match="the assignment secret is not the one"):
        await asyncio.to_thread(command, "export", str(place.path), "--out", str(tmp_path / "x"))
    assert not place.assignment_secret.exists()


async def test_what_convicts_the_coordinator_is_kept_in_a_folder(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await work(world)
        lines = await world.client(ANNA).ledger(0)
        await export_ledger(world.client(ANNA), world.run, tmp_path / "old.jsonl")
    await export_ledger(rewritten(world.run, payloads(lines)[::-1]), world.run, tmp_path / "new.jsonl")
    words = ["verify", str(tmp_path / "new.jsonl"), "--known", str(tmp_path / "old.jsonl")]
    result = await asyncio.to_thread(command, *words, "--evidence", str(tmp_path / "proof"))
    assert result.exit_code == 1
    assert "does NOT hold" in result.stdout
    assert len(list((tmp_path / "proof").iterdir())) == 2


class SetClock(SystemClock):
    """A clock that tests set."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


async def test_a_coordinator_whose_clock_is_set_back_contradicts_itself_by_nothing_that_it_signs() -> None:
    clock = SetClock()
    async with running(replace(memory_parts(make_run()), clock=clock), ANNA) as world:
        shown = []
        for clock.ahead_ms in (60_000, 0):
            await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
            await world.judge()
            shown.append(Shown(await world.client(ANNA).ledger(0), await world.client(ANNA).ledger_head()))
        receipts = await receipts_of(world)
    for one, other in (shown, shown[::-1]):  # a mirror may show the older one later
        assert (await audit_ledger(one, world.run, kept=[other], receipts=receipts)).faults == []
    times = [parse_json(one.head.payload, LedgerHead).at_ms for one in shown]
    assert times[0] <= times[1]


async def test_a_restart_by_a_clock_that_was_set_back_contradicts_no_head_that_was_shown_before() -> None:
    clock = SetClock()
    parts = replace(memory_parts(make_run()), clock=clock)
    async with running(parts, ANNA) as world:
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
        await world.judge()
        clock.ahead_ms = 60_000
        before = Shown(await world.client(ANNA).ledger(0), await world.client(ANNA).ledger_head())
        clock.ahead_ms = 0
    async with running(replace(parts, metrics=PrometheusMetrics(), web=AiohttpServer())) as again:
        again.head, world = world.head, again
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
        await world.judge()
        receipts = await receipts_of(world)
        after = Shown(await world.client(ANNA).ledger(0), await world.client(ANNA).ledger_head())
    assert len(before.lines) < len(after.lines)
    for one, other in ((before, after), (after, before)):
        assert (await audit_ledger(one, world.run, kept=[other], receipts=receipts)).faults == []


async def test_receipts_and_lines_that_are_too_many_for_one_answer_come_in_several() -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
        await world.judge()
        small = (await receipts_of(world))[-1]
        slots = tuple((2**40 + 2 * place, 1) for place in range(LEASE_ROLLOUTS_MAX))
        assigned = Assigned(slots=slots, seeds="0" * 64)
        large = parse_json(small.payload, Receipt).model_copy(update={"assigned": assigned})
        text = seal(large, PayloadType.RECEIPT, COORDINATOR).to_bytes().decode()
        many = [StoredReceipt(f"b{n}", f"l{n}", ANNA.key_id, 0, BundleStatus.ACCEPTED, text) for n in range(60)]
        lines = [large.model_dump_json()] * 60
        assert sum(len(receipt.envelope) for receipt in many) > ENVELOPE_BYTES_MAX
        assert sum(map(len, lines)) > LEDGER_PAGE_BYTES_MAX
        await world.parts.store.append([], many, lines)
        num_listed, after = 0, 0
        while (listed := await world.client(ANNA).receipts(ReceiptsRequest(after=after))).receipts:
            num_listed, after = num_listed + len(listed.receipts), listed.next
        shown = 0
        while page := await world.client(ANNA).ledger(shown):
            shown += len(page)
    assert (num_listed, shown) == (61, 61)
