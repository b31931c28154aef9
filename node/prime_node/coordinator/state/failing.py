"""Problems whose environment fails whoever plays them: their slots draw another one, so that they hold up no run.

An environment fails on a worker because the worker's machine is broken, or because it fails anywhere. Nobody can tell from one
report. So a slot draws on once enough voices have said that its problem fails: each key of a network that the operator trusts is
a voice, all keys of another network together are one, and the validators, whose own environment failed as well, are one. It
takes VOICES_MAX, or as many as take part where they are fewer, whoever has spoken included: a stranger whose answer breaks the
validators' environment, or who leaves, outvotes nobody by that. Of strangers it takes never fewer than two. Whose bundle is
`incomplete` speaks too, though a validator's environment went on: it is workers' machines that have to play the problem.

What a stranger gains: whoever holds that many networks, is leased the same slot with each of them before anybody else plays its
problem, and lets as many leases end for nothing, exchanges one problem for another that he cannot foresee. With a share f of the
leases that is a chance of f^3. An accepted group ends the count, and each lease handed back costs what it always costs.

A slot of which this was said is leased alone: what is said next is of it and of no neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.slot_records import StepSlots

VOICES_MAX = 3
"""So many say that a problem fails, and its slot draws another."""
JUDGES = "validators"
"""The voice of them all."""


def _episodes_failed(state: State, event: ev.EpisodesFailed, at_ms: int) -> list[Effect]:
    _forget(state)
    worker = state.workers.get(event.worker)
    network = event.worker if worker is None else worker.network or worker.worker
    for slot in event.slots:
        step = state.steps.get(slot // state.rules.groups_per_step)
        if step is None or slot in step.accepted or slot in state.curriculum.redraw:
            continue
        said = {*state.failing.get(slot, ()), network, *((JUDGES,) if event.is_judged else ())}
        if len(said) >= voices_needed(state, said):
            state.failing.pop(slot, None)
            state.curriculum.redraw.add(slot)
            state.num_redrawn += 1
        else:
            state.failing[slot] = tuple(sorted(said))
    return []


def voices_needed(state: State, said: Collection[str]) -> int:
    """How many have to say that a problem fails, of which these have."""
    found = (name for name, known in state.networks.items() if name and known.active)
    strangers = sum(1 for _ in islice(found, VOICES_MAX))  # more change nothing, and a run may have thousands
    trusted = state.networks[""].active if "" in state.networks else 0
    besides = sum(not _takes_part(state, voice) for voice in said)
    return min(VOICES_MAX, max(trusted + strangers + besides, 2 if strangers else 1))


def _takes_part(state: State, voice: str) -> bool:
    network, worker = state.networks.get(voice), state.workers.get(voice)
    return bool(network is not None and network.active) or (worker is not None and worker.active)


def alone(state: State, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Of slots that are about to be leased, those before the first that fails; or that one alone."""
    for place, slot in enumerate(slots):
        if slot in state.failing:
            return slots[: max(1, place)]
    return slots


def waits(state: State, steps: Mapping[int, StepSlots]) -> list[str]:
    """What the operator should know of the problems of these steps that fail."""
    failing = [slot for slot in state.failing if slot // state.rules.groups_per_step in steps]
    if not failing:
        return []
    said = max((state.failing[slot] for slot in failing), key=len)
    needed = voices_needed(state, said)
    return [
        f"{len(failing)} problems that fail, the first at slot {min(failing)}: {len(said)} of {needed} have said so"
    ]


def _forget(state: State) -> None:
    """What was said of slots that are trained and durable."""
    size = state.rules.groups_per_step
    state.curriculum.forget_before(state.first_step, groups_per_step=size)
    for slot in [slot for slot in state.failing if slot < state.first_step * size]:
        del state.failing[slot]


HANDLERS: Mapping[type, Callable[[State, Any, int], list[Effect]]] = {ev.EpisodesFailed: _episodes_failed}
