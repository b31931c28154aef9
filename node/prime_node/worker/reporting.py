"""Reporting: heartbeats for the coordinator, a status for the owner, and the receipts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from prime_node.ports.transport import Unreachable
from prime_node.worker.session import KeyBanned
from prime_node.worker.status import Status, Traffic
from prime_node.worker.worker import HOLDING_MAX, Ending, Worker
from prime_protocol import limits
from prime_protocol.errors import RemoteError
from prime_protocol.replies import ReceiptList
from prime_protocol.requests import HeartbeatRequest, ReceiptsRequest
from prime_protocol.telemetry import DownloadReport

log = logging.getLogger(__name__)

STANDING_S = 30.0
"""Seconds between two questions for the standing."""


async def fetch_receipts(worker: Worker) -> NoReturn:
    """Fetch new receipts every `receipts_seconds`, forever."""
    while True:
        await worker.clock.sleep(worker.config.receipts_seconds)
        try:
            await _take_receipts(worker, worker.session.ask)
        except RemoteError as error:
            log.warning("receipts: %s", error)


async def follow_standing(worker: Worker) -> NoReturn:
    """Ask for this contributor's place among all every `STANDING_S`, forever. Without an answer, the last one stays."""
    while True:
        try:
            worker.standing = await worker.coordinator.standing(worker.key.key_id)
        except (RemoteError, Unreachable) as error:
            log.debug("standing: %s", error)
        await worker.clock.sleep(STANDING_S)


async def last_receipts(worker: Worker) -> None:
    """Fetch the receipts that are still missing when the worker ends. Do not wait for an unreachable coordinator."""
    try:
        while await _take_receipts(worker, worker.session.attempt):
            continue
    except (RemoteError, Unreachable, KeyBanned) as error:
        log.info("receipts: %s; the next start fetches the missing ones", error)


async def _take_receipts(
    worker: Worker, ask: Callable[[Callable[[], Awaitable[ReceiptList]]], Awaitable[ReceiptList]]
) -> bool:
    """Fetch the next receipts; return whether there were any."""
    answer = await ask(functools.partial(worker.coordinator.receipts, ReceiptsRequest(after=worker.receipts.cursor)))
    await worker.trust.verified(functools.partial(worker.receipts.add, answer, now_ms=worker.clock.now_ms()))
    return bool(answer.receipts)


async def show_status(worker: Worker) -> NoReturn:
    """Write and show the status every `status_seconds`, forever."""
    while True:
        status = status_of(worker)
        worker.recent.note(status)
        worker.show(status)
        await worker.clock.sleep(worker.config.status_seconds)


def heartbeat_request(worker: Worker) -> HeartbeatRequest:
    """Return the worker's next heartbeat."""
    return HeartbeatRequest(
        state=worker.activity.state,
        policy_version=worker.loaded.version,
        bundles_spooled=min(worker.spool.num_bundles, limits.BUNDLES_SPOOLED_MAX),
        usable_after_ms=_claimed(worker.loaded.usable_after_ms),
        swap_ms=_claimed(worker.loaded.swap_ms),
        session=worker.session.name,
        holding=tuple(worker.activity.in_hand)[:HOLDING_MAX] or None,
        downloads=_downloads(worker.links()),
    )


def _downloads(traffic: Traffic) -> DownloadReport | None:
    """Return what the coordinator shows of the downloads; None before the first byte."""
    if not traffic.down_bytes and not traffic.all_bytes:
        return None
    moved = (traffic.peer_bytes, traffic.down_bytes - traffic.peer_bytes, traffic.done_bytes, traffic.all_bytes)
    peer, operator, done, whole = (min(num_bytes, limits.CLAIMED_BYTES_MAX) for num_bytes in moved)
    links = min(traffic.peers, limits.CLAIMED_LINKS_MAX)
    return DownloadReport(peer_bytes=peer, operator_bytes=operator, links=links, done_bytes=done, all_bytes=whole)


def _claimed(ms: int | None) -> int | None:
    """Drop an impossible value, after a laptop's sleep or a clock change: the coordinator would refuse it."""
    return None if ms is None or ms > limits.CLAIMED_MS_MAX else ms


def _first_wait(worker: Worker, head: int) -> str:
    if not worker.session.joined:
        return "the coordinator has not admitted this worker yet"
    return "the trainer has not published a policy yet" if head < 0 else ""


def farewell(worker: Worker, ending: Ending) -> str:
    """Return the last line for the owner.

    Example: `left on request. Of this key: 71,680 rollouts accepted, worth 453,120 tokens`.
    """
    tally = worker.receipts.tally()
    parts = [f"{tally.accepted:,} rollouts accepted, worth {tally.tokens:,} tokens"]
    if rejected := sum(tally.refused.values()):
        parts.append(f"{rejected:,} rejected")
    if tally.pending:
        parts.append(f"{tally.pending:,} not checked yet")
    return f"{ending.message}. Of this key: {'; '.join(parts)}"


def status_of(worker: Worker, *, ended: str = "") -> Status:
    """Return the worker's current status. `ended` is its outcome, if it has ended."""
    session, tally, audits = worker.session, worker.receipts.tally(), worker.run.spec.checks.audits
    latest, traffic = worker.follower.latest(), worker.links()
    away_since_s = session.away_since_s
    head = max(session.head, -1 if latest is None else latest.version)
    standing = worker.standing
    return Status(
        worker=worker.key.key_id,
        state=worker.activity.state,
        policy_version=worker.loaded.version,
        head=head,
        step=session.step,
        tokens_per_s=round(worker.activity.pace.tokens_per_s, 1),
        rollouts_generated=worker.activity.rollouts_generated,
        rollouts_accepted=tally.accepted,
        rollouts_pending=tally.pending,
        tokens_accepted=tally.tokens,
        refused=tally.refused,
        bundles_in_escrow=0 if audits is None else worker.receipts.num_escrows(audits.escrow_bundles),
        bundles_spooled=worker.spool.num_bundles,
        bundles_uploaded=worker.spool.num_uploaded,
        leases_dropped=worker.activity.leases_dropped,
        coordinator_away_s=None if away_since_s is None else worker.clock.monotonic_s() - away_since_s,
        waiting_for=session.in_use or worker.activity.waiting_for or _first_wait(worker, head),
        paused=worker.activity.paused,
        control_at_ms=worker.activity.control_at_ms,
        notice=session.notice,
        tokens_generated=worker.activity.tokens_generated,
        peers=traffic.peers,
        down_bytes=traffic.down_bytes,
        up_bytes=traffic.up_bytes + worker.spool.bytes_uploaded,
        swarm=traffic.text,
        person="" if standing is None or standing.contributor == worker.key.key_id else standing.contributor,
        rank=None if standing is None else standing.rank,
        contributors=0 if standing is None else standing.contributors,
        share=0.0 if standing is None or not standing.all_tokens else standing.tokens / standing.all_tokens,
        ended=ended,
        at_ms=worker.clock.now_ms(),
    )
