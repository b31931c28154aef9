"""A log and a snapshot that the release before schedules wrote (data/, by that release's own code) still mean the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.node.scheduler_world import RULES, Run

from prime_node.broadcast.follow.paths import Route
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants, scheduler, snapshot
from prime_node.coordinator.state.endings import leases_remembered
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.tick import tick
from prime_protocol.verdict import RejectReason

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


def test_an_older_log_of_many_workers_may_speak_of_any_of_the_last_64_leases() -> None:
    """Grants that do not say how many are remembered. 630 workers: the next grant keeps 26 of each."""
    names = ["anna", *map(str, range(629))]
    leases = [f"lease-{number}" for number in range(40)]
    log: list[ev.Event] = [ev.WorkerJoined(name, name, "1", "engine", 64) for name in names]
    log += [ev.ManifestPublished(0, "d", (Route(None, 1),))]
    for number, lease in enumerate(leases):
        log += [ev.LeaseGranted(lease, "anna", 0, 0, "d", (number,), 2_000)]
        if number == 3:
            log += [ev.BundleArrived("first", lease, "anna", 1, 1)]
            log += [ev.VerdictGiven("first", None, "", (1.0,), 10, "validator")]
        else:
            log += [ev.LeasesExpired((lease,))]
    log += [ev.BundleArrived("late", leases[4], "anna", 1, 1)]
    log += [ev.BundleTurnedAway("too late", leases[5], "anna", 1, RejectReason.LEASE_EXPIRED, "")]
    log += [ev.BundleContradicted(leases[3], "anna", "second")]
    old = [json.loads(ev.to_json(event)) for event in log]
    for event in old:
        event.pop("remembered", None)

    state = State(dataclasses.replace(RULES, workers_max=630, groups_per_step=64, rollouts_per_group=1))
    for event in old:
        tick(state, ev.from_json(json.dumps(event)), 1_000)
    invariants.check(state)
    anna = state.workers["anna"]
    assert anna.pending == ("late",)
    assert anna.refused == {RejectReason.LEASE_EXPIRED: 1, RejectReason.EQUIVOCATION: 1}
    assert anna.strikes == 1
    assert len(anna.ended) == 39
    tick(state, ev.LeaseGranted("new", "anna", 0, 0, "d", (40,), 2_000, remembered=leases_remembered(state)), 1_000)
    assert [lease.lease_id for lease in anna.ended] == leases[-26:]


def test_a_snapshot_with_a_workers_bundles_and_leases_by_name_is_read() -> None:
    run = Run()
    run.join("anna")
    run.publish()
    run.accept(run.upload(run.granted("anna", 0, rollouts_max=2)))
    bundle = run.upload(run.granted("anna", 0))
    older = json.loads(snapshot.to_json(run.state))
    assert older["workers"]["anna"]["pending"] == [bundle]
    older["workers"]["anna"]["pending"] = {run.state.bundles[bundle].lease.lease_id: bundle}
    older["workers"]["anna"]["ended"] = {one["lease_id"]: one for one in older["workers"]["anna"]["ended"]}
    assert snapshot.from_json(json.dumps(older)) == run.state
