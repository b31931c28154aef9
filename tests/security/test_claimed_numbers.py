"""Every number that a worker claims has a bound, a known destination, and no effect on what is shown about others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    ENGINE,
    HEARTBEAT,
    TRAINER,
    World,
    make_manifest,
    make_run,
    memory_parts,
    refused,
    running,
)

from prime_node.coordinator.measure.observer import OUTLIER_FACTOR, TimesToAvailable
from prime_node.worker.pace import GenerationPace
from prime_protocol import limits
from prime_protocol.body_claim import BodyClaim
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.requests import (
    HeartbeatRequest,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    PeersRequest,
    ReceiptsRequest,
    ReturnLeaseRequest,
    Stamped,
)
from prime_protocol.rollout import RolloutHeader
from prime_protocol.telemetry import Hardware, Speed

WORKERS_MESSAGES: tuple[type[BaseModel], ...] = (
    JoinRequest,
    HeartbeatRequest,
    LeaseRequest,
    ReturnLeaseRequest,
    LeaveRequest,
    ReceiptsRequest,
    PeersRequest,
    RolloutHeader,
    BodyClaim,
)
CLAIMS: dict[str, tuple[float, float, str]] = {
    "JoinRequest.rollouts_max": (1, limits.LEASE_ROLLOUTS_MAX, "how much one lease of its own may hold"),
    "JoinRequest.hardware.cores": (0, limits.CLAIMED_CORES_MAX, "a text in its own row of the status"),
    "JoinRequest.hardware.memory_bytes": (0, limits.CLAIMED_MEMORY_BYTES_MAX, "the same text"),
    "HeartbeatRequest.policy_version": (-1, limits.STEP_MAX, "its own row; none that is not published is kept"),
    "HeartbeatRequest.bundles_spooled": (0, limits.BUNDLES_SPOOLED_MAX, "its own row"),
    "HeartbeatRequest.usable_after_ms": (0, limits.CLAIMED_MS_MAX, "ranks over workers; not longer than since then"),
    "HeartbeatRequest.swap_ms": (0, limits.CLAIMED_MS_MAX, "ranks over workers; no longer than usable_after_ms"),
    "HeartbeatRequest.downloads.peer_bytes": (0, limits.CLAIMED_BYTES_MAX, "a sum on the run's page"),
    "HeartbeatRequest.downloads.operator_bytes": (0, limits.CLAIMED_BYTES_MAX, "the same sum"),
    "HeartbeatRequest.downloads.links": (0, limits.CLAIMED_LINKS_MAX, "a mean on the run's page"),
    "HeartbeatRequest.downloads.done_bytes": (0, limits.CLAIMED_BYTES_MAX, "its own bar on the run's page"),
    "HeartbeatRequest.downloads.all_bytes": (0, limits.CLAIMED_BYTES_MAX, "the same bar"),
    "LeaseRequest.policy_version": (0, limits.STEP_MAX, "compared with what is published"),
    "LeaseRequest.rollouts_max": (1, limits.LEASE_ROLLOUTS_MAX, "how much this lease may hold"),
    "LeaseRequest.wait_s": (0, limits.WAIT_S_MAX, "how long this request is held"),
    "LeaseRequest.speed.rollout_ms": (1, limits.CLAIMED_MS_MAX, "its own leases until it is measured (scheduler.py)"),
    "LeaseRequest.speed.tokens_per_s": (0, limits.CLAIMED_TOKENS_PER_S_MAX, "its own row"),
    "LeaseRequest.speed.download_bytes_per_s": (0, limits.CLAIMED_BYTES_PER_S_MAX, "its own row"),
    "ReceiptsRequest.after": (0, limits.COUNT_MAX, "a cursor into its own receipts"),
    "PeersRequest.port": (1, 65_535, "dialled back at the address that the request comes from"),
    "PeersRequest.peers_max": (0, limits.PEERS_MAX, "how many peers this answer names"),
    "RolloutHeader.body_bytes": (0, limits.COUNT_MAX, "compared with the body"),
    "RolloutHeader.step": (0, limits.STEP_MAX, "compared with the lease"),
    "RolloutHeader.policy_version": (0, limits.STEP_MAX, "compared with the lease"),
    "RolloutHeader.num_rollouts": (1, limits.LEASE_ROLLOUTS_MAX, "compared with the lease"),
    "RolloutHeader.decompressed_bytes": (1, limits.COUNT_MAX, "compared with the run's limit and the body"),
    "BodyClaim.body_bytes": (1, limits.COUNT_MAX, "compared with the bytes that come, and with the run's limit"),
    "BodyClaim.issued_at_ms": (0, limits.COUNT_MAX, "compared with the coordinator's clock"),
    "RolloutHeader.created_at_ms": (0, limits.COUNT_MAX, "stays in the bundle; nothing reads it"),
}
"""Lowest and highest accepted value, and its destination."""


def numbers(model: type[BaseModel]) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield path, lowest and highest value of every number in a message, at any depth."""
    schema = model.model_json_schema()

    def walk(node: dict[str, Any], path: str) -> Iterator[tuple[str, float | None, float | None]]:
        if "$ref" in node:
            yield from walk(schema["$defs"][node["$ref"].rpartition("/")[2]], path)
        if node.get("type") in ("integer", "number"):
            yield path, node.get("minimum"), node.get("maximum")
        for name, inner in node.get("properties", {}).items():
            yield from walk(inner, f"{path}.{name}")
        for inner in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("prefixItems", ())):
            yield from walk(inner, path)
        for name in ("items", "additionalProperties"):
            if isinstance(node.get(name), dict):
                yield from walk(node[name], f"{path}[]")

    return walk(schema, model.__name__)


def test_every_number_in_a_workers_messages_is_known_with_its_bounds_and_its_end() -> None:
    found = {path: (low, high) for model in WORKERS_MESSAGES for path, low, high in numbers(model)}
    assert found == {path: (low, high) for path, (low, high, _) in CLAIMS.items()}


def test_the_stamp_around_a_request_holds_one_number_which_must_be_near_the_coordinators_clock() -> None:
    fields = set(Stamped.model_fields) - {"request"}
    assert fields == {"run", "nonce", "issued_at_ms", "epoch"}


@pytest.mark.parametrize(
    "change",
    [
        {"usable_after_ms": 2**53},
        {"swap_ms": limits.CLAIMED_MS_MAX + 1},
        {"bundles_spooled": 2**53},
        {"policy_version": 2**53},
        {"usable_after_ms": -1},
    ],
)
async def test_a_heartbeat_with_an_absurd_number_is_refused(change: dict[str, int]) -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        beat = HEARTBEAT.model_dump(mode="json") | change
        body = world.signed(HEARTBEAT, ANNA, request=beat)
        await refused(world, ErrorCode.WRONG_TYPE, "/v1/heartbeat", body)
        assert (await world.status())["usable"] == []


async def test_what_one_stranger_claims_moves_nothing_that_is_shown_of_others() -> None:
    honest = [SigningKey(bytes([number]) * 32) for number in range(101, 106)]
    async with running(memory_parts(make_run()), *honest, BEN) as world:
        for key, after_ms in zip(honest, (200, 220, 240, 260, 300), strict=True):
            await say(world, key, after_ms)
        before = (await world.status())["usable"]
        await say(world, BEN, limits.CLAIMED_MS_MAX)
        [after] = (await world.status())["usable"]
        assert before[0]["median_s"] <= after["median_s"] <= 0.24
        assert after["most_s"] <= 0.3
        metrics = (await world.get("/metrics"))[1].decode()
        for name in ("usable", "swap"):
            total = next(
                line for line in metrics.splitlines() if line.startswith(f"prime_policy_{name}_seconds_sum")
            ).split()[1]
            assert float(total) <= 1.22 + OUTLIER_FACTOR * 0.24


async def say(world: World, key: SigningKey, after_ms: int) -> None:
    beat = HEARTBEAT.model_copy(update={"usable_after_ms": after_ms, "swap_ms": after_ms})
    await world.client(key).heartbeat(beat)


async def test_a_policy_was_not_usable_longer_ago_than_it_is_old() -> None:
    parts = memory_parts(make_run())
    async with running(parts) as world:
        world.head, blobs = make_manifest(world.run, None, created_at_ms=parts.clock.now_ms())
        for blob in blobs:
            await world.client(TRAINER).put_blob(blob)
        await world.client(TRAINER).publish(world.head.envelope)
        await world.join(ANNA, BEN)
        await say(world, BEN, 3_600_000)
        assert (await world.status())["usable"] == []
        await say(world, ANNA, 1)
        assert (await world.status())["usable"][0]["workers"] == 1


async def test_a_policy_that_does_not_exist_is_not_shown_as_held() -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        await world.client(ANNA).heartbeat(HEARTBEAT.model_copy(update={"policy_version": limits.STEP_MAX}))
        assert (await world.status())["workers"][0]["policy_version"] == -1


@pytest.mark.parametrize("claims", [[10**9], [1, 10**9], [10, 20, 10**9], [5] * 30 + [10**9]])
def test_the_longest_of_several_claims_is_never_shown(claims: list[int]) -> None:
    usable = TimesToAvailable()
    for worker, after_ms in enumerate(claims):
        usable.heard(str(worker), 0, after_ms)
    [spread] = usable.spreads()
    assert spread.most_s <= (sorted(claims)[-2] if len(claims) > 1 else claims[0]) / 1_000
    assert usable.clipped_s(0, 1e9) <= OUTLIER_FACTOR * spread.median_s


async def test_a_join_with_an_absurd_machine_is_refused() -> None:
    async with running(memory_parts(make_run())) as world:
        hardware = Hardware(device="x", cores=1, memory_bytes=1)
        join = JoinRequest(name="a", software="1", engine=ENGINE, rollouts_max=1, hardware=hardware)
        for change in ({"cores": 2**53}, {"memory_bytes": 2**53}):
            request = join.model_dump(mode="json") | {"hardware": hardware.model_dump(mode="json") | change}
            await refused(world, ErrorCode.WRONG_TYPE, "/v1/join", world.signed(join, ANNA, request=request))


def test_an_honest_worker_claims_nothing_beyond_the_bounds() -> None:
    pace = GenerationPace()
    pace.rehearsed(tokens=10**30, seconds=1e-6, rollout_tokens=1)
    assert pace.claim(download_bytes_per_s=1e300) == Speed(
        rollout_ms=1,
        tokens_per_s=limits.CLAIMED_TOKENS_PER_S_MAX,
        download_bytes_per_s=limits.CLAIMED_BYTES_PER_S_MAX,
    )
    pace.rehearsed(tokens=1, seconds=1e12, rollout_tokens=10**6)
    claim = pace.claim(download_bytes_per_s=0.0)
    assert claim is not None
    assert claim.rollout_ms == limits.CLAIMED_MS_MAX
