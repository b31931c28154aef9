"""Time to available of a policy: measured at the worker, sent in the heartbeat, shown by the coordinator."""

from __future__ import annotations

from tests.node.coordinator_world import ANNA, BEN, make_run, memory_parts, running

from prime_node.coordinator.measure.observer import POLICIES_MAX, TimesToAvailable
from prime_protocol.requests import HeartbeatRequest, WorkerState


def test_the_spread_is_that_of_the_workers_first_words() -> None:
    usable = TimesToAvailable()
    for worker, after_ms in (("a", 400), ("b", 1_900), ("c", 500), ("a", 9_000)):
        usable.heard(worker, 3, after_ms)
    [spread] = usable.spreads()
    assert (spread.policy_version, spread.workers, spread.median_s, spread.most_s) == (3, 3, 0.5, 0.5)


def test_only_the_newest_policies_are_remembered() -> None:
    usable = TimesToAvailable()
    for version in range(2 * POLICIES_MAX):
        usable.heard("a", version, 1)
    assert len(usable.spreads()) == POLICIES_MAX
    assert usable.spreads()[-1].policy_version == 2 * POLICIES_MAX - 1
    assert not usable.heard("a", POLICIES_MAX - 1, 1), "otherwise a repeated report counts each time"
    assert usable.heard("b", POLICIES_MAX, 1)


async def test_status_and_metrics_show_what_the_heartbeats_say() -> None:
    async with running(memory_parts(make_run()), ANNA, BEN) as world:
        for key, version, after_ms in ((ANNA, 0, 250), (BEN, 0, 750), (BEN, 7, 1)):  # there is no policy 7
            beat = HeartbeatRequest(
                state=WorkerState.IDLE,
                policy_version=version,
                bundles_spooled=0,
                usable_after_ms=after_ms,
                swap_ms=after_ms // 5,
            )
            await world.client(key).heartbeat(beat)
        shown = (await world.status())["usable"]
        assert shown == [{"policy_version": 0, "workers": 2, "median_s": 0.25, "most_s": 0.25}]
        _, metrics, _ = await world.get("/metrics")
        assert b"prime_policy_usable_seconds_count 2.0" in metrics
        assert b"prime_policy_swap_seconds_count 2.0" in metrics
