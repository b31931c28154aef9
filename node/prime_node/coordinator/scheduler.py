"""Who may be leased what, as functions of the state. They decide; `state.tick` carries out.

The rule (docs of step.py): slot m belongs to step m // R and may start on policy v if the step admits it, 0 <= step - v <= k.
So the slots open to a worker are those of steps v to v + k, and the lowest ones are taken first: they are what the trainer waits
for. A slot that failed, expired, was handed back or refused is among the lowest, so it is the next to be leased, by whoever holds
a policy that is fresh enough. No slot can be skipped and forgotten.

Fair share: while others take part, one worker holds at most ceil(R / workers) slots of one step at once. Who is faster comes
back sooner and gets more; who is alone gets everything.

Wasted leases: from the second lease in a row on that a worker let lapse or handed back, it holds one group at most and waits
between leases, longer each time, so that others take first what it gave back. An accepted bundle makes it like any other.
Joining again or leaving is no way around: a lease that ends without a bundle counts however it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_node.coordinator.records import State, Worker
from prime_protocol import limits, step


@dataclass(frozen=True, slots=True)
class Grant:
    """What a lease is to hold."""

    step: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing to lease now, and why."""

    reason: str
    is_worth_waiting: bool
    """True where something may come up that this worker can take with the policy that it holds."""
    pause_s: float = 0.0
    """Nothing will come up sooner."""


def choose_slots(
    state: State, worker: Worker, *, policy_version: int, rollouts_max: int, now_ms: int
) -> Grant | Refusal:
    """The lowest open slots that the policy may serve, all of one step.

    A group is never split: where `rollouts_max` is less than a group, one group is leased all the same.
    """
    assert worker.active
    assert policy_version in state.published
    rules = state.rules
    if state.draining:
        return Refusal("the operator drains the run: no more work", is_worth_waiting=False)
    if state.is_complete:
        return Refusal("all rollouts of the run are in", is_worth_waiting=False)
    if worker.is_wasteful and (refusal := _make_wait(worker, now_ms)):
        return refusal
    if len(worker.leases) >= rules.leases_per_worker_max:
        return Refusal(f"you hold {len(worker.leases)} leases, the most allowed", is_worth_waiting=False)
    if len(worker.leases) + len(worker.pending) >= rules.bundles_pending_per_worker_max:
        waiting = len(worker.pending)
        return Refusal(f"{waiting} of your bundles wait for a validator", is_worth_waiting=waiting > 0)
    groups_max = min(rollouts_max, limits.LEASE_ROLLOUTS_MAX) // rules.rollouts_per_group
    count_max = 1 if worker.is_wasteful else max(1, groups_max)
    for number in range(max(policy_version, state.first_step), state.last_step + 1):
        if not step.admits(number, policy_version, rules.async_level):
            break
        room = fair_share(state) - slots_held(state, worker, number)
        open_slots = state.steps[number].open
        if open_slots and room > 0:
            return Grant(number, tuple(open_slots[: min(room, count_max)]))
    if policy_version < state.head:
        reason = f"policy {policy_version} can serve nothing that is open; fetch policy {state.head}"
        return Refusal(reason, is_worth_waiting=False)
    return Refusal(f"all work for policy {policy_version} is given out", is_worth_waiting=True)


def _make_wait(worker: Worker, now_ms: int) -> Refusal | None:
    """A worker that wastes leases gets the next one when its pause is over and it holds none."""
    pause_s = (worker.pause_until_ms - now_ms) / 1_000
    if pause_s > 0:
        reason = f"your last {worker.wasted} leases brought nothing; wait {pause_s:.0f} s"
        return Refusal(reason, is_worth_waiting=False, pause_s=pause_s)
    if worker.leases:
        return Refusal("your last leases brought nothing: one group at a time", is_worth_waiting=False)
    return None


def fair_share(state: State) -> int:
    """Slots of one step that one worker may hold at once."""
    return -(-state.rules.groups_per_step // max(1, state.num_active))


def slots_held(state: State, worker: Worker, number: int) -> int:
    """Slots of a step that a worker has leased and not uploaded yet."""
    leases = (state.leases[lease_id] for lease_id in worker.leases)
    return sum(len(lease.slots) for lease in leases if lease.step == number)


def expired_leases(state: State, now_ms: int) -> tuple[str, ...]:
    """Open leases whose time is up. All last equally long, so the oldest ones are the first ones."""
    expired = []
    for lease_id, lease in state.leases.items():
        if lease.expires_at_ms > now_ms:
            break
        expired.append(lease_id)
    return tuple(expired)


def forgettable_step(state: State, durable_step: int) -> int:
    """How far the window may be closed behind a trainer that would resume at `durable_step`."""
    number = state.first_step
    while number < durable_step and number in state.steps and state.steps[number].fixed:
        number += 1
    return number


def waits_for(state: State) -> list[str]:
    """What the run waits for, in words: who must do something next. Empty only when the run is over."""
    rules = state.rules
    if state.head < 0:
        return ["the trainer: policy 0 is not published"]
    if state.head >= rules.max_steps:
        return []
    number = state.head
    if number not in state.steps or state.is_ready(number):
        return [f"the trainer: step {number} has all its rollouts"]
    current = state.steps[number]
    leased = {lease.worker for lease in state.leases.values() if lease.step == number}
    pending = sum(bundle.lease.step == number for bundle in state.bundles.values())
    waits = []
    if current.open:
        who = "workers: no one takes part" if state.num_active == 0 else "workers to ask for work"
        waits.append(f"{who}; {len(current.open)} groups of step {number} are open")
    if leased:
        names = ", ".join(sorted(state.workers[worker].name for worker in leased)[:5])
        waits.append(f"rollouts of step {number} from {names}")
    if pending:
        waits.append(f"validators: {pending} bundles of step {number}")
    return waits
