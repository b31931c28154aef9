"""Statements that a former coordinator key signed. Reports name them.

A key ring replaces a key that was stolen, or that is out of use. A statement of such a key that is dated after the ring is
void: the coordinator no longer used the key then. The thief can date a statement before the ring; no signature shows that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prime_node.broadcast.audit.audit_report import date_of
from prime_protocol.envelope import Envelope
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import PinnedRun


@dataclass(frozen=True, slots=True)
class FormerKey:
    """The key ring that replaced a statement's signer."""

    ring: int
    """Version of the key ring."""
    is_void: bool
    """Whether the statement is dated after the ring."""
    text: str
    """Example: `signed by a former key, replaced by ring 1 of 2026-11-23 00:00 UTC`."""


def former_key(run: PinnedRun, envelope: Envelope, at_ms: int) -> FormerKey | None:
    """Return the ring that replaced the signer of a verified statement of `at_ms`; None if a current key signed it."""
    ring = run.keys.replaced_by(envelope, Role.COORDINATOR)
    if ring is None:
        return None
    is_void = at_ms > ring.created_at_ms
    text = f"signed by a former key, replaced by ring {ring.version} of {date_of(ring.created_at_ms)}"
    return FormerKey(ring.version, is_void, f"{text}, and dated after it" if is_void else text)


def former_key_notes(signers: Iterable[FormerKey | None]) -> list[str]:
    """Return a line for each kind of statement by a former key, with their number."""
    counts = Counter(one.text for one in signers if one is not None)
    return [f"{count:,} statement{'s are' if count > 1 else ' is'} {text}" for text, count in counts.items()]
