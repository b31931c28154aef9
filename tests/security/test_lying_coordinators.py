"""A coordinator with false statements for one worker: no traceback, no false proof against it, no full disk."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.node.memory_coordinator import MemoryCoordinator, WorkerWorld
from tests.node.table_engine import TableEngine
from tests.node.worker_world import COORDINATOR, WORKER, make_run, names_in

from prime_node.worker import receipts
from prime_node.worker.lease_work import LEASE_PAUSE_S_MIN
from prime_node.worker.loop import run_worker
from prime_node.worker.receipts import ReceiptBook
from prime_node.worker.worker import Ending, Equipment
from prime_protocol.assignment import Lease, Problem
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import LocalError
from prime_protocol.parcel import open_parcel
from prime_protocol.replies import NotYet, ReceiptList, UploadReply
from prime_protocol.requests import LeaseRequest, ReceiptsRequest
from prime_protocol.rollout import RolloutHeader
from prime_protocol.verdict import BundleStatus, Receipt

ENOUGH = 12
"""Requests for leases after which a test stops its worker."""


class LyingCoordinator(MemoryCoordinator):
    """Coordinator that changes each lease, and records the leases of the bundles that it gets."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.changed: Callable[[Envelope], Envelope] = lambda lease: lease
        self.num_asked_leases = 0
        self.asked_s: list[float] = []
        """Times of these requests."""
        self.bundles_of: Counter[str] = Counter()
        self.enough = asyncio.Event()

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        found = await super().lease(request)
        self.num_asked_leases += 1
        self.asked_s.append(self.clock.seconds)
        if self.num_asked_leases >= ENOUGH:
            self.enough.set()
        return found if isinstance(found, NotYet) else self.changed(found)

    async def upload(self, parcel: bytes) -> UploadReply:
        header = parse_json(open_parcel(parcel, body_bytes_max=2**20).envelope.payload, RolloutHeader)
        self.bundles_of[header.lease_id] += 1
        return await super().upload(parcel)


class Replying:
    """Environment of several turns (ports.environment.TurnEnvironment) that asks once."""

    async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Any) -> float:
        await ask(prompt_token_ids)
        return 0.0


def lying(folder: Path, kind: type[LyingCoordinator] = LyingCoordinator) -> tuple[WorkerWorld, LyingCoordinator]:
    world = WorkerWorld(folder)
    honest = world.coordinator
    liar = kind(honest.run, world.clock)
    liar.manifests, liar.blobs, liar.policies = honest.manifests, honest.blobs, honest.policies
    liar.shown_head = honest.shown_head
    world.coordinator, world.stop = liar, liar.enough
    return world, liar


def with_changes(**changes: Any) -> Callable[[Envelope], Envelope]:
    def change(lease: Envelope) -> Envelope:
        made = parse_json(lease.payload, Lease).model_copy(update=changes)
        return seal(made, PayloadType.LEASE, COORDINATOR)

    return change


async def test_a_lease_that_is_sent_twice_gets_one_bundle(tmp_path: Path) -> None:
    """Before, each time got a bundle with another date: two headers that convict an honest worker of equivocation."""
    world, liar = lying(tmp_path)
    first: list[Envelope] = []

    def again(lease: Envelope) -> Envelope:
        first.append(lease)
        return first[0]

    liar.changed = again
    assert await run_worker(world.worker(), world.stop) is Ending.STOPPED
    assert list(liar.bundles_of.values()) == [1]


async def test_a_lease_from_before_a_restart_gets_no_second_bundle(tmp_path: Path) -> None:
    """Before, a coordinator that withheld the receipt got one, and with it two headers that convict an honest worker."""

    class Withholding(LyingCoordinator):
        async def receipts(self, request: ReceiptsRequest) -> ReceiptList:
            return ReceiptList(receipts=(), next=0)

    world, liar = lying(tmp_path, Withholding)
    first: list[Envelope] = []

    def again(lease: Envelope) -> Envelope:
        first.append(lease)
        return first[0]

    liar.changed = again
    for _ in range(2):
        liar.enough.clear()
        liar.num_asked_leases = 0
        assert await run_worker(world.worker(), world.stop) is Ending.STOPPED
    assert list(liar.bundles_of.values()) == [1]


async def test_no_answer_makes_a_worker_ask_without_a_pause(tmp_path: Path) -> None:
    """Before, a wait of no seconds and leases that were over kept its event loop busy, as fast as the line could."""

    class Idle(LyingCoordinator):
        async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
            await super().lease(request)
            return NotYet(reason="nothing to do", retry_after_s=0.0)

    def over(lease: Envelope) -> Envelope:
        made = parse_json(lease.payload, Lease)
        changed = made.model_copy(update={"issued_at_ms": 0, "expires_at_ms": made.issued_at_ms - 1})
        return seal(changed, PayloadType.LEASE, COORDINATOR)

    for kind, change in ((Idle, lambda lease: lease), (LyingCoordinator, over)):
        world, liar = lying(tmp_path / kind.__name__, kind)
        liar.changed, world.clock.tick_s = change, 0.0
        assert await run_worker(world.worker(), world.stop) is Ending.STOPPED
        pauses = [later - earlier for earlier, later in itertools.pairwise(liar.asked_s)]
        assert min(pauses) >= 0.99 * LEASE_PAUSE_S_MIN, kind.__name__


async def test_two_leases_of_one_id_end_no_worker(tmp_path: Path) -> None:
    """Before, the second one ended the worker with a KeyError."""
    world, liar = lying(tmp_path)
    liar.changed = with_changes(lease_id=digest_of(b"one"))
    assert await run_worker(world.worker(leases_ahead=2), world.stop) is Ending.STOPPED
    assert liar.bundles_of == {digest_of(b"one"): 1}


async def test_a_lease_of_an_environment_that_the_run_lacks_ends_no_worker(tmp_path: Path) -> None:
    """Before, a worker of a run with environments that answer ended with a KeyError."""
    world, liar = lying(tmp_path)

    def elsewhere(lease: Envelope) -> Envelope:
        groups = parse_json(lease.payload, Lease).groups
        foreign = Problem(environment="elsewhere", index=1)
        return with_changes(groups=tuple(one.model_copy(update={"problem": foreign}) for one in groups))(lease)

    async def equip() -> Equipment:
        return Equipment(TableEngine(), {"toy": Replying()})  # type: ignore[dict-item]

    liar.changed = elsewhere
    assert await run_worker(world.worker(equip=equip), world.stop) is Ending.STOPPED
    assert liar.bundles_of == {}


RUN = make_run()


def book_in(folder: Path) -> ReceiptBook:
    return ReceiptBook(folder, run=RUN, worker=WORKER.key_id)


def receipt_of(number: int, **changes: Any) -> Envelope:
    fields: dict[str, Any] = {
        "run": RUN.digest,
        "worker": WORKER.key_id,
        "lease_id": digest_of(b"lease %d" % number),
        "bundle": digest_of(b"bundle %d" % number),
        "step": 0,
        "policy_version": 0,
        "num_rollouts": 1,
        "num_tokens": 1,
        "status": BundleStatus.ACCEPTED,
        "at_ms": 0,
    }
    return seal(Receipt.model_validate(fields | changes), PayloadType.RECEIPT, COORDINATOR)


def listed(*signed: Envelope, after: int = 0) -> ReceiptList:
    texts = tuple(one.to_bytes().decode() for one in signed)
    return ReceiptList(receipts=texts, next=after + len(texts))


async def test_a_lease_counts_as_answered_after_a_restart_with_or_without_its_receipt(tmp_path: Path) -> None:
    leases, note = [digest_of(b"lease %d" % number) for number in (1, 2, 3)], tmp_path / "answered.txt"
    await book_in(tmp_path).note_bundle(digest_of(b"bundle 1"), leases[0])
    with note.open("a") as file:
        file.write(leases[2][:20])  # a crash while it was written
    await book_in(tmp_path).note_bundle(digest_of(b"bundle 2"), leases[1])
    book = book_in(tmp_path)
    book.add(listed(receipt_of(1)), now_ms=0)
    for _ in range(2):
        assert [book.is_answered(lease) for lease in leases] == [True, True, False]
        book = book_in(tmp_path)
    assert note.read_text() == f"{leases[1]}\n", "a receipt says the same"


async def test_the_note_of_answered_leases_stays_small_while_the_worker_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it grew by a line a bundle until the next start."""
    monkeypatch.setattr(receipts, "ANSWERED_LINES", 4)
    book, note, most = book_in(tmp_path), tmp_path / "answered.txt", 0
    first, second = digest_of(b"another lease"), digest_of(b"yet another lease")
    await asyncio.gather(*(book.note_bundle(digest_of(lease.encode()), lease) for lease in (first, second)))
    for number in range(20):
        await book.note_bundle(digest_of(b"bundle %d" % number), digest_of(b"lease %d" % number))
        book.add(listed(receipt_of(number), after=number), now_ms=0)
        most = max(most, len(note.read_text().splitlines()))
    assert most <= 2 + 1 + 4
    assert {first, second} < set(note.read_text().split()), "no receipt says the same"
    for one in (book, book_in(tmp_path)):
        leases = [first, second, *(digest_of(b"lease %d" % number) for number in range(21))]
        assert [one.is_answered(lease) for lease in leases] == [True] * 22 + [False]


def test_receipts_without_end_fill_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a coordinator could write 4 MiB every ten seconds."""
    monkeypatch.setattr(receipts, "RECEIPTS_BYTES_MAX", 2_000)
    book = book_in(tmp_path)
    number = 0
    while not (tmp_path / "receipts.jsonl").exists() or (tmp_path / "receipts.jsonl").stat().st_size <= 2_000:
        book.add(listed(receipt_of(number), after=number), now_ms=0)
        number += 1
    with pytest.raises(LocalError, match=r"receipts\.jsonl have more than 2,000 bytes; move the file"):
        book.add(listed(receipt_of(number), after=number), now_ms=0)
    assert (tmp_path / "receipts.jsonl").stat().st_size < 4_000


def test_contradictions_are_kept_once_a_lease_and_in_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each receipt wrote a file with the lease and the RunSpec, megabytes at a time and without a bound."""
    monkeypatch.setattr(receipts, "CONTRADICTIONS_MAX", 3)
    world = WorkerWorld(tmp_path / "world", pinned=RUN)
    book = book_in(tmp_path)
    for number in range(5):
        granted = asyncio.run(_granted(world))
        lease = parse_json(granted.payload, Lease)
        book.note_lease(lease, granted)
        for step in (7, 8):
            false = receipt_of(
                number, lease_id=lease.lease_id, step=step, num_rollouts=lease.num_rollouts, at_ms=10**13
            )
            book.add(listed(false, after=2 * number + step), now_ms=10**13)
    kept = names_in(tmp_path, "contradiction-*.jsonl")
    assert len(kept) == 3
    last = open_envelope((tmp_path / kept[0]).read_bytes().splitlines()[-1])
    assert parse_json(last.payload, Receipt).step == 7, "the first one stays"


async def _granted(world: WorkerWorld) -> Envelope:
    world.coordinator.known = True
    head = world.coordinator.signed(0)
    request = LeaseRequest(policy_version=0, policy_digest=head.digest, rollouts_max=4)
    lease = await world.coordinator.lease(request)
    assert isinstance(lease, Envelope)
    return lease
