"""The state machine with its log, driven by the decisions that the daemon's handlers take."""

from __future__ import annotations

from collections.abc import Sequence

from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.state import batches, records
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect
from prime_node.coordinator.state.endings import leases_remembered
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import SchedulerRules
from prime_node.coordinator.state.scheduler import NothingToLease, choose_slots
from prime_node.coordinator.state.tick import tick
from prime_protocol.verdict import RejectReason

RULES = SchedulerRules(
    run="r" * 64,
    async_level=2,
    groups_per_step=6,
    rollouts_per_group=2,
    max_steps=5,
    lease_ms=1_000,
    strikes_max=2,
    workers_max=8,
    leases_per_worker_max=3,
    bundles_pending_per_worker_max=4,
)


class Run:
    """A state with its log, driven by the decisions that the daemon's handlers take.

    With workers, they have joined, and policy 0 is published.
    """

    def __init__(self, rules: SchedulerRules = RULES, *, workers: Sequence[str] = ()) -> None:
        self.state = State(rules)
        self.log: list[tuple[ev.Event, int]] = []
        self.now_ms = 1_000
        self.effects: list[Effect] = []
        self.num_bundles = 0
        if workers:
            self.join(*workers)
            self.publish()

    def do(self, event: ev.Event) -> list[Effect]:
        self.log.append((event, self.now_ms))
        effects = tick(self.state, event, self.now_ms)
        self.effects += effects
        return effects

    def join(self, *workers: str, network: str = "") -> None:
        for worker in workers:
            self.do(ev.WorkerJoined(worker, worker, "1", "engine", 64, network))

    def publish(self) -> None:
        version = self.state.head + 1
        self.do(ev.ManifestPublished(version, f"{version:064d}", (UpdateRoute(None, 100),)))

    def lease(self, worker: str, policy_version: int, rollouts_max: int = 64) -> records.LeaseRecord | NothingToLease:
        found = choose_slots(
            self.state,
            self.state.workers[worker],
            policy_version=policy_version,
            rollouts_max=rollouts_max,
            now_ms=self.now_ms,
        )
        if isinstance(found, NothingToLease):
            return found
        lease_id = f"lease-{self.state.num_leases}"
        expires = self.now_ms + self.state.rules.lease_ms
        digest = self.state.published[policy_version].digest
        kept = leases_remembered(self.state)
        self.do(
            ev.LeaseGranted(lease_id, worker, found.step, policy_version, digest, found.slots, expires, remembered=kept)
        )
        return self.state.leases[lease_id]

    def granted(self, worker: str, policy_version: int, rollouts_max: int = 64) -> records.LeaseRecord:
        lease = self.lease(worker, policy_version, rollouts_max)
        assert isinstance(lease, records.LeaseRecord), lease
        return lease

    def upload(self, lease: records.LeaseRecord, *, audited: bool = True, seeded: bool = True) -> str:
        bundle = f"bundle-{self.num_bundles}"
        self.num_bundles += 1
        num_rollouts = len(lease.slots) * self.state.rules.rollouts_per_group
        self.do(ev.BundleArrived(bundle, lease.lease_id, lease.worker, num_rollouts, 1_000, audited, seeded))
        return bundle

    def accept(self, bundle: str, versions: tuple[tuple[int, int], ...] = ()) -> list[Effect]:
        num_rollouts = self.state.bundles[bundle].num_rollouts
        return self.do(ev.VerdictGiven(bundle, None, "", (0.5,) * num_rollouts, 10, "validator", versions))

    def refuse(self, bundle: str, reason: RejectReason) -> list[Effect]:
        return self.do(ev.VerdictGiven(bundle, reason, "", (), 0, "validator"))

    def train(self, worker: str, policy_version: int) -> None:
        """Fill the lowest step, give it to the trainer and publish the resulting policy."""
        while not self.fix():
            self.accept(self.upload(self.granted(worker, policy_version)))
        self.publish()

    def fix(self) -> bool:
        """Do what the daemon does when the trainer asks for the next batch.

        Returns True if that was the last batch of a step.
        """
        step = batches.next_step(self.state)
        if old := batches.stale_slots(self.state, step):
            self.do(ev.GroupsDropped(old))
        chosen = batches.choose_batch(self.state)
        if chosen is not None:
            self.do(ev.BatchFixed(step, chosen))
        return self.state.is_given(step)
