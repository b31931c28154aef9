"""Machines of a person: who may join as one, what a ban covers, and that a person gains nothing by its number of machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.persons_world import CARL, DAY_MS, OTHER, PERSON, delegation, join
from tests.node.scheduler_world import RULES, Run
from tests.time_world import VirtualClock

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants, snapshot
from prime_node.coordinator.state.endings import WORKERS_REMEMBERED_FACTOR
from prime_node.coordinator.state.persons import MachineRevoked
from prime_node.coordinator.state.scheduler import NothingToLease
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.limits import REQUEST_AGE_S_MAX
from prime_protocol.requests import AdminRequest, LeaveRequest, RevokeRequest

AHEAD_MS = round(1_000 * REQUEST_AGE_S_MAX)


async def refused(world: World, machine: SigningKey, text: str = "") -> ErrorCode:
    with pytest.raises(RemoteError) as caught:
        await join(world, machine, text)
    return caught.value.code


async def test_a_delegation_that_is_not_this_person_s_for_this_machine_this_run_and_now_admits_nobody() -> None:
    async with running(memory_parts(make_run())) as world:
        now_ms = world.parts.clock.now_ms()
        good = delegation(world, ANNA)
        cases = {
            "signed by a stranger": (delegation(world, ANNA, by=OTHER), ErrorCode.BAD_SIGNATURE),
            "signed by the machine": (delegation(world, ANNA, by=ANNA), ErrorCode.BAD_SIGNATURE),
            "stolen from another machine": (delegation(world, BEN), ErrorCode.WRONG_ROLE),
            "of another run": (delegation(world, ANNA, run="0" * 64), ErrorCode.WRONG_RUN),
            "expired": (
                delegation(world, ANNA, issued_at_ms=now_ms - DAY_MS, expires_at_ms=now_ms - 1),
                ErrorCode.NOT_INVITED,  # EXPIRED is for clocks: its machine asked again without end
            ),
            "dated ahead, to outlive a revocation": (
                delegation(world, ANNA, issued_at_ms=now_ms + DAY_MS, expires_at_ms=now_ms + 2 * DAY_MS),
                ErrorCode.EXPIRED,
            ),
            "cut": (good[:-9], ErrorCode.MALFORMED),
            "one character changed": (good[:200] + ("A" if good[200] != "A" else "B") + good[201:], None),
        }
        for name, (text, code) in cases.items():
            found = await refused(world, ANNA, text)
            assert found is code or code is None, (name, found)
        assert (await world.status())["num_workers"] == 0
        await join(world, ANNA, good)
        assert [row["person"] for row in (await world.status())["workers"]] == [PERSON.key_id]


async def test_a_key_is_a_person_or_a_machine_and_stays_with_its_person() -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await join(world, ANNA, delegation(world, ANNA))
        assert await refused(world, PERSON) is ErrorCode.WRONG_ROLE, "a person takes no part"
        assert await refused(world, PERSON, delegation(world, PERSON, OTHER)) is ErrorCode.WRONG_ROLE, "a chain"
        assert await refused(world, BEN, delegation(world, BEN, ANNA)) is ErrorCode.WRONG_ROLE, "a chain, or a loop"
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
        await world.judge()
        await world.client(ANNA).leave(LeaveRequest())
        assert await refused(world, ANNA) is ErrorCode.WRONG_ROLE, "it cannot leave its person"
        assert await refused(world, ANNA, delegation(world, ANNA, OTHER)) is ErrorCode.WRONG_ROLE
        await join(world, ANNA, delegation(world, ANNA))


async def test_a_revoked_machine_is_out_at_once_and_no_date_of_a_delegation_brings_it_back() -> None:
    """Before, a delegation that a fast clock had dated more than 120 s ahead outlived the revocation."""
    parts = memory_parts(make_run())
    late_s = 0.0

    class Later(VirtualClock):
        def now_ms(self) -> int:
            return super().now_ms() + round(1_000 * late_s)

    async with running(replace(parts, clock=Later())) as world:
        await world.publish()
        begun_ms = world.parts.clock.now_ms()
        leads = (-1_000, AHEAD_MS, 10 * AHEAD_MS)
        old, ahead, far_ahead = (delegation(world, ANNA, issued_at_ms=begun_ms + lead) for lead in leads)
        await join(world, ANNA, old)
        await join(world, BEN)
        for thief in (OTHER, BEN, ANNA):
            with pytest.raises(RemoteError) as caught:
                await world.client(thief).revoke(RevokeRequest(machine=ANNA.key_id))
            assert caught.value.code is ErrorCode.UNKNOWN_WORKER
        lease = await world.lease(ANNA)
        for _ in range(2):
            await world.client(PERSON).revoke(RevokeRequest(machine=ANNA.key_id))
        with pytest.raises(RemoteError) as caught:
            await world.client(ANNA).upload(make_parcel(lease, ANNA))
        assert caught.value.code is ErrorCode.UNKNOWN_WORKER
        assert await refused(world, ANNA, old) is ErrorCode.REVOKED
        assert await refused(world, ANNA, ahead) is ErrorCode.REVOKED, "it was made before, by a clock that is fast"
        assert await refused(world, ANNA) is ErrorCode.WRONG_ROLE
        assert await refused(world, ANNA, far_ahead) is ErrorCode.EXPIRED, "it is not valid yet"
        late_s = 20 * AHEAD_MS / 1_000
        assert await refused(world, ANNA, far_ahead) is ErrorCode.REVOKED, "now it would be"
        assert await refused(world, ANNA, delegation(world, ANNA)) is ErrorCode.REVOKED, "a newer one too"
        await join(world, CARL, delegation(world, CARL))


async def test_a_ban_of_a_person_covers_its_machines_and_a_ban_of_a_machine_ends_new_ones() -> None:
    async with running(memory_parts(make_run())) as world:
        operator = world.client(COORDINATOR)
        await join(world, ANNA, delegation(world, ANNA))
        await operator.admin(AdminRequest(action="ban", worker=ANNA.key_id))
        assert await refused(world, BEN, delegation(world, BEN)) is ErrorCode.NOT_INVITED, "the next key of its own"
        await operator.admin(AdminRequest(action="unban", worker=ANNA.key_id))
        await join(world, BEN, delegation(world, BEN))
        for _ in range(2):
            await operator.admin(AdminRequest(action="ban", worker=PERSON.key_id, reason="sells rubbish"))
        rows = (await world.status())["workers"]
        assert {row["worker"]: row["banned"]["reason"] for row in rows} == {
            ANNA.key_id: "sells rubbish",
            BEN.key_id: "sells rubbish",
        }
        assert await refused(world, CARL, delegation(world, CARL)) is ErrorCode.BANNED
        await operator.admin(AdminRequest(action="unban", worker=PERSON.key_id))
        for machine in (ANNA, BEN, CARL):
            await join(world, machine, delegation(world, machine))


async def test_a_person_has_no_more_machines_than_the_limit_and_each_uses_up_an_invitation() -> None:
    async with running(memory_parts(make_run(), machines_per_person_max=2)) as world:
        await join(world, ANNA, delegation(world, ANNA))
        await join(world, BEN, delegation(world, BEN))
        assert await refused(world, CARL, delegation(world, CARL)) is ErrorCode.NOT_INVITED
        await join(world, CARL, delegation(world, CARL, OTHER))
    async with running(memory_parts(make_run(), allowed_workers=(PERSON.key_id,))) as world:
        await join(world, ANNA, delegation(world, ANNA))
        assert await refused(world, BEN, delegation(world, BEN, OTHER)) is ErrorCode.NOT_INVITED
        assert await refused(world, BEN) is ErrorCode.NOT_INVITED
    async with running(memory_parts(make_run(), invites_needed=True)) as world:
        assert await refused(world, ANNA, delegation(world, ANNA)) is ErrorCode.NOT_INVITED


def joined(run: Run, machine: str, person: str, until_ms: int = 10**12) -> None:
    run.do(ev.WorkerJoined(machine, machine, "1", "engine", 64, "net", person=person, delegated_until_ms=until_ms))


def test_a_machine_gets_no_lease_after_the_end_of_its_delegation_and_what_it_has_in_hand_is_accepted() -> None:
    run = Run()
    run.publish()
    joined(run, "machine", "person", run.now_ms + 500)
    lease = run.granted("machine", 0)
    run.now_ms += 501
    found = run.lease("machine", 0)
    assert isinstance(found, NothingToLease)
    assert "authorise it again" in found.reason
    run.accept(run.upload(lease))
    invariants.check_invariants(run.state)


def test_ten_thousand_delegations_leave_no_more_than_the_keys_that_the_run_remembers() -> None:
    run = Run(RULES)
    run.publish()
    for number in range(10_000):
        joined(run, f"machine {number}", f"person {number % 7}")
        if number % 3:
            run.do(MachineRevoked(f"machine {number}"))
        else:
            run.do(ev.WorkerLeft(f"machine {number}"))
    most = WORKERS_REMEMBERED_FACTOR * RULES.workers_max
    assert sum(map(len, run.state.persons.values())) == len(run.state.workers) == most
    invariants.check_invariants(run.state)
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state


def test_the_machines_of_one_person_hold_together_no_more_than_one_newcomer_of_their_network() -> None:
    run = Run(RULES)
    run.publish()
    for machine in ("a", "b", "c"):
        joined(run, machine, "person")
    assert run.granted("a", 0).slots
    assert all(isinstance(run.lease(machine, 0), NothingToLease) for machine in ("a", "b", "c"))
