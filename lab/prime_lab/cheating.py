"""Does cheating pay? Simulate a worker that saves work on some bundles, against the coordinator's own audit policy.

A credited bundle is worth 1 and honest work on it costs `cost`, below 1, since otherwise no worker would take part. A cheated
bundle costs `work` times as much: nothing by default, the best that any cheat can do, and n times for the best of n samples.
An audit detects it with probability `detection`, and ends `delay` bundles later. With probability `unjudged`, no validator
finishes the audit of a cheated bundle in time, as for garbage that crashes validators; it is refused then, without a strike.

The real coordinator/state/audits.py decides which bundles are audited, what is credited and what is lost. A banned
worker starts again at once, with another key, for free. Bundles still in escrow at the end count as earned. So whatever
real cheats cost (a smaller model, a new address, waiting) comes on top of these results.

Why it does not pay: a cheated bundle is found with probability s * detection, where s is the audited share, and then D
other bundles' credit is lost. So it loses s * detection * (1 + D) on average to save `cost`. At the floor that is 2.25
* detection by default, and more above it. A cheat that half of the audits miss loses too, whichever moment it picks:
its receipts may show what was audited, never what will be.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from prime_node.coordinator.state import audits, refusals
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord, PendingBundle, State, WorkerRecord
from prime_node.coordinator.state.rules import SchedulerRules
from prime_protocol.check_policy import ALL_AUDITED, CheckPolicy


@dataclass(slots=True)
class CheatView:
    """A cheat's knowledge when it decides."""

    audit_score: int
    """Audits passed in a row, as its receipts show."""
    escrow: int
    """Own bundles that are not credited yet."""
    since_audit: int
    """Bundles since the last audited one."""


Strategy = Callable[[CheatView, random.Random], bool]
"""Function that decides whether to cheat on the next bundle."""


def at_rate(rate: float) -> Strategy:
    """Cheat on this share of the bundles, at random."""
    return lambda seen, rng: rng.random() < rate


def once_trusted(audit_score: int) -> Strategy:
    """Be honest until the audit share is lowest, then never again."""
    return lambda seen, rng: seen.audit_score >= audit_score


def after_audits(seen: CheatView, rng: random.Random) -> bool:
    """Cheat only right after an audit."""
    return seen.since_audit == 0


def with_little_at_stake(most: int) -> Strategy:
    """Cheat only while few bundles are in escrow."""
    return lambda seen, rng: seen.audit_score > 0 and seen.escrow <= most


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over lives, per bundle."""

    gain: float
    """Gain over an honest worker's earnings."""
    gain_error: float
    """Standard error of the gain."""
    cheated: float
    """Share of cheated bundles."""
    poisoned: float
    """Cheated bundles that were accepted and not revoked; at most the last `escrow_bundles` may still be."""
    bans: float
    audited: float
    """Share of audited bundles: the validators' remaining work."""


def play(
    strategy: Strategy,
    checks: CheckPolicy,
    *,
    cost: float,
    detection: float = 1.0,
    unjudged: float = 0.0,
    work: float = 0.0,
    delay: int = 0,
    num_bundles: int = 500,
    num_lives: int = 200,
    seed: int = 0,
) -> Outcome:
    """Simulate many lives of one strategy, each compared with an honest worker under the same audits."""
    lives = _lives(strategy, checks, _Odds(detection, unjudged, work, delay), num_bundles, num_lives, seed)
    honest = _lives(_honestly, checks, _Odds(delay=delay), num_bundles, num_lives, seed)
    gains = [(life.earned(cost) - other.earned(cost)) / num_bundles for life, other in zip(lives, honest, strict=True)]
    mean = math.fsum(gains) / num_lives
    variance = math.fsum((gain - mean) ** 2 for gain in gains) / (num_lives - 1)

    def share(number: Callable[[_Course], float]) -> float:
        return math.fsum(map(number, lives)) / num_lives / num_bundles

    return Outcome(
        gain=mean,
        gain_error=math.sqrt(variance / num_lives),
        cheated=share(lambda life: life.cheated),
        poisoned=share(lambda life: life.poisoned),
        bans=share(lambda life: life.bans),
        audited=share(lambda life: life.audited),
    )


def _honestly(seen: CheatView, rng: random.Random) -> bool:
    """Never cheat. It draws as `at_rate` does, so that both see the same audits."""
    return rng.random() < 0.0


@dataclass(frozen=True, slots=True)
class _Odds:
    detection: float = 1.0
    unjudged: float = 0.0
    work: float = 0.0
    delay: int = 0


@dataclass(frozen=True, slots=True)
class _Audit:
    """An audit that is not finished."""

    pending: PendingBundle
    due: int
    cheats: bool
    notices: bool
    is_finished: bool


@dataclass(frozen=True, slots=True)
class _Course:
    """Results of one life."""

    credited: float
    worked: float
    """Honest bundles, and the share `work` of the cheated ones."""
    cheated: int
    poisoned: int
    bans: int
    audited: int

    def earned(self, cost: float) -> float:
        return self.credited - cost * self.worked


@dataclass(slots=True)
class _Life:
    state: State
    strikes_max: int
    worker: WorkerRecord = field(default_factory=lambda: _newcomer())
    audits: list[_Audit] = field(default_factory=list)
    standing: set[str] = field(default_factory=set)
    """Cheated bundles that were accepted."""
    credited: float = 0.0
    worked: float = 0.0
    cheated: int = 0
    bans: int = 0
    audited: int = 0

    def accept(self, pending: PendingBundle, *, cheats: bool) -> None:
        if cheats:
            self.standing.add(pending.bundle)
        self.credited += audits.credit(self.state, self.worker, pending, 1)[0]
        self.worker.accepted += 1
        self.state.accepted += 1

    def finish(self, audit: _Audit) -> None:
        pending, worker = audit.pending, self.worker
        del self.state.bundles[pending.bundle]
        worker.pending = worker.pending[1:]  # audits end in the order in which they began
        if not audit.is_finished:
            audits.unjudged(self.state, worker)
        elif audit.cheats and audit.notices:
            worker.strikes += 1
            self.standing -= {one.lease.lease_id for one in worker.escrow if not one.audited}
            refusals.forfeit_escrow(self.state, worker)
            if worker.strikes >= self.strikes_max:
                self.bans += 1
                self.worker = _newcomer()
                self.state.bundles.clear()
                self.audits.clear()
        else:
            self.accept(pending, cheats=audit.cheats)


@functools.lru_cache(maxsize=64)
def _lives(
    strategy: Strategy, checks: CheckPolicy, odds: _Odds, num_bundles: int, num_lives: int, seed: int
) -> list[_Course]:
    """Simulate lives that differ in their seeds. Their course does not depend on the cost of work, so it is computed once."""
    seeds = random.Random(seed)
    return [_live(strategy, checks, odds, num_bundles, random.Random(seeds.getrandbits(64))) for _ in range(num_lives)]


def _live(strategy: Strategy, checks: CheckPolicy, odds: _Odds, num_bundles: int, rng: random.Random) -> _Course:
    life, since_audit = _Life(_state(checks), checks.strikes_max), 0
    for number in range(num_bundles):
        draw, notices = rng.random(), rng.random() < odds.detection  # equal for strategies that draw equally often
        worker = life.worker
        cheats = strategy(CheatView(worker.audit_score, len(worker.escrow), since_audit), rng)
        audited = draw < audits.audit_share(life.state.rules, worker)
        since_audit = 0 if audited else since_audit + 1
        life.cheated += cheats
        life.audited += audited
        life.worked += odds.work if cheats else 1.0
        pending = PendingBundle(str(number), _lease(number), 1, 1, number, audited)
        if audited:
            is_finished = not (cheats and odds.unjudged and rng.random() < odds.unjudged)
            life.state.bundles[pending.bundle] = pending
            worker.pending += (pending.bundle,)
            life.audits.append(_Audit(pending, number + odds.delay, cheats, notices, is_finished))
        else:
            life.accept(pending, cheats=cheats)
        while life.audits and life.audits[0].due <= number:
            life.finish(life.audits.pop(0))
    while life.audits:
        life.finish(life.audits.pop(0))
    life.credited += sum(one.num_tokens for one in life.worker.escrow)
    return _Course(life.credited, life.worked, life.cheated, len(life.standing), life.bans, life.audited)


def _state(checks: CheckPolicy) -> State:
    policy = checks.audits or ALL_AUDITED
    return State(
        SchedulerRules(
            run="",
            async_level=0,
            groups_per_step=1,
            rollouts_per_group=1,
            max_steps=1,
            lease_ms=1,
            strikes_max=checks.strikes_max,
            workers_max=1,
            leases_per_worker_max=1,
            bundles_pending_per_worker_max=1,
            audit_share_min=policy.share_min,
            newcomer_bundles=policy.newcomer_bundles,
            escrow_bundles=policy.escrow_bundles,
        )
    )


def _newcomer() -> WorkerRecord:
    return WorkerRecord("", "", "", "", 1, 0)


def _lease(number: int) -> LeaseRecord:
    return LeaseRecord(str(number), "", 0, 0, "", (0,), (0,), 0, 1, LeaseEnd.REDEEMED, bundle=str(number))
