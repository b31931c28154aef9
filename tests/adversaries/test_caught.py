"""Each cheat as a real worker: the expected check detects it, and the honest workers of its run are not hurt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.adversaries.arena import Arena
from tests.adversaries.conditions import SOFT, conditions_for
from tests.adversaries.watching import Outcome, Part

from prime_lab.adversaries.table import ADVERSARIES
from prime_protocol.replies import TrainBatch
from prime_protocol.reward_ranks import REWARD_RANKS
from prime_protocol.verdict import BanKind, BundleStatus, RejectReason

pytestmark = pytest.mark.timeout(180)  # the arena itself ends a run after 120 s

LOGPROBS, SEEDS = RejectReason.LOGPROB_MISMATCH, RejectReason.SEED_MISMATCH
NUMBERS = {LOGPROBS, SEEDS, RejectReason.PROOF_MISMATCH}
"""Other weights show in all of them, and first in the one that they are furthest off in."""
EXPECTED = {
    "older-1": NUMBERS,
    "older-2": NUMBERS,
    "older-8": NUMBERS,
    "stale": NUMBERS,
    "base": NUMBERS,
    "int8": NUMBERS,
    "int4": NUMBERS,
    "altered": NUMBERS,
    "smaller": NUMBERS,
    "smaller-rescored": {SEEDS},
    "escalation": {SEEDS},
    "prompt-swap": {SEEDS},
    "easy-problem-swap": {RejectReason.WRONG_ASSIGNMENT},
    "truncated": {RejectReason.BAD_TERMINATION},
    "padded": {RejectReason.BAD_TERMINATION},
    "forged-stop": {SEEDS, RejectReason.BAD_TERMINATION},
    "replayed-own": NUMBERS,
    "replayed-others": NUMBERS,
    "claimed-rewards": {RejectReason.MALFORMED},
    "forged-logprobs": {LOGPROBS},
    "best-of-n": {SEEDS},
    "forged-seed": {SEEDS},
    "temperature-0.8": {SEEDS},
    "temperature-0.95": {SEEDS},
    "top-p-0.95": {SEEDS},
    "greedy": {SEEDS},
    "copied-proofs": {RejectReason.PROOF_MISMATCH},
    "zero-proofs": {RejectReason.MALFORMED},
    "blank-proofs": {RejectReason.PROOF_MISMATCH},
    "missing-proofs": {RejectReason.MALFORMED},
    "older-proofs": {RejectReason.PROOF_MISMATCH},
    "poison": {SEEDS},
    "loud-poison": {LOGPROBS},
    "partial-10": {SEEDS},
    "ties": {SEEDS},
    "ties-as-unknown": {SEEDS},
    "low-0.0095-as-unknown": set(),
    "shading-0.1": {LOGPROBS},
    "shading-0.1-as-vllm": {LOGPROBS},
    "shading-0.05-as-vllm": {LOGPROBS},
    "shading-both-ways": {LOGPROBS},
    "colluding": {SEEDS},
}
"""Reasons that a cheat's rejected bundles may have, in addition to those of ANY_CHEAT."""
ANY_CHEAT = {RejectReason.STATISTICAL, RejectReason.BAD_TERMINATION}
"""Reasons that any cheat's bundles may have. If tokens are wrong, a stop token that its seed does not choose is found first."""
BY_DESIGN = (
    "escalation-3",
    "int8-as-vllm",
    "int8-as-unknown",
    "older-1-as-vllm",
    "temperature-0.99-as-unknown",
    "spikes-as-unknown",
)
"""Cheats that are not always detected. SECURITY.md states their gain and its limits."""
IN_THE_BENCH = (
    "ties-as-vllm",
    "low-0.0095-as-vllm",
    "low-0.02-as-vllm",
    "low-0.05-as-vllm",
    "shading-0.1-as-unknown",
    "shading-0.05",
    "shading-0.05-as-unknown",
    "best-of-n-in-20",
    "framing",  # how seldom it acts depends on the machine; tests/node/test_copies.py tests the rule against it
    "temperature-0.98-as-unknown",
)
"""Found as another one is, or as late: scripts/bench/adversaries.py."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
async def test_a_cheat_is_banned_for_what_it_did_and_nobody_else_is(arena: Arena, name: str) -> None:
    # Steps large enough that the run does not end before a cheat in part has cheated.
    outcome = await arena.fight(name, rollouts_max=400, groups_per_step=20, **conditions_for(name))
    cheat = outcome.parts[0]
    reasons = [receipt.reason for receipt in outcome.receipts_of(cheat) if receipt.reason is not None]
    dishonest = [reason for reason in reasons if reason.is_dishonest]
    assert dishonest
    assert set(dishonest) <= EXPECTED[name] | ANY_CHEAT
    assert outcome.worker(cheat)["banned"] is not None
    _nobody_else_is_hurt(outcome, cheat)


@pytest.mark.slow
async def test_one_dishonest_completion_in_a_hundred_is_enough(arena: Arena) -> None:
    # Alone, so that others' speed does not change its work. Its forged completions depend on the digest, so the run is long.
    outcome = await arena.fight("partial-1", honest=0, rollouts_max=1_600, groups_per_step=40, seed=13)
    assert outcome.worker(outcome.parts[0])["banned"] is not None


@pytest.mark.slow
async def test_the_best_of_several_unseeded_samples_are_found_by_their_rewards(arena: Arena) -> None:
    outcome = await arena.fight(
        "unseeded-best-of-n", honest=0, rollouts_max=600, groups_per_step=60, **conditions_for("unseeded-best-of-n")
    )
    cheat, unseeded = outcome.parts
    assert outcome.worker(cheat)["banned"]["kind"] == BanKind.STATISTICAL
    weighed = [receipt.evidence for receipt in outcome.receipts_of(unseeded) if receipt.evidence is not None]
    compared = [one for one in weighed if set(REWARD_RANKS) < set(one.sums)]
    assert 2 * len(compared) > len(weighed), "all but those that a busy machine has no time for"
    _nobody_else_is_hurt(outcome, cheat)


@pytest.mark.slow
async def test_two_bundles_for_one_lease_are_never_both_taken(arena: Arena) -> None:
    outcome = await arena.fight("equivocation", rollouts_max=32)
    cheat = outcome.parts[0]
    assert cheat.replies[RejectReason.EQUIVOCATION] > 0
    assert outcome.worker(cheat)["banned"] is not None
    receipts = outcome.receipts_of(cheat)
    assert len({receipt.lease_id for receipt in receipts}) == len(receipts)
    _nobody_else_is_hurt(outcome, cheat)


@pytest.mark.slow
async def test_a_bundle_that_was_kept_back_is_too_late_whatever_it_is_dated(arena: Arena) -> None:
    def is_over(parts: Sequence[Part], batches: Sequence[TrainBatch]) -> bool:
        return len(batches) >= 5 and _late(parts[0]) > 0

    outcome = await arena.fight("time-shift", until=is_over, lease_seconds=0.5)
    cheat = outcome.parts[0]
    taken = [receipt for receipt in outcome.receipts_of(cheat) if receipt.status is BundleStatus.ACCEPTED]
    assert all(receipt.at_ms > 1_000_000_000_000 for receipt in taken), "receipts are dated by the coordinator's clock"
    assert _late(cheat) > 0
    assert len(outcome.batches) >= 5, "its groups went to others"
    _nobody_else_is_hurt(outcome, cheat)


@pytest.mark.slow
async def test_a_hoarder_is_made_to_wait_and_the_run_goes_on(arena: Arena) -> None:
    def is_over(parts: Sequence[Part], batches: Sequence[TrainBatch]) -> bool:
        return len(batches) >= 5 and _must_wait(parts[0])

    outcome = await arena.fight("hoarding", until=is_over, lease_seconds=0.5)
    cheat = outcome.parts[0]
    assert len(outcome.batches) >= 5
    assert _must_wait(cheat)
    assert outcome.receipts_of(cheat) == []
    _nobody_else_is_hurt(outcome, cheat)


@pytest.mark.slow
async def test_a_worker_that_picks_its_leases_must_wait_and_the_run_continues(arena: Arena) -> None:
    def is_over(parts: Sequence[Part], batches: Sequence[TrainBatch]) -> bool:
        return len(batches) >= 5 and _must_wait(parts[0])

    outcome = await arena.fight("picking", until=is_over)
    assert len(outcome.batches) >= 5
    assert _must_wait(outcome.parts[0])
    _nobody_else_is_hurt(outcome, outcome.parts[0])


@pytest.mark.slow
async def test_several_cheats_at_once_leave_only_honest_work_to_the_trainer(arena: Arena) -> None:
    # Each shows in its first bundle. One of best-of-n may be honest: where rewards are equal, it sends the assigned sample.
    names = ("older-2", "smaller-rescored", "prompt-swap", "loud-poison")

    def is_over(parts: Sequence[Part], batches: Sequence[TrainBatch]) -> bool:
        return len(batches) >= 3 and {part.key.key_id for part in parts[len(names) :]} <= _trained(batches)

    outcome = await arena.fight(*names, honest=2, until=is_over)
    cheats = {part.key.key_id for part in outcome.parts[: len(names)]}
    trained = _trained(outcome.batches)
    assert len(outcome.batches) >= 3
    assert not cheats & trained
    for part in outcome.parts[len(names) :]:
        _is_unhurt(outcome, part)
        assert part.key.key_id in trained


def test_every_cheat_of_the_table_is_tried() -> None:
    assert {*EXPECTED, *BY_DESIGN, *SOFT, *IN_THE_BENCH, "partial-1", "unseeded-best-of-n"} == set(ADVERSARIES)
    assert len(ADVERSARIES) >= 25


def _late(cheat: Part) -> int:
    return cheat.replies[RejectReason.LEASE_EXPIRED] + cheat.replies[RejectReason.STALE]


def _must_wait(cheat: Part) -> bool:
    return any("you abandoned" in reason for reason in cheat.waits)


def _trained(batches: Sequence[TrainBatch]) -> set[str]:
    return {group.worker for batch in batches for group in batch.groups}


def _nobody_else_is_hurt(outcome: Outcome, cheat: Part) -> None:
    for part in outcome.parts:
        if part is not cheat:
            _is_unhurt(outcome, part)


def _is_unhurt(outcome: Outcome, part: Part) -> None:
    assert outcome.worker(part)["banned"] is None
    refused = [receipt.reason for receipt in outcome.receipts_of(part) if receipt.reason is not None]
    assert not any(reason.is_dishonest for reason in refused), refused
