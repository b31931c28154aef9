"""The memory of nonces is bounded, and no kind of sender and no key can use up the share of others."""

from __future__ import annotations

import pytest
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, TRAINER, make_run, memory_parts, running

from prime_node.coordinator.api.limiter import Buckets
from prime_node.coordinator.api.nonces import MEMORY_S, Nonces, Room
from prime_node.coordinator.config import CoordinatorConfig
from prime_protocol.errors import ErrorCode, RemoteError

SETTINGS = CoordinatorConfig.load({})
RATE = SETTINGS.requests_per_second


def refusal(nonces: Nonces, signer: str, nonce: str, now_s: float, room: Room, network: str = "") -> ErrorCode | None:
    try:
        nonces.spend(signer, nonce.zfill(32), now_s, room=room, network=network)
    except RemoteError as error:
        return error.code
    return None


def fill(nonces: Nonces, signer: str, room: Room, now_s: float = 1.0, network: str = "") -> int:
    """Return the number of requests until this signer is refused."""
    number = 0
    while refusal(nonces, signer, f"{number}", now_s, room, network) is None:
        number += 1
    return number


def test_a_key_that_spends_as_fast_as_its_rate_allows_is_refused_by_its_rate_alone() -> None:
    """The test covers twice the time that a nonce is remembered, with the default settings."""
    nonces, buckets = Nonces(nonces_max=SETTINGS.nonces_max), Buckets(per_second=RATE, burst=10 * RATE)
    spent, now_s = 0, 1.0
    while now_s < 1.0 + 2 * MEMORY_S:
        try:
            buckets.spend("greedy", now_s)
        except RemoteError:
            now_s += 0.1
            continue
        assert refusal(nonces, "greedy", f"{spent}", now_s, Room.MEMBERS) is None
        spent += 1
    assert spent >= RATE * 2 * MEMORY_S
    assert refusal(nonces, "modest", "1", now_s, Room.MEMBERS) is None


@pytest.mark.parametrize("num_greedy", [1, 40, 150])
def test_keys_that_spend_all_they_can_leave_room_for_one_that_spends_little(num_greedy: int) -> None:
    nonces = Nonces(nonces_max=100_000)
    spent = {f"greedy {number}": fill(nonces, f"greedy {number}", Room.MEMBERS) for number in range(num_greedy)}
    for name in spent:
        assert refusal(nonces, name, "more", 1.0, Room.MEMBERS) is ErrorCode.TOO_MANY_REQUESTS
    honest = [refusal(nonces, "modest", f"{number}", 1.0, Room.MEMBERS) for number in range(64)]
    assert honest == [None] * 64
    for room in (Room.ROLES, Room.STRANGERS):
        assert fill(nonces, f"one of the {room}", room) > 1_000
    for name, number in spent.items():
        for nonce in {0, number // 2, number - 1} - {-1}:
            assert refusal(nonces, name, f"{nonce}", 2.0, Room.MEMBERS) is ErrorCode.REPLAYED


def test_strangers_count_by_their_network_and_take_nothing_from_others() -> None:
    nonces = Nonces(nonces_max=10_000)
    number = 0
    while refusal(nonces, f"key {number}", "0", 1.0, Room.STRANGERS, "198.51.100.0/24") is None:
        number += 1
    assert number < 250
    assert refusal(nonces, "newcomer", "0", 1.0, Room.STRANGERS, "203.0.113.0/24") is None
    for network in range(10_000):
        refusal(nonces, f"bot {network}", "0", 1.0, Room.STRANGERS, f"network {network}")
    assert refusal(nonces, "late", "0", 1.0, Room.STRANGERS, "192.0.2.0/24") is ErrorCode.UNAVAILABLE
    for room in (Room.MEMBERS, Room.ROLES):
        assert refusal(nonces, f"one of the {room}", "0", 1.0, room) is None


def test_a_key_that_changes_its_kind_replays_nothing() -> None:
    nonces = Nonces(nonces_max=1_000)
    assert refusal(nonces, "anna", "1", 1.0, Room.STRANGERS, "198.51.100.0/24") is None
    for room in Room:
        assert refusal(nonces, "anna", "1", 1.0 + MEMORY_S, room) is ErrorCode.REPLAYED


def test_what_is_forgotten_is_given_back() -> None:
    nonces = Nonces(nonces_max=1_000)
    full = fill(nonces, "anna", Room.MEMBERS)
    later_s = 1.0 + MEMORY_S
    nonces.spend("ben", "1", later_s + 1.0)
    assert refusal(nonces, "anna", "new", later_s + 1.0, Room.MEMBERS) is ErrorCode.TOO_MANY_REQUESTS
    nonces.spend("ben", "2", later_s + MEMORY_S + 3.0)
    assert fill(nonces, "anna", Room.MEMBERS, later_s + MEMORY_S + 3.0) == full


def test_a_run_with_many_workers_has_room_for_what_each_of_them_sends() -> None:
    nonces, members = Nonces(nonces_max=1_000), 300
    for number in range(200):
        for member in range(members):
            nonces.spend(f"worker {member}", f"{number}", number * MEMORY_S / 200, num_members=members)
    with pytest.raises(RemoteError):
        nonces.spend("worker 0", "7", MEMORY_S, num_members=members)


async def test_a_member_that_uses_up_its_share_leaves_others_and_the_run_s_keys_theirs() -> None:
    async with running(memory_parts(make_run(), nonces_max=1_000), ANNA, BEN) as world:
        await world.learn_epoch()
        statuses = [(await world.post("/v1/heartbeat", world.signed(HEARTBEAT, ANNA)))[0] for _ in range(200)]
        assert statuses[:10] == [200] * 10
        assert statuses[-10:] == [429] * 10
        await world.client(BEN).heartbeat(HEARTBEAT)
        await world.client(TRAINER).put_blob(b"x" * 300_000)
