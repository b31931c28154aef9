"""A dishonest coordinator rewrites its ledger, or dates its statements so that nothing seems to contradict them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
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
from tests.node.ledger_world import Shown, StoppedClock, command, payloads, receipts_of, rewritten
from tests.node.operator_world import write_key

from prime_node.broadcast.audit.ledger_audit import audit_ledger
from prime_node.broadcast.audit.ledger_file import export_ledger, open_ledger_file
from prime_node.cli.run_dir import RunDir
from prime_node.worker.receipts import ReceiptBook
from prime_protocol.assignment import Lease
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.ledger import LedgerHead
from prime_protocol.limits import COUNT_MAX, LEDGER_HEAD_S_MAX, REQUEST_AGE_S_MAX
from prime_protocol.replies import ReceiptList
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason


@dataclass
class Honest:
    """A ledger of three entries, as it was exported before the coordinator rewrote it."""

    run: PinnedRun
    receipts: list[bytes]
    mine: list[Envelope]
    head: Envelope
    file: Path

    @property
    def at_ms(self) -> int:
        return parse_json(self.head.payload, LedgerHead).at_ms


@pytest.fixture
async def honest(tmp_path: Path) -> AsyncIterator[Honest]:
    async with running(memory_parts(make_run()), ANNA, BEN) as world:
        for key, reason in ((ANNA, None), (BEN, RejectReason.SEED_MISMATCH), (ANNA, None)):
            await world.client(key).upload(make_parcel(await world.lease(key, rollouts_max=2), key))
            await world.judge(reason=reason)
        await export_ledger(world.client(ANNA), world.run, tmp_path / "kept.jsonl")
        shown, head = await world.client(ANNA).ledger(0), await world.client(ANNA).ledger_head()
        yield Honest(world.run, payloads(shown), await receipts_of(world), head, tmp_path / "kept.jsonl")


async def verify(honest: Honest, shown: Shown, *options: str) -> tuple[int, str]:
    file = honest.file.with_name("shown.jsonl")
    await export_ledger(shown, honest.run, file)
    result = await asyncio.to_thread(command, "verify", str(file), "--run", honest.run.digest, *options)
    return result.exit_code, result.stdout


@pytest.mark.parametrize("later_ms", [-1, 0, 1])
async def test_a_shorter_ledger_that_the_kept_one_does_not_continue_convicts_whatever_its_date(
    honest: Honest, later_ms: int, tmp_path: Path
) -> None:
    shown = rewritten(honest.run, honest.receipts[1::-1], at_ms=honest.at_ms + later_ms)
    proof = tmp_path / "proof"
    code, output = await verify(honest, shown, "--known", str(honest.file), "--evidence", str(proof))
    assert code == 1
    assert "the signed head names another entry 1 than the kept ledger of 3 has" in output
    assert {file.read_bytes() for file in proof.iterdir()} == {shown.head.to_bytes(), honest.head.to_bytes()}


@pytest.mark.parametrize(("later_ms", "is_fault"), [(-1, False), (0, True), (1, True)])
async def test_a_shorter_head_that_is_not_older_convicts(honest: Honest, later_ms: int, is_fault: bool) -> None:
    shown = rewritten(honest.run, honest.receipts[:2], at_ms=honest.at_ms + later_ms)
    kept = rewritten(honest.run, honest.receipts, at_ms=honest.at_ms)
    report = await audit_ledger(shown, honest.run, kept=[kept])
    assert bool(report.faults) == is_fault
    assert report.evidence == ([shown.head, honest.head] if is_fault else [])
    assert (await verify(honest, shown, "--known", str(honest.file)))[0] == is_fault


async def test_a_head_dated_before_its_own_entries_convicts(honest: Honest) -> None:
    """Back-dating hides no omission: a receipt that is missing would count as newer than the head."""
    left_out = rewritten(honest.run, honest.receipts[1:], at_ms=1)
    code, text = await verify(honest, left_out)
    assert (code, "the signed head is dated before one of its own entries" in text) == (1, True)


def dated(receipts: list[Receipt], *dates_ms: int) -> list[bytes]:
    pairs = zip(receipts, dates_ms, strict=True)
    return [receipt.model_copy(update={"at_ms": at_ms}).model_dump_json().encode() for receipt, at_ms in pairs]


async def test_dates_that_stand_still_hide_no_omission(honest: Honest) -> None:
    """A receipt is left out, and all later lines have its date, so that no head is ever dated after it."""
    receipts = [parse_json(payload, Receipt) for payload in honest.receipts]
    omitted, later, own = receipts[0], receipts[1:], seal(receipts[0], PayloadType.RECEIPT, COORDINATOR)
    t = omitted.at_ms
    frozen = rewritten(honest.run, dated(later, t, t), at_ms=t)
    report = await audit_ledger(frozen, honest.run, receipts=[own])
    assert "entry 1 is not dated after the entry before it" in report.faults
    assert report.evidence[0] == frozen.head
    slow = rewritten(honest.run, dated(later, t, t + 1), at_ms=t + 2)
    faults = (await audit_ledger(slow, honest.run, receipts=[own])).faults
    assert [fault.startswith("a signed receipt is missing") for fault in faults] == [True]
    at_once = rewritten(honest.run, dated(later[:1], t), at_ms=t)
    faults = (await audit_ledger(at_once, honest.run, receipts=[own])).faults
    assert [fault.startswith("a signed receipt is missing") for fault in faults] == [True], "not newer than the head"


@pytest.mark.parametrize(("later_ms", "is_fault"), [(-1, True), (0, True), (1, False)])
async def test_of_two_heads_the_longer_is_dated_later(honest: Honest, later_ms: int, is_fault: bool) -> None:
    short = rewritten(honest.run, honest.receipts[:2], at_ms=honest.at_ms)
    full = rewritten(honest.run, honest.receipts, at_ms=honest.at_ms + later_ms)
    for shown, known in ((full, short), (short, full)):
        report = await audit_ledger(shown, honest.run, kept=[known])
        assert bool(report.faults) == is_fault
        assert report.evidence == ([shown.head, known.head] if is_fault else [])


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_clock_that_is_set_back_dates_no_receipt_before_its_lease(tmp_path: Path, is_restarted: bool) -> None:
    run, clock = make_run(), StoppedClock()
    async with running(replace(await folder_parts(run, tmp_path), clock=clock), ANNA) as world:
        head, lease = world.head, await world.lease(ANNA, rollouts_max=2)
        if not is_restarted:
            clock.ms -= 3_600_000
            await settle(world, lease)
            receipts = await receipts_of(world)
    if is_restarted:
        clock.ms -= 3_600_000
        async with running(replace(await folder_parts(run, tmp_path), clock=clock)) as world:
            world.head = head
            await world.join(ANNA)
            await settle(world, lease)
            receipts = await receipts_of(world)
    assert [parse_json(one.payload, Receipt).at_ms > lease.issued_at_ms for one in receipts] == [True]


async def settle(world: World, lease: Lease) -> None:
    await world.client(ANNA).upload(make_parcel(lease, ANNA))
    await world.judge()


async def test_a_running_coordinator_that_shows_an_old_head_fails_the_check(honest: Honest) -> None:
    shown = rewritten(honest.run, honest.receipts, at_ms=honest.at_ms)
    bound_ms = round((LEDGER_HEAD_S_MAX + REQUEST_AGE_S_MAX) * 1_000)
    for age_ms, is_old in ((bound_ms, False), (bound_ms + 1, True), (-bound_ms, False)):
        report = await audit_ledger(shown, honest.run, now_ms=lambda: honest.at_ms + age_ms)  # noqa: B023 - called at once
        assert [fault.startswith("the coordinator's signed head is 180 s old") for fault in report.faults] == [
            True
        ] * is_old
        assert report.evidence == []
    assert (await audit_ledger(shown, honest.run)).faults == [], "a file may be of any age"


async def test_ledger_verify_of_a_link_tells_the_age_of_a_head_whose_coordinator_s_clock_stands_still() -> None:
    clock = StoppedClock()
    clock.ms = 1_600_000_000_000
    async with running(replace(memory_parts(make_run()), clock=clock)) as world:
        await world.publish()
        result = await asyncio.to_thread(command, "verify", f"{world.url}/#{world.run.digest}")
    assert result.exit_code == 1
    assert "FAIL the coordinator's signed head is" in result.stdout


async def test_an_honest_coordinator_signs_no_two_heads_of_one_millisecond() -> None:
    shown = []
    async with running(replace(memory_parts(make_run()), clock=StoppedClock()), ANNA) as world:
        for _ in range(2):
            await settle(world, await world.lease(ANNA, rollouts_max=2))
            shown.append(Shown(await world.client(ANNA).ledger(0), await world.client(ANNA).ledger_head()))
        receipts = await receipts_of(world)
    for one, other in (shown, shown[::-1]):
        assert (await audit_ledger(one, world.run, kept=[other], receipts=receipts)).faults == []


@pytest.mark.parametrize("later_ms", [-60_000, 0, 60_000])
async def test_a_head_of_an_older_copy_of_the_folder_convicts_no_honest_coordinator(
    tmp_path: Path, later_ms: int
) -> None:
    """With the present date it would convict: receipts settled since the copy are dated before it, and not in it."""
    run, clock = make_run(), StoppedClock()
    shown: list[Shown] = []
    place, copy = RunDir(tmp_path / "run"), RunDir(tmp_path / "copy")

    async with running(replace(await folder_parts(run, place.coordinator), clock=clock), ANNA) as world:
        await settle(world, await world.lease(ANNA, rollouts_max=2))
        shown.append(Shown(await world.client(ANNA).ledger(0), await world.client(ANNA).ledger_head()))
        await settle(world, await world.lease(ANNA, rollouts_max=2))  # no head names it
        head = world.head
    await asyncio.to_thread(shutil.copytree, place.coordinator, copy.coordinator)
    write_key(copy.key("coordinator"), COORDINATOR)
    copy.run_spec.write_bytes(run.envelope.to_bytes())
    clock.ms += later_ms
    async with running(replace(await folder_parts(run, place.coordinator), clock=clock)) as world:
        world.head = head
        await settle(world, await world.lease(ANNA, rollouts_max=2))
        shown.append(Shown(await world.client(ANNA).ledger(0), await world.client(ANNA).ledger_head()))
        receipts = await receipts_of(world)
    out = tmp_path / "ledger.jsonl"
    assert (await asyncio.to_thread(command, "export", str(copy.path), "--out", str(out))).exit_code == 0
    with open_ledger_file(out, pinned=run.digest) as file:
        shown.append(Shown(await file.ledger(0), await file.ledger_head()))
    assert [len(one.lines) for one in shown] == [1, 3, 2]
    for one in shown:
        kept = [other for other in shown if other is not one]
        assert (await audit_ledger(one, run, kept=kept, receipts=receipts)).faults == []


async def test_a_strangers_ledger_is_read_up_to_a_number_of_bytes(
    honest: Honest, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(len(line) + 1 for line in honest.file.read_bytes().splitlines() if line.startswith(b'{"index"'))
    monkeypatch.setattr("prime_protocol.limits.UNPINNED_DOSSIER_BYTES_MAX", size)
    assert (await asyncio.to_thread(command, "verify", str(honest.file))).exit_code == 0
    monkeypatch.setattr("prime_protocol.limits.UNPINNED_DOSSIER_BYTES_MAX", size - 1)
    with pytest.raises(LocalError, match="--run with the run's digest"):
        await asyncio.to_thread(command, "verify", str(honest.file))
    pinned = await asyncio.to_thread(command, "verify", str(honest.file), "--run", honest.run.digest)
    assert pinned.exit_code == 0


async def test_a_kept_file_that_is_damaged_accuses_no_key(honest: Honest, tmp_path: Path) -> None:
    lines = honest.file.read_bytes().splitlines(keepends=True)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(b"".join(lines[:1] + lines[2:]))
    shown = rewritten(honest.run, honest.receipts[:1], at_ms=honest.at_ms - 1)
    with pytest.raises(LocalError, match="a kept ledger is damaged"):
        await verify(honest, shown, "--known", str(damaged))
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night.")
    with pytest.raises(LocalError, match="no ledger of run"):
        await verify(honest, shown, "--known", str(tmp_path / "novel.txt"))


async def test_receipts_that_are_newer_than_the_head_are_counted_apart_and_shown(
    honest: Honest, tmp_path: Path
) -> None:
    ahead = []
    for envelope in honest.mine:
        receipt = parse_json(envelope.payload, Receipt)
        if receipt.status is not BundleStatus.PENDING:
            ahead.append(seal(receipt.model_copy(update={"at_ms": COUNT_MAX - 1}), PayloadType.RECEIPT, COORDINATOR))
    (tmp_path / "receipts.jsonl").write_bytes(b"".join(one.to_bytes() + b"\n" for one in ahead))
    options = ("--receipts", str(tmp_path))
    empty = rewritten(honest.run, [])
    code, output = await verify(honest, empty, *options)
    assert code == 0
    assert "settled receipts are in it" not in output
    assert "note 2 settled receipts are not in it and are dated after its head" in output
    report = json.loads((await verify(honest, empty, *options, "--json"))[1])
    assert (report["num_receipts"], report["num_newer_receipts"]) == (2, 2)


async def test_a_worker_refuses_receipts_dated_ahead_of_its_clock(honest: Honest, tmp_path: Path) -> None:
    book = ReceiptBook(tmp_path / "worker", run=honest.run, worker=ANNA.key_id)
    receipt = parse_json(honest.mine[0].payload, Receipt)
    bound_ms = round(REQUEST_AGE_S_MAX * 1_000)

    def offered(ahead_ms: int) -> ReceiptList:
        dated = receipt.model_copy(update={"at_ms": receipt.at_ms + ahead_ms})
        return ReceiptList(receipts=(seal(dated, PayloadType.RECEIPT, COORDINATOR).to_bytes().decode(),), next=1)

    with pytest.raises(RemoteError, match="ahead of this machine's clock"):
        book.add(offered(bound_ms + 1), now_ms=receipt.at_ms)
    assert book.cursor == 0
    assert not (tmp_path / "worker" / "receipts.jsonl").exists()
    book.add(offered(bound_ms), now_ms=receipt.at_ms)
    assert book.cursor == 1
