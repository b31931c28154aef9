"""Selection of bundles for audits; escrow of the tokens of recent bundles.

Every bundle is checked against its assignment and scored. The forward pass costs the most. Validators make it for every bundle
of a newcomer, then for a share that falls with the worker's audits passed in a row, as in BOINC's adaptive replication. The
share never falls below the run's floor. A secret of the coordinator and the bundle's digest select the bundles, once the bytes
are durable. So a worker can neither predict the selection nor choose its uploads by it.

The tokens of a worker's last `escrow_bundles` accepted bundles are in escrow: no receipt credits them yet. Bundles that arrived
after one whose audit is not finished do not count among these, and nothing is credited while the last audit that ended was
never finished. So a slow audit leaves the stake as it was when the bundle arrived. Beyond WITHHELD_MAX further bundles the oldest
are credited all the same: a worker is paid, and memory bounded, however long an audit takes. One dishonest bundle
forfeits the escrow (refusals.py). Its groups that were neither audited nor trained are dropped, the worker's pending unaudited
bundles are rejected, and all its later bundles are audited again. So a cheat stakes more than the work that it saves
(lab/prime_lab/cheating.py has the calculation).

Leases that end without a bundle count too: a worker that omits indices may be choosing among them. So do audited bundles that
no validator judged in time or whose engine class the calibration lacks: they may be made for that.
After one, all bundles of the worker are audited until one passes, and the newest unaudited bundles in escrow lose their credit.
"""

from __future__ import annotations

import math

from prime_node.coordinator.state import newcomers, suspicion
from prime_node.coordinator.state.effects import Settled
from prime_node.coordinator.state.records import Escrow, PendingBundle, State, WorkerRecord
from prime_node.coordinator.state.rules import SchedulerRules
from prime_protocol.evidence import Weighed
from prime_protocol.verdict import BundleStatus

ABANDONED_COSTS = 4
"""Passed audits that one abandoned lease, or one bundle that is `unjudged`, cancels."""
WITHHELD_MAX = 256
"""Bundles in escrow, besides `escrow_bundles`, for the sake of an audit that is not finished."""


def audit_share(rules: SchedulerRules, worker: WorkerRecord) -> float:
    """Return the probability that the worker's next bundle is audited.

    A worker whose engine is not in the run's calibration remains a newcomer.
    """
    if worker.audit_score <= rules.newcomer_bundles or worker.calibrated is False or worker.audited_in_full:
        return 1.0
    return max(rules.audit_share_min, rules.newcomer_bundles / worker.audit_score)


def credit(
    state: State, worker: WorkerRecord, pending: PendingBundle, num_tokens: int, weighed: Weighed | None = None
) -> tuple[int, str]:
    """Move an accepted bundle into escrow; return the tokens that its receipt credits, and the receipt's detail.

    `weighed` is the evidence that the receipt states.
    """
    worker.audit_score += pending.audited
    worker.audited_in_full &= not pending.audited
    newcomers.kept(state, worker)
    newcomers.recount(state, worker)
    bundles_max = state.rules.escrow_bundles
    if bundles_max == 0:
        return num_tokens, ""
    mine = Escrow(
        pending.lease,
        pending.num_rollouts,
        num_tokens,
        pending.audited,
        weighed=weighed,
        arrived_at_ms=pending.arrived_at_ms,
    )
    worker.escrow.append(mine)
    mine.credited = sum(one.num_tokens for one in _leave_escrow(state, worker))
    detail = (
        f"its own {num_tokens} tokens are credited after {bundles_max} more accepted bundles and the audits of earlier ones, or "
        "at the end of the run"
    )
    return mine.credited, detail


def _leave_escrow(state: State, worker: WorkerRecord) -> list[Escrow]:
    """Remove the bundles from escrow that may be credited, and return them."""
    bundles_max, escrow = state.rules.escrow_bundles, worker.escrow
    unfinished_ms = min(
        (state.bundles[one].arrived_at_ms for one in worker.pending if state.bundles[one].audited), default=None
    )
    before = [
        one
        for one in ([] if worker.audited_in_full else escrow)
        if unfinished_ms is None or one.arrived_at_ms < unfinished_ms
    ]
    left = before[: max(0, len(before) - bundles_max)]
    gone = {id(one) for one in left}
    kept = [one for one in escrow if id(one) not in gone]
    beyond = max(0, len(kept) - bundles_max - WITHHELD_MAX)
    worker.escrow = kept[beyond:]
    return left + kept[:beyond]


def is_releasable(state: State, worker: WorkerRecord) -> bool:
    """Return whether the worker's escrow can be released: the run ends and all of the worker's bundles are judged."""
    waits = worker.leases or worker.pending or worker.banned is not None
    return bool(worker.escrow) and state.is_ending and not waits


def release(state: State, worker: WorkerRecord) -> Settled:
    """Credit the tokens in escrow, by another receipt of the last bundle.

    This does not happen when a worker leaves: it could come back with nothing at stake, and cheat then.
    """
    last, num_tokens = worker.escrow[-1], sum(one.num_tokens for one in worker.escrow)
    released, worker.escrow, worker.released = len(worker.escrow), [], True
    detail = f"the run is ending: the {num_tokens} tokens of the last {released} bundles are credited"
    weighed = last.weighed if suspicion.still_counts(worker, last.lease) else None
    credited = last.credited + num_tokens
    assert last.lease.bundle is not None
    return Settled(
        last.lease.bundle,
        last.lease,
        last.num_rollouts,
        credited,
        BundleStatus.ACCEPTED,
        detail=detail,
        weighed=weighed,
        credited_before=last.credited,
    )


def abandoned(state: State, worker: WorkerRecord) -> None:
    """Record that a lease ended without a bundle."""
    worker.abandoned += 1
    newcomers.note_abandoned(state, worker)
    _lower_score(state, worker)


def unjudged(state: State, worker: WorkerRecord) -> None:
    """Record that no validator judged an audited bundle in time, or that the calibration lacks its engine class.

    The audit stood for 1 / share_min bundles. So as many unaudited ones, less this one, lose their credit: without that a cheat
    whose audits are never finished would keep what it saves. Their groups stay.
    """
    worker.audited_in_full = True
    unaudited = [one for one in reversed(worker.escrow) if not one.audited and one.num_tokens]
    for one in unaudited[: math.ceil(1 / state.rules.audit_share_min) - 1]:
        one.num_tokens = 0
    _lower_score(state, worker)


def _lower_score(state: State, worker: WorkerRecord) -> None:
    worker.audit_score = max(0, worker.audit_score - ABANDONED_COSTS)
    newcomers.recount(state, worker)
