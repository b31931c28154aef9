"""A coordinator alone swaps seeds of an honest worker's lease, and hides it by false statements in the receipt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    COORDINATOR,
    ROOT,
    Letters,
    World,
    make_parcel,
    memory_parts,
    running,
)
from tests.node.ledger_world import receipts_of
from tests.node.seed_chain_world import (
    Favours,
    audited,
    chained,
    check_kept,
    leased_and_judged,
    said_in,
    shown_by,
    two_steps_over,
)

from prime_node.broadcast.audit.ledger_audit import audit_ledger
from prime_node.worker.receipts import ReceiptBook
from prime_protocol.assigned import Assigned, SeedRule, digest_of_groups
from prime_protocol.check_policy import AuditPolicy, CheckPolicy
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.errors import RemoteError
from prime_protocol.ledger import LedgerHead
from prime_protocol.limits import LEASE_DRAWS_MAX, LEASE_ROLLOUTS_MAX, Limits
from prime_protocol.replies import ReceiptList
from prime_protocol.requests import AdminRequest
from prime_protocol.seed_chain import OpenSecret, opened_secrets
from prime_protocol.verdict import Receipt


@dataclass
class Said:
    """The receipts of a coordinator's ledger, and the secret that its head opens."""

    world: World
    receipts: list[Receipt]
    secret: OpenSecret

    def of_slot(self, slot: int) -> int:
        """Return the index of the receipt that covers a slot."""
        for index, receipt in enumerate(self.receipts):
            assert receipt.assigned is not None
            if slot in dict(receipt.assigned.places()):
                return index
        raise AssertionError(f"no receipt of slot {slot}")

    async def faults(self, index: int, lie: Receipt) -> list[str]:
        """Return the faults of the ledger with one receipt replaced."""
        changed = [*self.receipts[:index], lie, *self.receipts[index + 1 :]]
        return (await audited(self.world, changed, self.secret)).faults


async def said_by(world: World) -> Said:
    shown = await shown_by(world)
    secret = parse_json(shown.head.payload, LedgerHead).secret
    assert secret is not None
    return Said(world, [said_in(line) for line in shown.lines], secret)


@pytest.fixture
async def swapped(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Said]:
    """Seeds of slot 5, in step 1, are not those of the chain."""
    monkeypatch.setattr("prime_node.coordinator.assembly.Assigner", Favours)
    async with two_steps_over(memory_parts(chained())) as world:
        yield await said_by(world)


async def test_a_receipt_that_names_a_step_whose_secret_never_opens_is_a_fault(swapped: Said) -> None:
    index, last = swapped.of_slot(5), swapped.world.run.spec.max_steps - 1
    for step in (2, last):
        (fault,) = await swapped.faults(index, swapped.receipts[index].model_copy(update={"step": step}))
        assert f"the slots do not belong to step {step}" in fault


async def test_slots_of_a_step_that_the_policy_may_not_serve_yet_are_a_fault(swapped: Said) -> None:
    index, spec = swapped.of_slot(5), swapped.world.run.spec
    honest, step = swapped.receipts[index], swapped.world.run.spec.max_steps - 1
    assert honest.assigned is not None
    ((_, count),) = honest.assigned.slots
    assigned = honest.assigned.model_copy(update={"slots": ((step * spec.groups_per_step, count),)})
    (fault,) = await swapped.faults(index, honest.model_copy(update={"step": step, "assigned": assigned}))
    assert f"policy {honest.policy_version} may not serve the slots of step {step}" in fault


@pytest.mark.parametrize(("async_level", "policy_version"), [(0, 0), (1, 2), (2, 19)])
async def test_seeds_of_a_policy_that_the_step_does_not_admit_are_a_fault(
    async_level: int, policy_version: int
) -> None:
    """Each policy has other seeds, so a coordinator that may name any chooses among many."""
    async with two_steps_over(memory_parts(chained(async_level=async_level))) as world:
        said = await said_by(world)
    index, chain = said.of_slot(5), world.run.spec.seed_chain
    honest = said.receipts[index]
    assert honest.assigned is not None
    assert chain is not None
    secret = opened_secrets(chain, said.secret)[honest.step]
    rule = SeedRule(world.run.digest, world.run.spec)
    groups = []
    for slot, draw in honest.assigned.places():
        problem = rule.problem(secret, slot, draw)
        groups.append((slot, problem, rule.seeds(secret, policy_version, problem, slot)))
    assigned = honest.assigned.model_copy(update={"seeds": digest_of_groups(groups)})
    lie = honest.model_copy(update={"policy_version": policy_version, "assigned": assigned})
    why = f"policy {policy_version} may not serve the slots of step 1"
    assert any(why in fault for fault in await said.faults(index, lie))


async def test_a_draw_that_is_too_high_is_a_fault_before_the_secret_is_open() -> None:
    async with two_steps_over(memory_parts(chained())) as world:
        said = await said_by(world)
    honest = said.receipts[-1]
    assert honest.assigned is not None
    assert honest.step > said.secret.number, "its secret is not open"
    draws = (LEASE_DRAWS_MAX,) * len(honest.assigned.places())
    lie = honest.model_copy(update={"assigned": honest.assigned.model_copy(update={"draws": draws})})
    (fault,) = await said.faults(len(said.receipts) - 1, lie)
    assert "a draw is not below" in fault


def test_a_receipt_of_more_rollouts_than_a_lease_asks_for_is_refused_before_its_seeds_are_made() -> None:
    """A line of a kilobyte would otherwise cost 2^24 seeds."""
    run = chained(rollouts_per_group=LEASE_ROLLOUTS_MAX, groups_per_step=LEASE_ROLLOUTS_MAX)
    rule = SeedRule(run.digest, run.spec)
    held_out = run.spec.max_steps * run.spec.groups_per_step
    for num_slots, is_refused in ((1, False), (2, True), (LEASE_ROLLOUTS_MAX, True)):
        for check, first in ((rule.check_slots, 0), (rule.check_evaluation, held_out)):
            sizes = {"step": 0, "policy_version": 0, "num_rollouts": num_slots * LEASE_ROLLOUTS_MAX}
            assigned = Assigned(slots=((first, num_slots),), seeds="0" * 64, prompts="0" * 64)
            if is_refused:
                with pytest.raises(RemoteError, match="or their number is wrong"):
                    check(assigned, **sizes)
            else:
                check(assigned, **sizes)


@pytest.mark.parametrize(
    "changes", [{"step": 99}, {"policy_version": 1}, {"num_rollouts": 4}, {"lease_id": "0" * 64}, {"at_ms": 0}]
)
async def test_a_worker_keeps_a_receipt_that_differs_from_the_lease_of_its_bundle(
    changes: dict[str, object], tmp_path: Path
) -> None:
    async with running(memory_parts(chained())) as world:
        lease, honest = await leased_and_judged(world)
    receipt = parse_json(honest.payload, Receipt)
    lie = seal(receipt.model_copy(update=changes), PayloadType.RECEIPT, COORDINATOR)
    for shown, is_kept in ((honest, False), (lie, True)):
        folder, now_ms = tmp_path / str(is_kept), receipt.at_ms
        await check_kept(is_kept, folder, world.run, lease, shown, now_ms=now_ms, bundle=receipt.bundle)


async def test_a_second_receipt_without_seeds_hides_no_swapped_ones(swapped: Said) -> None:
    """The ledger states the chain's seeds in a receipt that the worker never gets; the worker gets one that states none."""
    index, run = swapped.of_slot(5), swapped.world.run
    honest, chain = swapped.receipts[index], run.spec.seed_chain
    assert honest.assigned is not None
    assert chain is not None
    secret, rule = opened_secrets(chain, swapped.secret)[honest.step], SeedRule(run.digest, run.spec)
    groups = []
    for slot, draw in honest.assigned.places():
        problem = rule.problem(secret, slot, draw)
        groups.append((slot, problem, rule.seeds(secret, honest.policy_version, problem, slot)))
    assigned = honest.assigned.model_copy(update={"seeds": digest_of_groups(groups)})
    listed = honest.model_copy(update={"assigned": assigned})
    silent = honest.model_copy(update={"assigned": None, "at_ms": honest.at_ms + 1})
    assert await swapped.faults(index, listed) == []

    before = swapped.receipts[:index]
    after = [one.model_copy(update={"at_ms": one.at_ms + 1}) for one in swapped.receipts[index + 1 :]]
    report = await audited(swapped.world, [*before, listed, silent, *after], swapped.secret)
    assert "its receipt lacks the assignment" in report.faults[0]
    differs = f"bundle {honest.bundle[:12]} has accepting receipts of other leases"
    assert differs in report.faults[1]
    # A line contradicts the worker's own receipt, also if that receipt is newer than the ledger's head.
    for mine in (silent, honest):
        newer = seal(mine.model_copy(update={"at_ms": 2**50 + 1}), PayloadType.RECEIPT, COORDINATOR)
        report = await audited(swapped.world, [*before, listed, *after], swapped.secret, own=[newer])
        assert [differs in fault for fault in report.faults] == [True]
        assert len(report.evidence) == 2
        assert report.evidence[1] == newer


async def test_a_receipt_that_releases_an_escrow_states_the_seeds_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the only receipt of that bundle that a worker may get, and it does not need the environment again."""
    policy = AuditPolicy(share_min=0.5, newcomer_bundles=1, escrow_bundles=4)
    run = chained(checks=CheckPolicy(audits=policy), limits=Limits(prompt_tokens_max=21))
    leases, parts = {}, memory_parts(run)
    async with running(parts, ANNA) as world:
        for _ in range(2):
            lease = await world.lease(ANNA, rollouts_max=4)
            leases[lease.lease_id] = lease
            await world.client(ANNA).upload(make_parcel(lease, ANNA))
            await world.judge()
        await world.client(ROOT).admin(AdminRequest(action="drain"))
        monkeypatch.setattr(Letters, "prompt", None)
        mine = await receipts_of(world)
        shown = await shown_by(world)
        report = await audit_ledger(world.client(ANNA), run, receipts=mine)
    said = [said_in(line) for line in shown.lines]
    assert len(said) == 3, "the last bundle has a second line"
    assert said[2].bundle == said[1].bundle
    assert said[2].assigned == said[1].assigned is not None
    assert any(receipt.assigned.draws for receipt in said if receipt.assigned), "a prompt was too long"
    assert (report.faults, report.seeds.num_waiting) == ([], 2)

    for number, changes in enumerate(({}, {"assigned": None})):
        book = ReceiptBook(tmp_path / str(number), run=run, worker=ANNA.key_id)
        for lease in leases.values():
            book.note_lease(lease, seal(lease, PayloadType.LEASE, COORDINATOR))
        sent = seal(said[2].model_copy(update=changes), PayloadType.RECEIPT, COORDINATOR)
        book.add(ReceiptList(receipts=(sent.to_bytes().decode(),), next=1), now_ms=said[2].at_ms)
        assert len(list((tmp_path / str(number)).glob("contradiction-*"))) == number
