"""Shared parts of the tests of seed chains: a run with one, two trained steps, and receipts that a coordinator chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.node.coordinator_world import ANNA, COORDINATOR, World, make_parcel, make_run, running
from tests.node.ledger_world import Shown, payloads, receipts_of, rewritten

from prime_node.broadcast.audit.ledger_audit import LedgerReport, audit_ledger
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.assignments import Assigner, chain_of, secret_of
from prime_node.coordinator.state.records import LeaseRecord
from prime_node.worker.receipts import ReceiptBook
from prime_protocol.assignment import Lease, Problem
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.ledger import LedgerHead
from prime_protocol.replies import ReceiptList
from prime_protocol.run_spec import PinnedRun
from prime_protocol.seed_chain import OpenSecret, committed
from prime_protocol.verdict import Receipt


def chained(**changes: object) -> PinnedRun:
    """Make a run as `prime-node new` does: it binds the coordinator to the secrets of its steps and to its prompts."""
    return make_run(seed_chain=committed(chain_of(secret_of(COORDINATOR), 20), prompts=True), **changes)


@asynccontextmanager
async def two_steps_over(parts: Parts) -> AsyncIterator[World]:
    """Train steps 0 and 1 on Anna's bundles; accept one of step 2."""
    async with running(parts) as world:
        await world.join(ANNA)
        await world.publish()
        for step in (0, 1):
            await world.fill(step)
            await world.publish()
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
        await world.judge()
        yield world


async def leased_and_judged(world: World) -> tuple[Lease, Envelope]:
    """Have one bundle of Anna's accepted; return its lease and its receipt."""
    await world.join(ANNA)
    await world.publish()
    lease = await world.lease(ANNA, rollouts_max=2)
    await world.client(ANNA).upload(make_parcel(lease, ANNA))
    await world.judge()
    return lease, (await receipts_of(world))[-1]


async def check_kept(
    is_kept: bool, folder: Path, run: PinnedRun, lease: Lease, receipt: Envelope, *, now_ms: int, bundle: str = ""
) -> None:
    """Check whether Anna's worker keeps a receipt with its lease, as a contradiction."""
    book = ReceiptBook(folder, run=run, worker=ANNA.key_id)
    signed = seal(lease, PayloadType.LEASE, COORDINATOR)
    book.note_lease(lease, signed)
    if bundle:
        await book.note_bundle(bundle, lease.lease_id)
    book.add(ReceiptList(receipts=(receipt.to_bytes().decode(),), next=1), now_ms=now_ms)
    assert contradictions_in(folder) == (
        [[run.envelope.to_bytes(), signed.to_bytes(), receipt.to_bytes()]] if is_kept else []
    )


def contradictions_in(folder: Path) -> list[list[bytes]]:
    """Return the lines of each contradiction that a worker keeps."""
    return [file.read_bytes().splitlines() for file in folder.glob("contradiction-*.jsonl")]


async def shown_by(world: World) -> Shown:
    client = world.client(ANNA)
    return Shown(await client.ledger(0), await client.ledger_head())


def said_in(line: bytes) -> Receipt:
    return parse_json(payloads([line])[0], Receipt)


async def audited(
    world: World, receipts: list[Receipt], secret: OpenSecret | None, *, own: Sequence[Envelope] = ()
) -> LedgerReport:
    """Return the findings for a coordinator that signs these receipts and publishes that secret. `own` are a worker's."""
    other = rewritten(world.run, [receipt.model_dump_json().encode() for receipt in receipts])
    head = parse_json(other.head.payload, LedgerHead).model_copy(update={"secret": secret})
    shown = Shown(other.lines, seal(head, PayloadType.LEDGER_HEAD, COORDINATOR))
    return await audit_ledger(shown, world.run, receipts=own)


class Favours(Assigner):
    """A coordinator that gives Anna the seeds of its choice, and is honest in all that it signs."""

    def seeds(self, problem: Problem, slot: int, record: LeaseRecord) -> tuple[int, ...]:
        found = super().seeds(problem, slot, record)
        return (found[0] ^ 1, *found[1:]) if slot == 5 else found
