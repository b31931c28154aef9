"""Detection of the original among copies: an index of the fingerprints (prime_protocol/copies.py) of accepted bundles, as judged.

Of two equal bundles the one that arrived later by the coordinator's clock is the copy, whichever is judged first. The index is
part of the state, so it survives restarts. It holds the last FINGERPRINTS_KEPT_MAX fingerprints.

Only an audited bundle is evidence against others. Without a forward pass a bundle may contain any text. A worker that had a
slot's seeds and let its lease lapse could file their text under another slot. The honest worker that samples that slot next
would then be rejected for copying. An unseeded engine could do the same even with a forward pass. But text that is proven to
follow from its slot's seeds is no copy. So of a seeded and an unseeded bundle the latter is the copy, whenever it arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from prime_node.coordinator.state.records import Original, PendingBundle, State

FINGERPRINTS_KEPT_MAX = 32_768
SAID_BEFORE = "a bundle that arrived earlier and was judged later has the same completions"


def found_earlier(state: State, pending: PendingBundle, marks: Sequence[tuple[int, str]]) -> Original | None:
    """Return an accepted bundle for another slot with the same text, of which this bundle is a copy."""
    return next((one for one in _alike(state, pending, marks) if _is_original(one, pending)), None)


def found_later(state: State, pending: PendingBundle, marks: Sequence[tuple[int, str]]) -> list[Original]:
    """Return accepted bundles that are copies of this one but were judged before it, each once."""
    if not pending.audited:
        return []
    return list({one.bundle: one for one in _alike(state, pending, marks) if not _is_original(one, pending)}.values())


def remember(state: State, pending: PendingBundle, marks: Sequence[tuple[int, str]]) -> None:
    """Index an accepted bundle's fingerprints if it was audited. An original remains the original."""
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
    """Return whether the known one of two equal bundles arrived first, or is proven by its seeds."""
    if known.seeded is not pending.seeded:
        return known.seeded
    return known.arrived_at_ms <= pending.arrived_at_ms


def _alike(state: State, pending: PendingBundle, marks: Sequence[tuple[int, str]]) -> list[Original]:
    """Return the originals with the same text in other slots.

    The same seeds give the same text, so bundles for the same slot are not copies of each other.
    """
    known = ((state.originals.get(mark), slot) for slot, mark in marks)
    return [one for one, slot in known if one is not None and one.slot != slot and one.bundle != pending.bundle]
