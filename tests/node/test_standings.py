"""Standings: each contributor's place by tokens, with the machines of a person counted together."""

from __future__ import annotations

import pytest
from tests.node.coordinator_world import ANNA, BEN, make_parcel, make_run, memory_parts, running
from tests.node.persons_world import CARL, PERSON, delegation, join

from prime_node.coordinator.measure import standings
from prime_protocol.errors import ErrorCode, RemoteError


async def test_the_machines_of_a_person_have_one_place_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standings, "RANKED_S", 0.0)
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        for machine in (ANNA, BEN):
            await join(world, machine, delegation(world, machine))
        await join(world, CARL)
        none = await world.client(CARL).standing(CARL.key_id)
        assert (none.rank, none.contributors, none.tokens, len(none.machines)) == (None, 0, 0, 1)
        for worker in (ANNA, CARL, BEN):  # each has one group of two completions accepted
            lease = await world.lease(worker, rollouts_max=2)
            await world.client(worker).upload(make_parcel(lease, worker))
            await world.judge()
        alone = await world.client(CARL).standing(CARL.key_id)
        assert (alone.contributor, alone.rank, alone.tokens, alone.all_tokens) == (CARL.key_id, 2, 2, 6)
        shared = await world.client(CARL).standing(ANNA.key_id)
        assert shared == await world.client(CARL).standing(PERSON.key_id)
        assert (shared.contributor, shared.rank, shared.contributors, shared.tokens) == (PERSON.key_id, 1, 2, 4)
        assert [(one.worker, one.accepted, one.tokens) for one in shared.machines] == [
            (ANNA.key_id, 2, 2),
            (BEN.key_id, 2, 2),
        ]
        _, page, _ = await world.get("/v1/history")
        assert f'["{PERSON.key_id}","node {ANNA.key_id[-4:]}",4,2]'.encode() in page
        with pytest.raises(RemoteError) as caught:
            await world.client(CARL).standing("nobody")
        assert caught.value.code is ErrorCode.NOT_FOUND
