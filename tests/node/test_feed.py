"""The feed verifies again, fetches ahead, and waits patiently."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builder import provenance
from tests.node.batch_coordinator import (
    COORDINATOR,
    GROUPS,
    ROLLOUTS,
    STRANGER,
    TRAINER,
    WORKER,
    BatchCoordinator,
    make_bundle,
    make_run,
)
from tests.node.publisher_world import new_folder
from tests.time_world import VirtualClock

from prime_node.broadcast.publish.encoder import WholeCopy
from prime_node.broadcast.publish.publisher import Publisher
from prime_node.patience import ask_until_answered
from prime_node.ports.transport import Unreachable
from prime_node.training_data.bundles import groups_of, open_batch, open_trained_bundle
from prime_node.training_data.feed import Feed, KeptBundles, StepBatch
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.replies import BatchGroup, NotYet, TrainBatch
from prime_protocol.requests import BatchRequest
from prime_protocol.weights import WeightTensor


@pytest.fixture
async def coordinator() -> BatchCoordinator:
    """Return a coordinator with policies 0 to 3 published."""
    made = BatchCoordinator(make_run(max_steps=20))
    publisher = Publisher(made, made.run, TRAINER, clock=VirtualClock(), pending_max=9, folder=new_folder())
    await publisher.start()
    for version in range(4):
        weights = {"layer": WeightTensor("bf16", (4,), np.full(4, version, np.uint16))}
        await publisher.submit(version, WholeCopy(weights), provenance(version))
    await publisher.flush()
    await publisher.close()
    return made


@pytest.fixture
async def feed(coordinator: BatchCoordinator) -> AsyncIterator[Feed]:
    made = Feed(coordinator, coordinator.run, clock=VirtualClock())
    yield made
    await made.close()


async def test_a_batch_comes_as_groups_with_everything_that_training_needs(feed: Feed) -> None:
    batch = await feed.take(3)
    assert [group.slot for group in batch.groups] == [9, 10, 11]
    for group in batch.groups:
        assert group.worker == WORKER.key_id
        assert group.policy_versions == (1,) * ROLLOUTS
        assert len(group.completions) == len(group.rewards) == ROLLOUTS
        assert group.prompt_token_ids == (258, 97 + group.slot, 98, 259)
        assert all(len(c.token_ids) == len(c.logprobs) for c in group.completions)


async def test_the_next_batch_is_fetched_while_this_one_trains(coordinator: BatchCoordinator, feed: Feed) -> None:
    await feed.take(0)
    await coordinator.until(lambda: len(coordinator.bundles) == 2)
    assert coordinator.asked == [0, 1]
    assert (await feed.take(1)).step == 1
    assert coordinator.asked.count(1) == 1


async def test_the_next_batch_is_worked_on_while_this_one_trains(feed: Feed) -> None:
    next_is_worked_on = threading.Event()

    def work(batch: StepBatch) -> str:
        if batch.step == 1:
            next_is_worked_on.set()
        return f"{len(batch.groups)} groups of step {batch.step}"

    feed.work_ahead(work)
    assert (await feed.take(0)).made == "3 groups of step 0"
    assert await asyncio.to_thread(next_is_worked_on.wait, 60.0)
    assert (await feed.take(1)).made == "3 groups of step 1"


async def test_what_goes_wrong_ahead_is_raised_where_the_batch_is_taken(feed: Feed) -> None:
    def work(batch: StepBatch) -> None:
        if batch.step == 1:
            raise LocalError("a sequence is too long")

    feed.work_ahead(work)
    await feed.take(0)
    with pytest.raises(LocalError, match="too long"):
        await feed.take(1)


@pytest.mark.parametrize("is_honest", [True, False])
async def test_a_batch_that_does_not_follow_the_one_before_it_in_its_step_is_refused(
    coordinator: BatchCoordinator, is_honest: bool
) -> None:
    run = make_run(max_steps=20, async_level=0, preset="verl_stream", trigger_parameter_sync_step=GROUPS)
    coordinator.run, honest = run, coordinator.batch

    async def batch(request: BatchRequest) -> Envelope | NotYet:
        answer = await honest(request)
        if is_honest or request.part == 0 or isinstance(answer, NotYet):
            return answer
        served = parse_json(answer.payload, TrainBatch)
        return seal(served.model_copy(update={"previous": digest_of(b"another")}), PayloadType.BATCH, COORDINATOR)

    coordinator.batch = batch  # type: ignore[method-assign]
    feed = Feed(coordinator, run, clock=VirtualClock())
    await feed.take(0)
    if is_honest:
        assert (await feed.take(0, 1)).part == 1
    else:
        with pytest.raises(RemoteError, match="does not follow"):
            await feed.take(0, 1)
    await feed.close()


async def test_the_last_step_fetches_nothing_ahead(coordinator: BatchCoordinator) -> None:
    short = make_run(max_steps=1)
    coordinator.run = short
    feed = Feed(coordinator, short, clock=VirtualClock())
    coordinator.manifests = coordinator.manifests[:1]
    await feed.take(0)
    await feed.close()
    assert coordinator.asked == [0]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_a_bundle_is_the_same_after_a_restart_whatever_its_coordinator_has_then(
    coordinator: BatchCoordinator, tmp_path: Path
) -> None:
    async def groups_of_step(step: int, *, durable_step: int = 0) -> list[int]:
        feed = Feed(coordinator, coordinator.run, clock=VirtualClock(), copies=KeptBundles(tmp_path))
        try:
            return [group.slot for group in (await feed.take(step, durable_step=durable_step)).groups]
        finally:
            await feed.close()

    def cut(data: bytes) -> bytes:
        return data[:-1]

    whole = await groups_of_step(1)
    coordinator.spoil = cut
    assert await groups_of_step(1) == whole, "the copy replaces the damaged one"
    assert await groups_of_step(0) == []
    coordinator.spoil = None
    assert await groups_of_step(0) == [], "what was left out once is left out again"
    for name, data in files_in(tmp_path).items():
        (tmp_path / name).write_bytes(data[:-1])
    assert await groups_of_step(1) == whole, "a damaged copy is fetched again"


async def test_copies_of_bundles_are_deleted_once_the_checkpoint_is_past_them(
    coordinator: BatchCoordinator, tmp_path: Path
) -> None:
    (tmp_path / ("ab" * 32)).write_bytes(b"of an earlier process")
    feed = Feed(coordinator, coordinator.run, clock=VirtualClock(), copies=KeptBundles(tmp_path))
    for step in range(4):
        await feed.take(step, durable_step=max(0, step - 1))
    await feed.close()
    kept = files_in(tmp_path)
    assert "ab" * 32 not in kept
    assert 1 <= len(kept) <= 3, "those of step 2 and later"


async def test_an_absent_coordinator_and_a_batch_that_is_not_ready_are_waited_for(
    coordinator: BatchCoordinator, feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    manifests, coordinator.manifests = coordinator.manifests, []
    coordinator.away = 5
    caplog.set_level("INFO")
    taking = asyncio.create_task(feed.take(0))
    await coordinator.until(lambda: "policy 0 is not published" in feed.waits_for)
    coordinator.manifests = manifests
    assert (await taking).step == 0
    assert "connection refused; trying" in caplog.text


@pytest.mark.parametrize("damage", ["changed", "missing"])
async def test_a_bundle_that_the_coordinator_no_longer_has_costs_its_groups_and_not_the_run(
    coordinator: BatchCoordinator, feed: Feed, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.spoil = lambda parcel: None if damage == "missing" else parcel[:-1] + bytes([parcel[-1] ^ 1])
    batch = await feed.take(0)
    assert batch.groups == ()
    assert batch.num_left_out == GROUPS
    assert "step 0 trains without slot 0" in caplog.text
    await coordinator.until(lambda: len(coordinator.bundles) == 2)
    await feed.take(1)
    coordinator.spoil = None
    assert len((await feed.take(2)).groups) == GROUPS


async def test_bytes_that_only_the_network_changed_are_fetched_again(coordinator: BatchCoordinator, feed: Feed) -> None:
    left = [1]
    coordinator.spoil = lambda parcel: parcel[:-1] if left and left.pop() else parcel
    assert len((await feed.take(0)).groups) == GROUPS


async def test_a_clock_that_is_wrong_for_an_hour_is_waited_out_and_named(
    coordinator: BatchCoordinator, feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    why = "signed 3600 s away from the coordinator's time, 120 s are allowed; check the clock"
    coordinator.refusals += [RemoteError(ErrorCode.EXPIRED, why)] * 100
    assert len((await feed.take(0)).groups) == GROUPS
    assert why in caplog.text


async def test_taking_the_same_step_again_gives_the_same_batch(feed: Feed) -> None:
    assert await feed.take(2) == await feed.take(2)


async def test_the_durable_step_is_reported(coordinator: BatchCoordinator, feed: Feed) -> None:
    await feed.take(2, durable_step=2)
    assert coordinator.durable_step == 2


async def test_cancelling_ends_the_wait(coordinator: BatchCoordinator, feed: Feed) -> None:
    coordinator.away = 10**9
    taking = asyncio.create_task(feed.take(0))
    await coordinator.until(lambda: bool(coordinator.asked))
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking


async def test_an_answer_that_is_an_error_is_not_asked_for_again() -> None:
    asked = []

    async def refuse() -> None:
        asked.append(1)
        raise RemoteError(ErrorCode.WRONG_ROLE, "not a trainer")

    with pytest.raises(RemoteError, match="not a trainer"):
        await ask_until_answered(refuse, what="batch 0", clock=VirtualClock())
    assert len(asked) == 1


async def test_pauses_grow_and_respect_what_the_coordinator_asks_for() -> None:
    clock = VirtualClock()
    faults: list[Exception] = [Unreachable("cut"), RemoteError(ErrorCode.TOO_MANY_REQUESTS, "slow", retry_after_s=60.0)]
    at: list[float] = []

    async def answer_third() -> str:
        at.append(clock.monotonic_s())
        if faults:
            raise faults.pop(0)
        return "here"

    assert await ask_until_answered(answer_third, what="batch 0", clock=clock) == "here"
    first, second = at[1] - at[0], at[2] - at[1]
    assert 0.0 < first < 1.0
    assert 30.0 <= second <= 45.0  # PAUSE_S_MAX, and up to half as much


# Each check has a test that changes one thing in a valid batch or bundle.


def parts(coordinator: BatchCoordinator) -> tuple[bytes, list[BatchGroup]]:
    bundle, groups = make_bundle(coordinator.run, 3, coordinator.manifests[1])
    return bundle, list(groups)


def open_all(
    coordinator: BatchCoordinator,
    bundle: bytes,
    groups: list[BatchGroup],
    *,
    key: SigningKey = COORDINATOR,
    **changes: Any,
) -> int:
    """Return the number of usable groups."""
    run = coordinator.run
    batch = TrainBatch.model_validate({"run": run.digest, "step": 3, "groups": tuple(groups)} | changes)
    opened = open_batch(seal(batch, PayloadType.BATCH, key), run, step=3)
    bundles = {
        group.bundle: open_trained_bundle(bundle, digest=group.bundle, worker=group.worker, run=run)
        for group in opened.groups
    }
    return len(groups_of(opened, bundles, run))


def test_the_valid_batch_opens(coordinator: BatchCoordinator) -> None:
    assert open_all(coordinator, *parts(coordinator)) == GROUPS


def test_a_batch_by_a_stranger_is_refused(coordinator: BatchCoordinator) -> None:
    with pytest.raises(RemoteError, match="bad_signature"):
        open_all(coordinator, *parts(coordinator), key=STRANGER)


@pytest.mark.parametrize(("changes", "why"), [({"run": "0" * 64}, "wrong_run"), ({"step": 4}, "is not one of step 3")])
def test_a_batch_of_another_run_or_step_is_refused(
    coordinator: BatchCoordinator, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(RemoteError, match=why):
        open_all(coordinator, *parts(coordinator), **changes)


def test_a_batch_that_names_a_slot_twice_is_refused(coordinator: BatchCoordinator) -> None:
    bundle, groups = parts(coordinator)
    with pytest.raises(RemoteError, match="is not one of step 3"):
        open_all(coordinator, bundle, [*groups, groups[0]])


def test_other_bytes_than_the_batch_names_are_not_trained(coordinator: BatchCoordinator) -> None:
    bundle, groups = parts(coordinator)
    assert open_all(coordinator, bundle, groups)
    assert not open_all(coordinator, bundle[:-1] + bytes([bundle[-1] ^ 1]), groups)


@pytest.mark.parametrize("place", [4, 60, -1])
def test_a_bundle_that_was_never_taken_in_is_an_error_that_names_it_and_its_worker(
    coordinator: BatchCoordinator, place: int
) -> None:
    """The coordinator is at fault: it names the digest of a bundle that it should have refused."""
    bundle, _ = parts(coordinator)
    damaged = bytearray(bundle)
    damaged[place] ^= 1
    digest = digest_of(bytes(damaged))
    with pytest.raises(RemoteError, match=f"bundle {digest[:12]} of worker {WORKER.key_id[:12]}: "):
        open_trained_bundle(bytes(damaged), digest=digest, worker=WORKER.key_id, run=coordinator.run)


TAMPERED: dict[str, tuple[Callable[[BatchGroup], dict[str, Any]], str]] = {
    "worker": (lambda group: {"worker": STRANGER.key_id}, "bad_signature"),
    "no rewards": (lambda group: {"rewards": ()}, "the batch states no rewards"),
}
MISPLACED: dict[str, Callable[[BatchGroup], dict[str, Any]]] = {
    "first": lambda group: {"first": group.first + 1},
    "slot": lambda group: {"slot": group.slot - 1},
    "more rewards": lambda group: {"rewards": (*group.rewards, 0.5)},
    "policy": lambda group: {"policy_version": group.policy_version + 1},
}
"""The trainer cannot distinguish these from a bundle that a wrong validator accepted."""


@pytest.mark.parametrize("what", sorted(TAMPERED))
def test_a_group_that_does_not_fit_its_bundle_is_an_error_that_names_it(
    coordinator: BatchCoordinator, what: str
) -> None:
    bundle, groups = parts(coordinator)
    change, why = TAMPERED[what]
    last = groups[-1]
    with pytest.raises(RemoteError, match=why):
        open_all(coordinator, bundle, [last.model_copy(update=change(last))])


@pytest.mark.parametrize("what", sorted(MISPLACED))
def test_a_group_whose_completions_are_not_in_its_bundle_is_left_out(
    coordinator: BatchCoordinator, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, groups = parts(coordinator)
    last = groups[-1]
    moved = last.model_copy(update=MISPLACED[what](last))
    assert open_all(coordinator, bundle, [groups[0], moved]) == 1
    assert f"trains without slot {moved.slot} of worker" in caplog.text


@pytest.mark.parametrize(("policy", "fault"), [(0, "stale"), (1, None), (3, None)])
def test_the_step_rule_is_asked_once_more(
    coordinator: BatchCoordinator, policy: int, fault: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, groups = make_bundle(coordinator.run, 3, coordinator.manifests[policy])
    assert open_all(coordinator, bundle, list(groups)) == (GROUPS if fault is None else 0)
    warning = (
        f"step 3 trains without slot 9 of worker {WORKER.key_id}: bundle {digest_of(bundle)[:12]} was accepted, but "
    )
    assert (f"{warning}policy {policy} is {fault} for step 3" in caplog.text) is (fault is not None)


def test_a_batch_may_hold_fewer_groups_than_the_step_asks_for(coordinator: BatchCoordinator) -> None:
    bundle, groups = parts(coordinator)
    assert len(groups) == GROUPS
    assert open_all(coordinator, bundle, groups[:1]) == 1
