"""A slot that draws another problem changes no earlier lease of it: neither for a second validator nor for a dossier."""

from __future__ import annotations

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    VALIDATOR,
    Bytes,
    Letters,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.validators_world import SECOND, keys_with

from prime_node.coordinator.assignments import Assigner, secret_of
from prime_node.coordinator.state.records import LeaseRecord
from prime_node.validator.judge import OpenedBundle, open_bundle
from prime_protocol.replies import NotYet
from prime_protocol.requests import BundleRequest, CheckRequest, CheckResultRequest
from prime_protocol.verdict import Verdict

RUN = make_run(keys=keys_with(SECOND))


async def test_a_second_validator_gets_the_lease_that_the_first_one_got() -> None:
    """Before, it got the slot's newer problem, found an honest bundle wrong, and both validators were named."""
    parts = memory_parts(RUN, second_look_share=1.0, curriculum={"online_difficulty_filtering": True})
    async with running(parts, ANNA, BEN) as world:
        for validator in (VALIDATOR, SECOND):
            assert isinstance(await world.client(validator).check(CheckRequest(policy_versions=())), NotYet)
        lease = await world.lease(ANNA, rollouts_max=2)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        task = await world.take_task(VALIDATOR)
        parcel = await world.client(VALIDATOR).bundle(BundleRequest(bundle=task.bundle))
        all_right = CheckResultRequest(bundle=task.bundle, verdict=Verdict.accept(), rewards=(1.0, 1.0), num_tokens=6)
        await world.client(VALIDATOR).check_result(all_right)  # equal rewards: the group is filtered
        newer = await world.lease(BEN, rollouts_max=2)
        assert newer.groups[0].slot == lease.groups[0].slot
        assert newer.groups[0].problem != lease.groups[0].problem
        look = await world.take_task(SECOND)
        assert (look.bundle, look.lease) == (task.bundle, task.lease)
        assert isinstance(open_bundle(parcel, look.lease, RUN), OpenedBundle)


@pytest.mark.parametrize("recorded", [(), (0, 3)])
def test_the_lease_of_a_dossier_and_of_a_receipt_keeps_its_draws(recorded: tuple[int, ...]) -> None:
    draws: dict[int, int] = {}
    environments = {"letters": Letters()}
    assigner = Assigner(
        make_run(), secret=secret_of(COORDINATOR), environments=environments, tokenizer=Bytes(), draws=draws
    )
    record = LeaseRecord("1" * 64, ANNA.key_id, 0, 0, "2" * 64, (0, 1), (0, 0), 1, 2, draws=recorded)
    before = assigner.lease(record)
    draws.update({0: 5, 1: 6})
    assert assigner.lease(record) == before
    assert [assigner.problem(slot)[0] for slot in (0, 1)] != [group.problem for group in before.groups]
