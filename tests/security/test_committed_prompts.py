"""Receipts commit a coordinator to the prompts that it leased: a false prompt contradicts its lease or its problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, Bytes, Letters, make_parcel, memory_parts, running
from tests.node.seed_chain_world import (
    audited,
    chained,
    check_kept,
    leased_and_judged,
    said_in,
    shown_by,
    two_steps_over,
)

from prime_node.broadcast.audit.ledger_audit import audit_ledger
from prime_protocol.assigned import digest_of_prompts
from prime_protocol.assignment import Lease, Problem
from prime_protocol.envelope import parse_json
from prime_protocol.ledger import LedgerHead


class PraisingLetters(Letters):
    """Environment of a coordinator that wants to have something else trained: same problems, same rewards."""

    def prompt(self, index: int) -> str:
        return f"praise the operator, then {super().prompt(index)}"


def with_prompt(lease: Lease, prompt: tuple[int, ...]) -> Lease:
    first, *others = lease.groups
    return lease.model_copy(update={"groups": (first.model_copy(update={"prompt_token_ids": prompt}), *others)})


async def test_a_worker_keeps_a_receipt_that_hides_a_false_prompt_with_its_lease(tmp_path: Path) -> None:
    async with running(memory_parts(chained())) as world:
        lease, receipt = await leased_and_judged(world)
    false = with_prompt(lease, (1, 2, 3))
    for leased, is_kept in ((lease, False), (false, True)):
        now_ms = world.parts.clock.now_ms()
        await check_kept(is_kept, tmp_path / str(is_kept), world.run, leased, receipt, now_ms=now_ms)


async def test_a_receipt_states_the_prompts_of_its_lease_even_if_the_environment_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(memory_parts(chained()), ANNA) as world:
        lease = await world.lease(ANNA, rollouts_max=2)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        monkeypatch.setattr(Letters, "prompt", PraisingLetters.prompt)
        await world.judge()
        said = said_in((await shown_by(world)).lines[-1])
    assert said.assigned is not None
    assert said.assigned.prompts == digest_of_prompts(group.prompt_token_ids for group in lease.groups)


def rendered(problem: Problem) -> list[int]:
    return Bytes().encode_prompt(Letters().prompt(problem.index))


async def test_anyone_who_renders_the_prompts_again_finds_a_coordinator_that_leased_others() -> None:
    for environment in (Letters(), PraisingLetters()):
        parts = replace(memory_parts(chained()), environments={"letters": environment})
        async with two_steps_over(parts) as world:
            shown = await shown_by(world)
        report = await audit_ledger(shown, world.run, render=rendered)
        if isinstance(environment, PraisingLetters):
            (fault,) = report.faults
            assert fault.startswith(
                "2 accepted bundles state other prompts than this machine renders for their problems"
            )
            assert "Another version of an environment" in fault
            assert report.evidence == [shown.head]
            assert (await audit_ledger(shown, world.run)).faults == [], "before, nothing showed it"
        else:
            assert (report.faults, report.seeds.num_rendered, report.seeds.num_waiting) == ([], 2, 1)
    unknown = await audit_ledger(shown, world.run, render=lambda problem: None)
    assert (unknown.faults, unknown.seeds.num_rendered) == ([], 0)


@pytest.mark.parametrize("waits", [False, True], ids=["after the step", "before the secret is open"])
async def test_a_receipt_without_its_prompts_is_a_fault(waits: bool) -> None:
    async with two_steps_over(memory_parts(chained())) as world:
        shown = await shown_by(world)
    report = await audit_ledger(shown, world.run)
    assert report.faults == []
    receipts = [said_in(line) for line in shown.lines]
    index = len(receipts) - 1 if waits else 0
    assigned = receipts[index].assigned
    assert assigned is not None
    silent = assigned.model_copy(update={"prompts": None})
    receipts[index] = receipts[index].model_copy(update={"assigned": silent})
    report = await audited(world, receipts, parse_json(shown.head.payload, LedgerHead).secret)
    assert [fault.endswith("the assignment lacks the prompts' digest") for fault in report.faults] == [True]
