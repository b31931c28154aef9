"""What keys may do that nobody knows yet. A key costs nothing, so a thousand of them must not be worth more than one.

Workers are counted by the network that they join from: /24 of IPv4, /48 of IPv6, told apart by a keyed hash. All newcomers of one
network together may do what one of them alone could: their leases and groups grow with the audits that they have passed together,
and they count as one where a step is shared out. Who has passed `newcomer_bundles` audits stands for himself: that took as many
honest bundles. Where a key was banned, new keys of its network wait, twice as long after each ban.

Networks that the operator trusts (coordinator.trusted_networks) have no name here, and no such limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_node.coordinator.state.records import Network, State, Worker
from prime_node.coordinator.state.rules import Rules

BUNDLES_PER_LEASE = 2
"""Passed audits of a network's newcomers for each further lease that they may hold at once."""
BAN_PAUSE_MS = 60_000
"""New keys wait this long after the first ban in their network, twice as long after each further one, ..."""
BAN_PAUSE_MS_MAX = 86_400_000
"""... up to a day."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a newcomer may be leased now."""

    leases: int
    """Further ones; 0: none before a bundle of its network is settled."""
    groups: int
    """In one lease."""


def is_newcomer(rules: Rules, worker: Worker) -> bool:
    return bool(worker.network) and worker.streak < rules.newcomer_bundles


def budget(state: State, worker: Worker) -> Budget | None:
    """None where it has only the limits that everybody has."""
    if not is_newcomer(state.rules, worker):
        return None
    held = passed = 0
    for other in _newcomers(state, worker.network):
        held += len(other.leases) + len(other.pending)
        passed += other.streak
    leases_max = min(state.rules.leases_per_worker_max, 1 + passed // BUNDLES_PER_LEASE)
    return Budget(leases=max(0, leases_max - held), groups=1 + passed)


def pause_ms(state: State, network: str, now_ms: int) -> int:
    """How long a new key of this network has to wait; 0: not at all."""
    known = state.networks.get(network)
    bans = [] if known is None else [state.workers[name].banned for name in known.workers]
    at_ms = [ban.at_ms for ban in bans if ban is not None]
    if not at_ms:
        return 0
    pause = min(BAN_PAUSE_MS << min(len(at_ms) - 1, 16), BAN_PAUSE_MS_MAX)
    return max(0, max(at_ms) + pause - now_ms)


def num_active(state: State, network: str) -> int:
    """Workers of a network that take part."""
    known = state.networks.get(network)
    return 0 if known is None else sum(state.workers[name].active for name in known.workers)


def enter(state: State, worker: Worker, network: str) -> None:
    """A worker has joined from a network, perhaps another one than before."""
    if worker.network != network:
        leave(state, worker)
        worker.network = network
    if network:
        known = state.networks.setdefault(network, Network())
        if worker.worker not in known.workers:
            known.workers.append(worker.worker)
    recount(state, network)


def leave(state: State, worker: Worker) -> None:
    """A worker is about to be forgotten, or has gone to another network."""
    known = state.networks.get(worker.network)
    if known is None:
        return
    known.workers.remove(worker.worker)
    recount(state, worker.network)
    if not known.workers:
        del state.networks[worker.network]


def forget_one(state: State) -> None:
    """The oldest worker that is away, and that nothing speaks against keeping in mind."""
    for key, worker in state.workers.items():
        if not worker.active and not worker.banned and not worker.pending:
            leave(state, worker)
            del state.workers[key]
            return


def recount(state: State, network: str) -> None:
    """After somebody of this network came, went, or was audited."""
    known = state.networks.get(network)
    if known is not None:
        crowd = max(0, len(_newcomers(state, network)) - 1)
        state.crowd += crowd - known.crowd
        known.crowd = crowd


def _newcomers(state: State, network: str) -> list[Worker]:
    """Those that take part."""
    workers = [state.workers[name] for name in state.networks[network].workers if name in state.workers]
    return [worker for worker in workers if worker.active and is_newcomer(state.rules, worker)]
