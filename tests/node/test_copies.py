"""Copies in the coordinator's state: the later one by the clock is at fault, whichever is judged first, also after a restart."""

from __future__ import annotations

import dataclasses

import pytest
from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.state import copies, invariants, snapshot
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect, Settled
from prime_protocol.verdict import BundleStatus, RejectReason

MARK, OTHER = "a" * 24, "b" * 24


@pytest.fixture
def run() -> Run:
    return Run(dataclasses.replace(RULES, strikes_max=1), workers=("anna", "ben"))


def uploaded(run: Run, worker: str, *, audited: bool = True, seeded: bool = True) -> str:
    run.now_ms += 10
    return run.upload(run.granted(worker, 0, rollouts_max=2), audited=audited, seeded=seeded)


def accept(run: Run, bundle: str, *marks: str) -> list[Effect]:
    num_rollouts, lease = run.state.bundles[bundle].num_rollouts, run.state.bundles[bundle].lease
    fingerprints = tuple((lease.slots[0], mark) for mark in marks)
    known = tuple(ev.Replaced(one.bundle, None) for one in run.state.originals.values())
    rewards = (0.5,) * num_rollouts
    return run.do(ev.VerdictGiven(bundle, None, "", rewards, 10, "v", fingerprints=fingerprints, replaced=known))


def receipts(effects: list[Effect]) -> dict[str, RejectReason | None]:
    return {effect.bundle: effect.reason for effect in effects if isinstance(effect, Settled)}


def test_who_says_it_later_is_refused_and_the_first_is_not(run: Run) -> None:
    first, second = uploaded(run, "anna"), uploaded(run, "ben")
    assert receipts(accept(run, first, MARK)) == {first: None}
    assert receipts(accept(run, second, OTHER, MARK)) == {second: RejectReason.COPIED}
    assert run.state.workers["ben"].banned is not None
    assert run.state.workers["anna"].strikes == 0
    invariants.check_invariants(run.state)


def test_a_worker_that_repeats_itself_in_another_slot_is_refused(run: Run) -> None:
    for bundle, reason in [(uploaded(run, "anna"), None), (uploaded(run, "anna"), RejectReason.COPIED)]:
        assert receipts(accept(run, bundle, MARK)) == {bundle: reason}


def test_a_copy_that_was_judged_first_is_taken_back(run: Run) -> None:
    original, copy = uploaded(run, "anna"), uploaded(run, "ben")
    assert receipts(accept(run, copy, MARK)) == {copy: None}
    effects = accept(run, original, MARK)
    assert receipts(effects) == {original: None, copy: RejectReason.COPIED}
    ben = run.state.workers["ben"]
    assert (ben.banned is not None, ben.accepted, run.state.workers["anna"].accepted) == (True, 0, 2)
    assert any(
        isinstance(effect, Settled) and (effect.bundle, effect.status) == (copy, BundleStatus.REFUSED)
        for effect in effects
    )
    assert 1 in run.state.steps[0].open, "its group is wanted again"
    invariants.check_invariants(run.state)
    third = uploaded(run, "anna")
    assert receipts(accept(run, third, MARK)) == {third: RejectReason.COPIED}


def test_the_same_slot_is_the_same_seed_and_no_copy(run: Run) -> None:
    """After a slot was handed back or dropped, an honest worker with the new lease repeats the same text."""
    bundle = uploaded(run, "anna")
    accept(run, bundle, MARK)
    run.state.originals[OTHER] = dataclasses.replace(run.state.originals[MARK], slot=1, bundle="another")
    again = uploaded(run, "ben")
    assert run.state.bundles[again].lease.slots == (1,)
    assert receipts(accept(run, again, OTHER)) == {again: None}


def test_rejected_bundles_are_no_originals(run: Run) -> None:
    bad, good = uploaded(run, "anna"), uploaded(run, "ben")
    fingerprints = ((0, MARK),)
    run.do(ev.VerdictGiven(bad, RejectReason.SEED_MISMATCH, "", (), 0, "v", fingerprints=fingerprints))
    assert receipts(accept(run, good, MARK)) == {good: None}


def test_a_bundle_without_a_forward_pass_accuses_no_worker(run: Run) -> None:
    """A bundle may contain the text of another slot's seeds, filed under the wrong slot."""
    forged, honest = uploaded(run, "anna", audited=False), uploaded(run, "ben")
    accept(run, forged, MARK)
    assert receipts(accept(run, honest, MARK)) == {honest: None}
    forged, honest = uploaded(run, "anna", audited=False), uploaded(run, "ben")
    accept(run, honest, OTHER)
    assert receipts(accept(run, forged, OTHER)) == {forged: None}
    assert run.state.workers["ben"].strikes == 0
    invariants.check_invariants(run.state)


def test_an_unseeded_bundle_accuses_no_seeded_one_and_is_the_copy_itself(run: Run) -> None:
    """A bundle may contain the text of another slot's seeds: a forward pass alone cannot detect it."""
    framed, honest = uploaded(run, "anna", seeded=False), uploaded(run, "ben")
    accept(run, framed, MARK)
    assert receipts(accept(run, honest, MARK)) == {honest: None, framed: RejectReason.COPIED}
    assert (run.state.workers["ben"].strikes, run.state.workers["anna"].banned is not None) == (0, True)
    invariants.check_invariants(run.state)


def test_an_unseeded_copy_of_what_seeds_gave_is_refused_whenever_it_came(run: Run) -> None:
    early, honest = uploaded(run, "anna", seeded=False), uploaded(run, "ben")
    accept(run, honest, MARK)
    assert receipts(accept(run, early, MARK)) == {early: RejectReason.COPIED}


def test_no_worker_is_accused_if_one_is_unseeded_and_the_other_was_not_audited(run: Run) -> None:
    first, second = uploaded(run, "anna", seeded=False), uploaded(run, "ben", audited=False)
    accept(run, first, MARK)
    assert receipts(accept(run, second, MARK)) == {second: None}


def test_of_two_unseeded_bundles_the_later_one_is_the_copy(run: Run) -> None:
    first, second = uploaded(run, "anna", seeded=False), uploaded(run, "ben", seeded=False)
    accept(run, second, MARK)
    assert receipts(accept(run, first, MARK)) == {first: None, second: RejectReason.COPIED}


def test_a_copy_that_is_not_audited_is_found(run: Run) -> None:
    original, copy = uploaded(run, "anna"), uploaded(run, "ben", audited=False)
    accept(run, original, MARK)
    assert receipts(accept(run, copy, MARK)) == {copy: RejectReason.COPIED}


def test_the_index_survives_a_restart_and_is_bounded(run: Run) -> None:
    accept(run, uploaded(run, "anna"), MARK)
    run.state = snapshot.state_from_json(snapshot.state_to_json(run.state))
    second = uploaded(run, "ben")
    assert receipts(accept(run, second, MARK)) == {second: RejectReason.COPIED}
    many = [f"{n:024x}" for n in range(copies.FINGERPRINTS_KEPT_MAX)]
    accept(run, uploaded(run, "anna"), *many)
    assert list(run.state.originals) == many
