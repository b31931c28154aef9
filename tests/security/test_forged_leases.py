"""A bundle's header names the lease that it answers, so no coordinator can put another lease or bundle into a dossier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.dossiers_world import case_in, check, judged
from tests.node.seed_chain_world import chained

from prime_node.coordinator.assignments import chain_of, secret_of
from prime_protocol.assigned import SeedRule
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.dossier import BanStatement, check_dossier
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.rollout import RolloutHeader
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BanKind, BundleStatus, Receipt, RejectReason

OTHER_DIGEST = "the bundle names the digest of another lease: the coordinator has changed the lease in the dossier"


def signed(text: bytes) -> Envelope:
    return open_envelope(text, bytes_max=2**22)


def rewrite(file: Path, change: Callable[[Envelope], Envelope]) -> None:
    file.write_bytes(b"\n".join(change(signed(line)).to_bytes() for line in file.read_bytes().splitlines()))


def of_other_slots(lease: Lease, run: PinnedRun) -> Lease:
    """Return the lease with the problems and seeds that the run's seed chain gives to other slots of its step."""
    rule, secret = SeedRule(run.digest, run.spec), chain_of(secret_of(COORDINATOR), 20)[lease.step]
    size = run.spec.groups_per_step
    used = {group.slot for group in lease.groups}
    free = [slot for slot in range(lease.step * size, (lease.step + 1) * size) if slot not in used]
    groups = []
    for group, slot in zip(lease.groups, free, strict=False):
        problem = rule.problem(secret, slot, 0)
        seeds = rule.seeds(secret, lease.policy_version, problem, slot)
        groups.append(group.model_copy(update={"slot": slot, "problem": problem, "seeds": seeds}))
    found = lease.model_copy(update={"groups": tuple(groups)})
    rule.check_lease(found, secret)
    return found


async def test_a_dossier_with_a_forged_lease_does_not_hold(tmp_path: Path) -> None:
    """The honest bundle would be `wrong_assignment` by its own bytes, and the seeds would match the chain."""
    run = chained()
    async with running(await folder_parts(run, tmp_path), ANNA) as world:
        for _ in range(2):
            await judged(world, reason=RejectReason.WRONG_ASSIGNMENT)
        file = await case_in(world, tmp_path)

    def forge(one: Envelope) -> Envelope:
        if one.payload_type != PayloadType.LEASE:
            return one
        return seal(of_other_slots(parse_json(one.payload, Lease), run), PayloadType.LEASE, COORDINATOR)

    rewrite(file, forge)
    code, report = check(file, "--run", run.digest)
    assert (code, report["fault"]) == (1, OTHER_DIGEST)


@pytest.mark.parametrize("what", ["of another lease", "of another key", "of an unnamed lease"])
async def test_a_dossier_with_another_bundle_does_not_hold(tmp_path: Path, what: str) -> None:
    """The coordinator alone signs which bundle a receipt is about."""
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        leases = [await judged(world, reason=RejectReason.SEED_MISMATCH) for _ in range(2)]
        file = await case_in(world, tmp_path)
    other = {
        "of another lease": make_parcel(leases[0], ANNA, created_at_ms=1),
        "of another key": make_parcel(leases[1], BEN),
        "of an unnamed lease": make_parcel(leases[1], ANNA, lease_digest=None),
    }[what]
    place = next(file.parent.glob("*.parcel"))
    place.with_name(f"{digest_of(other)}.parcel").write_bytes(other)

    def swap(one: Envelope) -> Envelope:
        if one.payload_type == PayloadType.BAN:
            ban = parse_json(one.payload, BanStatement)
            return seal(ban.model_copy(update={"bundle": digest_of(other)}), PayloadType.BAN, COORDINATOR)
        receipt = parse_json(one.payload, Receipt) if one.payload_type == PayloadType.RECEIPT else None
        if receipt is None or receipt.bundle != place.stem:
            return one
        changes = {"bundle": digest_of(other), "reason": RejectReason.WRONG_ASSIGNMENT}
        return seal(receipt.model_copy(update=changes), PayloadType.RECEIPT, COORDINATOR)

    rewrite(file, swap)
    code, report = check(file)
    assert code == 1
    expected = {
        "of another lease": "the deciding bundle was signed for another lease",
        "of another key": "the worker has not signed the deciding bundle: 0 trusted signatures, 1 needed",
        "of an unnamed lease": OTHER_DIGEST,
    }
    assert report["fault"] == expected[what]


def test_two_leases_of_one_id_make_no_equivocation() -> None:
    """A coordinator that grants two leases under one id gets two honest headers."""
    run = make_run()
    fields = {
        "body_digest": "1" * 64,
        "body_bytes": 1,
        "run": run.digest,
        "worker": ANNA.key_id,
        "lease_id": "2" * 64,
        "step": 0,
        "policy_version": 0,
        "policy_digest": "3" * 64,
        "num_rollouts": 1,
        "decompressed_bytes": 1,
        "engine": {"name": "a", "version": "1", "dtype": "fp32", "device": "cpu"},
        "created_at_ms": 0,
    }
    headers = {
        digest: RolloutHeader.model_validate(fields | {"lease_digest": digest}) for digest in ("4" * 64, "5" * 64)
    }
    receipts = [
        Receipt(
            run=run.digest,
            worker=ANNA.key_id,
            lease_id="2" * 64,
            bundle=digit * 64,
            step=0,
            policy_version=0,
            num_rollouts=1,
            num_tokens=0,
            status=BundleStatus.REFUSED,
            reason=RejectReason.EQUIVOCATION,
            at_ms=0,
        )
        for digit in "67"
    ]
    ban = BanStatement(
        run=run.digest,
        worker=ANNA.key_id,
        kind=BanKind.HARD,
        reason="",
        bundle="7" * 64,
        step=0,
        at_ms=0,
        num_receipts=2,
    )
    with pytest.raises(RemoteError, match="gave two leases one id"):
        check_dossier(ban, receipts, run, headers=headers)


async def granted(world: World) -> Lease:
    await world.join(ANNA)
    await world.publish()
    return await world.lease(ANNA, rollouts_max=2)


async def test_the_coordinator_takes_a_bundle_for_the_lease_that_it_granted_alone() -> None:
    async with running(memory_parts(make_run())) as world:
        lease = await granted(world)
        altered = lease.model_copy(update={"expires_at_ms": lease.expires_at_ms + 1})
        for parcel in (make_parcel(altered, ANNA), make_parcel(lease, ANNA, lease_digest=None)):
            with pytest.raises(RemoteError) as refusal:
                await world.client(ANNA).upload(parcel)
            assert refusal.value.code is ErrorCode.WRONG_TYPE
        await world.client(ANNA).upload(make_parcel(lease, ANNA))


async def test_a_second_header_for_an_altered_lease_is_refused_and_is_no_equivocation() -> None:
    async with running(memory_parts(make_run())) as world:
        lease = await granted(world)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        altered = lease.model_copy(update={"expires_at_ms": lease.expires_at_ms + 1})
        with pytest.raises(RemoteError) as refusal:
            await world.client(ANNA).upload(make_parcel(altered, ANNA))
        assert refusal.value.code is ErrorCode.WRONG_TYPE
        (worker,) = (await world.status())["workers"]
        assert worker["strikes"] == 0
