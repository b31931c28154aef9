"""Anyone can recompute the assignments: a coordinator that picks seeds or hides its secrets is detected."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.dossiers_world import case_in, check, judged
from tests.node.ledger_world import command
from tests.node.operator_world import write_key
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
from prime_node.broadcast.audit.ledger_file import export_ledger
from prime_node.cli.run_dir import RunDir
from prime_node.coordinator.assignments import chain_of, secret_of
from prime_protocol import limits
from prime_protocol.assigned import SeedRule, digest_of_groups
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.ledger import LedgerHead
from prime_protocol.seed_chain import OpenSecret, committed, opened_secrets
from prime_protocol.verdict import Receipt, RejectReason


async def test_anybody_can_work_out_again_what_was_assigned_once_a_step_is_over(tmp_path: Path) -> None:
    exported = tmp_path / "ledger.jsonl"
    async with two_steps_over(memory_parts(chained())) as world:
        head = parse_json((await world.client(ANNA).ledger_head()).payload, LedgerHead)
        await export_ledger(world.client(ANNA), world.run, exported)
    assert head.secret is not None
    assert head.secret.number == 1, "the secret of step 2, which is in progress, is not open"
    result = await asyncio.to_thread(command, "verify", str(exported), "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["faults"]) == (0, [])
    assert report["seeds"] == {"num_checked": 2, "num_waiting": 1, "num_evaluations": 0, "num_passed_over": 0} | {
        "num_rendered": 0
    }
    shown = await asyncio.to_thread(command, "verify", str(exported))
    assert (
        "2 accepted bundles were assigned what the seed chain gives; 1 are of steps that are not over" in shown.stdout
    )


async def test_no_secret_is_opened_before_the_first_step_is_over_or_without_a_chain() -> None:
    for run in (chained(), make_run()):
        async with running(memory_parts(run), ANNA) as world:
            await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
            await world.judge()
            shown = await shown_by(world)
            assert parse_json(shown.head.payload, LedgerHead).secret is None
            assert (said_in(shown.lines[0]).assigned is None) is (run.spec.seed_chain is None)
            assert (await audit_ledger(shown, run)).faults == []


async def test_a_coordinator_that_swaps_one_seed_is_caught_by_its_own_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_node.coordinator.assembly.Assigner", Favours)
    async with two_steps_over(memory_parts(chained())) as world:
        shown = await shown_by(world)
    report = await audit_ledger(shown, world.run)
    (fault,) = report.faults
    assert fault.startswith("1 accepted bundles have another assignment than the seed chain gives")
    assert "of step 1, problems or seeds differ from those that the step's secret gives" in fault
    assert report.evidence == [shown.head]


async def test_a_worker_keeps_a_receipt_that_hides_a_swapped_seed_with_its_lease(tmp_path: Path) -> None:
    async with running(memory_parts(chained())) as world:
        lease, receipt = await leased_and_judged(world)
    group, now_ms = lease.groups[0], world.parts.clock.now_ms()
    swapped = lease.model_copy(update={"groups": (group.model_copy(update={"seeds": (7, *group.seeds[1:])}),)})
    for leased, is_kept in ((lease, False), (swapped, True)):
        await check_kept(is_kept, tmp_path / str(is_kept), world.run, leased, receipt, now_ms=now_ms)


async def test_changed_seeds_in_a_receipt_or_a_head_are_detected() -> None:
    async with two_steps_over(memory_parts(chained())) as world:
        shown = await shown_by(world)
    good = [said_in(line) for line in shown.lines]
    secret = parse_json(shown.head.payload, LedgerHead).secret
    assert secret is not None
    assert (await audited(world, good, secret)).faults == []
    assigned = good[0].assigned
    assert assigned is not None
    first, count = assigned.slots[0]
    for changed, why in (
        ({"seeds": "0" * 64}, "problems or seeds differ"),
        ({"slots": ((first + 1, count),)}, "do not belong to step 0"),
        ({"slots": ((first, count + 1),)}, "do not belong to step 0"),
        ({"draws": (1,) * count}, "problems or seeds differ"),
    ):
        lying = good[0].model_copy(update={"assigned": assigned.model_copy(update=changed)})
        assert why in (await audited(world, [lying, *good[1:]], secret)).faults[0]
    silent = good[0].model_copy(update={"assigned": None})
    assert "lacks the assignment" in (await audited(world, [silent, *good[1:]], secret)).faults[0]
    other_policy = good[-1].model_copy(update={"policy_version": 1, "step": 1})
    assert "do not belong to step" in (await audited(world, [*good[:-1], other_policy], secret)).faults[0]
    foreign = secret.model_copy(update={"secret": "0" * 64})
    assert "is not in the RunSpec's seed chain" in (await audited(world, good, foreign)).faults[0]
    for opened in (None, secret.model_copy(update={"number": 0, "secret": chain(20)[0].hex()})):
        assert "lacks secret number 1" in (await audited(world, good, opened)).faults[0]


async def test_a_receipt_is_no_evaluations_because_its_slots_say_so() -> None:
    """Otherwise a coordinator could declare every bundle an evaluation, whose seeds cannot be recomputed."""
    async with two_steps_over(memory_parts(chained())) as world:
        shown = await shown_by(world)
    good = [said_in(line) for line in shown.lines]
    secret, assigned = parse_json(shown.head.payload, LedgerHead).secret, good[0].assigned
    assert secret is not None
    assert assigned is not None
    beyond, count = world.run.spec.max_steps * world.run.spec.groups_per_step, assigned.slots[0][1]
    held_out = assigned.model_copy(update={"slots": ((beyond, count),)})
    for claim, is_one in (
        (held_out, True),
        (held_out.model_copy(update={"slots": ((beyond, count + 1),)}), False),
        (held_out.model_copy(update={"draws": (1,) * count}), False),
        (held_out.model_copy(update={"slots": ((beyond - 1, count),)}), False),
    ):
        report = await audited(world, [good[0].model_copy(update={"assigned": claim}), *good[1:]], secret)
        assert (report.faults == [], report.seeds.num_evaluations) == (is_one, int(is_one))
    of_another_step = good[0].model_copy(update={"assigned": held_out, "step": good[0].policy_version + 1})
    report = await audited(world, [of_another_step, *good[1:]], secret)
    assert "not the slots of an evaluation of policy 0" in report.faults[0]


async def test_a_coordinator_that_draws_until_it_likes_the_seeds_is_caught() -> None:
    async with two_steps_over(memory_parts(chained())) as world:
        shown = await shown_by(world)
    good = [said_in(line) for line in shown.lines]
    secret = parse_json(shown.head.payload, LedgerHead).secret
    assigned, chain_end = good[0].assigned, world.run.spec.seed_chain
    assert secret is not None
    assert assigned is not None
    assert chain_end is not None
    rule, of_step_0 = SeedRule(world.run.digest, world.run.spec), opened_secrets(chain_end, secret)[0]

    def drawn(draw: int) -> Receipt:
        """Return the first receipt, honest about the draw of each slot."""
        assert assigned is not None
        groups = []
        for slot, _ in assigned.places():
            problem = rule.problem(of_step_0, slot, draw)
            groups.append((slot, problem, rule.seeds(of_step_0, good[0].policy_version, problem, slot)))
        changes = {"draws": (draw,) * len(groups), "seeds": digest_of_groups(groups)}
        return good[0].model_copy(update={"assigned": assigned.model_copy(update=changes)})

    last = limits.LEASE_DRAWS_MAX - 1
    assert (await audited(world, [drawn(last), *good[1:]], secret)).faults == []
    assert "a draw is not below" in (await audited(world, [drawn(last + 1), *good[1:]], secret)).faults[0]


async def test_a_receipt_of_more_groups_than_were_leased_is_a_contradiction_too(tmp_path: Path) -> None:
    async with running(memory_parts(chained())) as world:
        lease, receipt = await leased_and_judged(world)
    honest = parse_json(receipt.payload, Receipt)
    assert honest.assigned is not None
    more = honest.assigned.model_copy(update={"slots": ((0, 3),), "draws": (1, 1, 1)})
    lie = seal(honest.model_copy(update={"assigned": more}), PayloadType.RECEIPT, COORDINATOR)
    await check_kept(True, tmp_path / "kept", world.run, lease, lie, now_ms=honest.at_ms)


def chain(length: int) -> list[bytes]:
    return chain_of(secret_of(COORDINATOR), length)


async def test_a_coordinator_continues_its_chain_after_a_restart_and_no_other(tmp_path: Path) -> None:
    run = chained()
    async with two_steps_over(await folder_parts(run, tmp_path)) as world:
        before, head = await shown_by(world), world.head
        batch = world.batch
    async with running(await folder_parts(run, tmp_path)) as world:
        world.head, world.batch = head, batch
        await world.join(ANNA)
        assert (await shown_by(world)).lines == before.lines
        await world.fill(2)
        await world.publish()
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
        await world.judge()
        shown = await shown_by(world)
    report = await audit_ledger(shown, run)
    assert (report.faults, report.seeds.num_checked, report.seeds.num_waiting) == ([], 4, 1)
    with pytest.raises(LocalError, match=r"restore .* assignment\.secret"):
        async with running(dataclasses.replace(memory_parts(run), secret=bytes(32))):
            pass


async def test_a_ledger_in_the_coordinators_folder_has_the_same_secret(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    async with two_steps_over(await folder_parts(chained(), place.coordinator)) as world:
        shown = await shown_by(world)
    write_key(place.key("coordinator"), COORDINATOR)
    place.run_spec.write_bytes(world.run.envelope.to_bytes())
    out = tmp_path / "ledger.jsonl"
    assert (await asyncio.to_thread(command, "export", str(place.path), "--out", str(out))).exit_code == 0
    head = parse_json(open_envelope(out.read_bytes().splitlines()[-1]).payload, LedgerHead)
    assert head.secret == parse_json(shown.head.payload, LedgerHead).secret
    assert not place.assignment_secret.exists(), "who reads keeps none"


async def test_the_ban_of_a_worker_shows_whether_its_seeds_were_the_chain_s(tmp_path: Path) -> None:
    exported = tmp_path / "ledger.jsonl"
    async with running(await folder_parts(chained(), tmp_path), ANNA, BEN) as world:
        for _ in range(2):
            await judged(world, reason=RejectReason.SEED_MISMATCH)
        file = await case_in(world, tmp_path)
        await export_ledger(world.client(BEN), world.run, exported)
        early = await asyncio.to_thread(check, file, "--ledger", str(exported))
        await world.fill(0, BEN)
        await world.publish()
        await export_ledger(world.client(BEN), world.run, exported)
    assert early[0] == 0
    assert "the secret of step 0 is not published in this ledger yet" in str(early[1]["seeds"])
    code, report = await asyncio.to_thread(check, file, "--ledger", str(exported))
    assert (code, report["seeds"]) == (0, "its problems and seeds match the seed chain")
    lines = [open_envelope(line) for line in file.read_bytes().splitlines()]
    file.write_bytes(b"".join(swapped(line).to_bytes() + b"\n" for line in lines))
    for parcel in file.parent.glob("*.parcel"):
        parcel.unlink()
    code, report = await asyncio.to_thread(check, file, "--ledger", str(exported))
    assert code == 1
    assert "the leased seeds are not those of the step's secret" in str(report["fault"])


def swapped(line: Envelope) -> Envelope:
    """Return a lease with another seed, signed by the coordinator, and otherwise unchanged."""
    if line.payload_type != PayloadType.LEASE:
        return line
    fields = json.loads(line.payload)
    fields["groups"][0]["seeds"][0] ^= 1
    return seal(json.dumps(fields).encode(), PayloadType.LEASE, COORDINATOR)


def test_a_secret_gives_those_of_the_steps_before_and_the_last_one_waits_for_the_run_s_end() -> None:
    run = chained()
    assert run.spec.seed_chain is not None
    secrets = chain(20)
    for steps_over, number in ((0, None), (1, 0), (2, 1), (19, 18), (20, 18), (99, 18), (100, 19)):
        assert run.spec.seed_chain.newest_open(steps_over, max_steps=100) == number
        if number is not None:
            opened = OpenSecret(number=number, secret=secrets[number].hex())
            assert opened_secrets(run.spec.seed_chain, opened) == secrets[: number + 1]
    longer = committed(chain(21)).model_copy(update={"length": 20})
    with pytest.raises(RemoteError, match="secret 20 is not in"):
        opened_secrets(longer, OpenSecret(number=20, secret=chain(21)[20].hex()))
    assert run.spec.seed_chain.number(57) == 19, (
        "steps beyond the chain share its last secret, opened when the run is over"
    )
