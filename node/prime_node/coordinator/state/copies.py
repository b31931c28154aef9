"""Who said it first: an index of fingerprints (prime_protocol/copies.py) of accepted bundles, in the order in which they came.

A copy is the fault of the later one by the coordinator's clock, whichever is judged first. The index is part of the state, so it
survives restarts; it holds the last FINGERPRINTS_KEPT_MAX fingerprints.

Only an audited bundle accuses others. In one without a forward pass any text may stand: who has had a slot's seeds, and let its
lease lapse, could file what they give under another slot, and have the honest worker that samples it next refused as a copyist.
An unseeded engine could do the same with a forward pass. But what is proven to follow from its slot's seeds was copied from
nobody, so between the two the unseeded one is at fault, whenever it came.
"""

from __future__ import annotations

from collections.abc import Sequence

from prime_node.coordinator.state.records import Original, PendingBundle, State

FINGERPRINTS_KEPT_MAX = 32_768
SAID_BEFORE = "a bundle that came before it, but was judged later, said the same"


def found_earlier(state: State, pending: PendingBundle, marks: Sequence[tuple[int, str]]) -> Original | None:
    """An accepted bundle for another slot that holds the same, and that this one is a copy of."""
    return next((one for one in _alike(state, pending, marks) if _is_original(one, pending)), None)


def found_later(state: State, pending: PendingBundle, marks: Sequence[tuple[int, str]]) -> list[Original]:
    """Accepted bundles that hold the same and are copies of this one, but were judged first. Each once."""
    if not pending.audited:
        return []
    return list({one.bundle: one for one in _alike(state, pending, marks) if not _is_original(one, pending)}.values())


def remember(state: State, pending: PendingBundle, marks: Sequence[tuple[int, str]]) -> None:
    """An accepted bundle's fingerprints, if it was audited. An original stays the original."""
    if not pending.audited:
        return
    for slot, mark in marks:
        known = state.originals.get(mark)
        if known is None or not _is_original(known, pending):
            made = Original(pending.bundle, pending.lease.worker, slot, pending.arrived_at_ms, pending.seeded)
            state.originals[mark] = made
    while len(state.originals) > FINGERPRINTS_KEPT_MAX:
        state.originals.popitem(last=False)


def _is_original(known: Original, pending: PendingBundle) -> bool:
    """Of two that hold the same, whether the known one was first, or must have been."""
    if known.seeded is not pending.seeded:
        return known.seeded
    return known.arrived_at_ms <= pending.arrived_at_ms


def _alike(state: State, pending: PendingBundle, marks: Sequence[tuple[int, str]]) -> list[Original]:
    """The same seeds give the same text, so bundles for the same slot are no copies of one another."""
    known = ((state.originals.get(mark), slot) for slot, mark in marks)
    return [one for one, slot in known if one is not None and one.slot != slot and one.bundle != pending.bundle]
