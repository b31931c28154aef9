"""Sybil limits per network: what new keys may do.

A key costs nothing, so a thousand keys must not be worth more than one.

Workers are counted by the network that they join from: /24 of IPv4, /48 of IPv6, identified by a keyed hash. All newcomers of
one network together may do what one of them alone could. Their leases and groups grow with the audits that they have passed
together, and they count as one worker in the fair share of a step. A key that has passed `newcomer_bundles` audits has limits
of its own: that took as many honest bundles. After a ban, new keys of that network wait, twice as long after each further ban.

Networks that the operator trusts (coordinator.trusted_networks) have no name here, and no such limits.

Memory: beyond WORKERS_REMEMBERED_FACTOR times `workers_max` keys, the network with most inactive keys forgets the one that is
inactive longest, so a flood of keys evicts its own. A forgotten banned key is worth a new one, which costs nothing. The ban's
effect on its network lasts as long as any of its keys is remembered. Keys with an invitation, and keys that the operator has
banned, are never forgotten: there are no more of them than the operator has admitted or named.

The cost does not grow with the number of keys: a network's sums change when its workers change (`recount`).
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_node.coordinator.state.networks import ABSENT, NOTHING, PRESENT, Network, Part
from prime_node.coordinator.state.records import State, WorkerRecord
from prime_node.coordinator.state.rules import SchedulerRules
from prime_protocol.verdict import BanKind

BUNDLES_PER_LEASE = 2
"""Passed audits of a network's newcomers for each further lease that they may hold at once."""
BAN_PAUSE_MS = 60_000
"""Wait of new keys after the first ban in their network. It doubles with each further ban, ..."""
BAN_PAUSE_MS_MAX = 86_400_000
"""... up to a day."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the leases that a newcomer may get now."""

    leases: int
    """Further leases; 0: none before a bundle of its network is settled."""
    groups: int
    """Groups in one lease."""


def is_newcomer(rules: SchedulerRules, worker: WorkerRecord) -> bool:
    """Return whether a worker of an untrusted network has not passed `newcomer_bundles` audits in a row."""
    return bool(worker.network) and worker.audit_score < rules.newcomer_bundles


def budget(state: State, worker: WorkerRecord) -> Budget | None:
    """Return a newcomer's budget; None for a worker that has only the general limits."""
    if not is_newcomer(state.rules, worker):
        return None
    known = state.networks[worker.network]
    leases_max = min(state.rules.leases_per_worker_max, 1 + known.passed // BUNDLES_PER_LEASE)
    return Budget(leases=max(0, leases_max - known.held), groups=1 + known.passed)


def pause_ms(state: State, network: str, now_ms: int) -> int:
    """Return how long a new key of this network has to wait; 0: not at all."""
    known = state.networks.get(network)
    if known is None or not known.bans:
        return 0
    pause = min(BAN_PAUSE_MS << min(known.bans - 1, 16), BAN_PAUSE_MS_MAX)
    return max(0, known.banned_at_ms + pause - now_ms)


def num_active(state: State, network: str) -> int:
    """Return the number of active workers of a network."""
    known = state.networks.get(network)
    return 0 if known is None else known.active


def enter_network(state: State, worker: WorkerRecord, network: str) -> None:
    """Record that a worker joined from a network, perhaps another one than before."""
    if worker.network != network:
        leave_network(state, worker)
    worker.network = network
    if network not in state.networks:
        state.networks[network] = Network()
    recount(state, worker)


def leave_network(state: State, worker: WorkerRecord) -> None:
    """Remove a worker from its network's sums, because it is forgotten or has moved to another network."""
    known = state.networks.get(worker.network)
    if known is None or worker.counted == NOTHING:
        return
    _add(state, known, worker, NOTHING)
    worker.counted = NOTHING
    _set_away(state, worker, is_away=False)
    if known.keys == 0:
        del state.networks[worker.network]


def banned(state: State, worker: WorkerRecord, at_ms: int) -> None:
    """Record a ban of a key of the worker's network."""
    known = state.networks[worker.network]
    known.bans, known.banned_at_ms = known.bans + 1, at_ms
    recount(state, worker)


def unbanned(state: State, worker: WorkerRecord) -> None:
    """Record that the operator has lifted the worker's ban."""
    state.networks[worker.network].bans -= 1
    recount(state, worker)


def note_abandoned(state: State, worker: WorkerRecord) -> None:
    """Record an abandoned lease against the network of a newcomer."""
    if (known := state.networks.get(worker.network)) is not None and is_newcomer(state.rules, worker):
        known.broken += 1


def kept(state: State, worker: WorkerRecord) -> None:
    """Record that a bundle of the worker was accepted."""
    if (known := state.networks.get(worker.network)) is not None:
        known.broken = 0


def is_believed(state: State, worker: WorkerRecord) -> bool:
    """Return whether a claimed speed is believed: once per network, until one of its newcomers has had a bundle accepted."""
    return worker.wasted == 0 and state.networks[worker.network].broken == 0


def forget_one(state: State) -> WorkerRecord | None:
    """Forget one inactive worker and return it; None if there is none. Keys of trusted networks go last."""
    if state.by_away:
        network = next(iter(state.by_away[max(state.by_away)]))  # about sqrt(keys) distinct counts at most
    elif (trusted := state.networks.get("")) is not None and trusted.away:
        network = ""
    else:
        return None
    worker = state.workers[next(iter(state.networks[network].away))]
    leave_network(state, worker)
    del state.workers[worker.worker]
    return worker


def recount(state: State, worker: WorkerRecord) -> None:
    """Update the network's sums after a change of a worker that they depend on."""
    if worker.active and is_newcomer(state.rules, worker):
        now = Part(1, 1, 1, len(worker.leases) + len(worker.pending), worker.audit_score)
    elif worker.active and worker.counted is PRESENT:
        return  # the usual case: nothing that an active worker does changes its part, unless it is a newcomer
    else:
        now = PRESENT if worker.active else ABSENT
    known = state.networks.get(worker.network)
    if known is None:
        return
    if now is not worker.counted:
        _add(state, known, worker, now)
    worker.counted = now
    _set_away(state, worker, is_away=is_forgettable(worker))


def is_forgettable(worker: WorkerRecord) -> bool:
    """Return whether a worker is inactive and may be forgotten."""
    by_operator = worker.banned is not None and worker.banned.kind is BanKind.OPERATOR
    return not (worker.active or worker.pending or worker.invite or by_operator)


def _add(state: State, known: Network, worker: WorkerRecord, now: Part) -> None:
    before = worker.counted
    known.keys += now.keys - before.keys
    known.active += now.active - before.active
    if now.newcomers or before.newcomers:
        crowd = known.crowd
        known.newcomers += now.newcomers - before.newcomers
        known.held += now.held - before.held
        known.passed += now.passed - before.passed
        state.crowd += known.crowd - crowd


def _set_away(state: State, worker: WorkerRecord, *, is_away: bool) -> None:
    known = state.networks[worker.network]
    if is_away is (worker.worker in known.away):
        return
    before = len(known.away)
    if is_away:
        known.away[worker.worker] = None
    else:
        del known.away[worker.worker]
    if not worker.network:
        return
    for number in (before, len(known.away)):
        if number == 0:
            continue
        alike = state.by_away.setdefault(number, {})
        if number == before:
            del alike[worker.network]
        else:
            alike[worker.network] = None
        if not alike:
            del state.by_away[number]
