"""Comparison of the restored state with what this coordinator signed and showed last.

A store that lost its end, or is an older copy, would serve as if nothing had happened: workers would find a chain that went back,
or a ledger that contradicts the one before. Each document is written after the events that it reports are durable. So an
undamaged store is never behind one of them.
"""

from __future__ import annotations

from prime_node.coordinator.api.statements import stored_head, stored_statement, stored_timestamp
from prime_node.coordinator.state.records import State
from prime_node.ports.documents import HEAD_NAME, TIMESTAMP_NAME, Documents, key_ring_name
from prime_node.ports.store import Store
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.ledger import LedgerHead
from prime_protocol.manifest import open_manifest
from prime_protocol.run_spec import PinnedRun


async def require_own_statements(
    run: PinnedRun, key: SigningKey, published: Documents, private: Documents, store: Store, state: State
) -> LedgerHead | None:
    """Return the last ledger head that may have been shown. Raise LocalError if the store or the key rings are behind a document.

    A document whose signature fails is damaged: it is named in the log and counts as missing, and is soon written again.
    """
    newest = await stored_statement(published, HEAD_NAME, lambda envelope: open_manifest(envelope, run))
    stamp = await stored_timestamp(run, published, key)
    for name, shown in (
        (HEAD_NAME, -1 if newest is None else newest.manifest.policy_version),
        (TIMESTAMP_NAME, -1 if stamp is None else stamp.policy_version),
    ):
        if shown > state.head:
            raise LocalError(
                f"{name} names policy {shown}, but the coordinator's store ends at policy {state.head}: it is empty, damaged, or "
                "an older copy. Set coordinator.store to the store that the run used, take that one along with "
                "`prime-node coordinator move`, or put back a newer copy"
            )
    if stamp is not None and stamp.key_ring > run.keys.version:  # former keys would count again
        raise LocalError(
            f"{TIMESTAMP_NAME} names key ring {stamp.key_ring}, but {key_ring_name(run.keys.version + 1)} is missing in the "
            "published folder; restore it from a copy or a mirror"
        )
    head = await stored_head(run, private, key)
    if head is None or head.num_entries == 0:
        return head
    length = await store.ledger_length()
    lines = await store.ledger(start=head.num_entries - 1, limit=1)
    if length < head.num_entries or not lines or digest_of(lines[0].encode()) != head.digest:
        raise LocalError(
            f"the ledger in the coordinator's store, of {length} lines, is not the one whose head was signed at line "
            f"{head.num_entries}: the store is damaged or an older copy. Put back a newer copy"
        )
    return head
