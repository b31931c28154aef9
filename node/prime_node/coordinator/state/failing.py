"""Problems whose environment fails: after a quorum of reports their slot draws another problem, so they do not block the run.

An environment fails because one worker's machine is broken, or because it fails everywhere. One report cannot tell which. So a
slot draws another problem once a quorum reports that its problem fails. Each key of a trusted network is one reporter. All keys
of another network together are one reporter. The validators, if their own environment failed as well, are one reporter. The
quorum is QUORUM_MAX, or all participants and past reporters if they are fewer. Past reporters count, so a stranger cannot
outvote others by breaking the validators' environment or by leaving. With strangers present, the quorum is at least two. An
`incomplete` bundle is a report too, even if the validator's environment worked: workers' machines have to run the problem.

What a stranger gains: it needs a quorum of networks. With each it must lease the same slot before anyone else runs its problem,
and abandon that lease. Then it exchanges one problem for another that it cannot foresee. With a share f of the leases the
chance is f^3. An accepted group resets the count, and each returned lease has its usual cost.

A reported slot is leased alone, so that the next report concerns this slot and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.slot_records import StepSlots

QUORUM_MAX = 3
"""Reports after which a slot draws another problem."""
JUDGES = "validators"
"""The reporter name that all validators share."""


def _episodes_failed(state: State, event: ev.EpisodesFailed, at_ms: int) -> list[Effect]:
    _forget(state)
    worker = state.workers.get(event.worker)
    network = event.worker if worker is None else worker.network or worker.worker
    for slot in event.slots:
        step = state.steps.get(slot // state.rules.groups_per_step)
        if step is None or slot in step.accepted or slot in state.curriculum.redraw:
            continue
        reporters = {*state.failing.get(slot, ()), network, *((JUDGES,) if event.is_judged else ())}
        if len(reporters) >= quorum_of(state, reporters):
            state.failing.pop(slot, None)
            state.curriculum.redraw.add(slot)
            state.num_redrawn += 1
        else:
            state.failing[slot] = tuple(sorted(reporters))
    return []


def quorum_of(state: State, reporters: Collection[str]) -> int:
    """Return the quorum for a problem that `reporters` have reported so far."""
    found = (name for name, known in state.networks.items() if name and known.active)
    strangers = sum(1 for _ in islice(found, QUORUM_MAX))  # more change nothing, and a run may have thousands
    trusted = state.networks[""].active if "" in state.networks else 0
    besides = sum(not _takes_part(state, reporter) for reporter in reporters)
    return min(QUORUM_MAX, max(trusted + strangers + besides, 2 if strangers else 1))


def _takes_part(state: State, reporter: str) -> bool:
    network, worker = state.networks.get(reporter), state.workers.get(reporter)
    return bool(network is not None and network.active) or (worker is not None and worker.active)


def alone(state: State, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Return the slots before the first reported one, or that one alone if it comes first."""
    for place, slot in enumerate(slots):
        if slot in state.failing:
            return slots[: max(1, place)]
    return slots


def waits(state: State, steps: Mapping[int, StepSlots]) -> list[str]:
    """Describe the reported problems of these steps for the operator."""
    failing = [slot for slot in state.failing if slot // state.rules.groups_per_step in steps]
    if not failing:
        return []
    reporters = max((state.failing[slot] for slot in failing), key=len)
    needed = quorum_of(state, reporters)
    return [
        f"{len(failing)} problems that fail, the first at slot {min(failing)}: {len(reporters)} of {needed} needed reports"
    ]


def _forget(state: State) -> None:
    """Drop the reports on slots that are trained and durable."""
    size = state.rules.groups_per_step
    state.curriculum.forget_before(state.first_step, groups_per_step=size)
    for slot in [slot for slot in state.failing if slot < state.first_step * size]:
        del state.failing[slot]


HANDLERS: Mapping[type, Callable[[State, Any, int], list[Effect]]] = {ev.EpisodesFailed: _episodes_failed}
