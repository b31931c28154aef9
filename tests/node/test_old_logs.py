"""A log and a snapshot that the release before schedules wrote (data/, by that release's own code) still mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants, scheduler, snapshot
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.tick import tick

OLD = json.loads((Path(__file__).parent / "data" / "coordinator_log_before_schedules.json").read_text())


def replayed(state: State, events: list[tuple[int, dict[str, Any]]]) -> State:
    for at_ms, event in events:
        tick(state, ev.from_json(json.dumps(event)), at_ms)
        invariants.check(state)
    return state


def from_the_start() -> State:
    rules = snapshot.from_json(json.dumps(OLD["end"])).rules
    return replayed(State(rules), OLD["events"])


def from_the_snapshot() -> State:
    state = snapshot.from_json(json.dumps(OLD["snapshot"]))
    invariants.check(state)
    return replayed(state, OLD["events"][OLD["snapshot_after"] :])


@pytest.mark.parametrize("restore", [from_the_start, from_the_snapshot])
def test_an_older_log_leads_where_it_led(restore: Any) -> None:
    state, old = restore(), OLD["end"]
    for name in ("head", "first_step", "num_active", "num_leases", "accepted", "refused", "evidence"):
        assert getattr(state, name) == old[name], name
    assert list(state.leases) == list(old["leases"])
    for number, step in old["steps"].items():
        now = state.steps[int(number)]
        assert sorted(now.open) == step["open"]
        assert sorted(now.accepted) == sorted(int(slot) for slot in step["accepted"])
        assert (now.fixed, now.attempts) == (step["fixed"], {int(slot): n for slot, n in step["attempts"].items()})
        for slot, group in step["accepted"].items():
            mine = now.accepted[int(slot)]
            assert (mine.bundle, mine.worker, list(mine.rewards)) == (
                group["bundle"],
                group["worker"],
                group["rewards"],
            )
    assert state.durable_step == 1
    assert state.batches == {1: [(4, 5, 6, 7)], 2: [(8, 9, 10, 11)]}
    assert scheduler.waits_for(state) == ["the trainer: step 2 has its rollouts"]


def test_a_restored_state_is_written_and_read_like_any_other() -> None:
    state = from_the_snapshot()
    assert snapshot.from_json(snapshot.to_json(state)) == state
