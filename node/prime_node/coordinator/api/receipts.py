"""Receipts: the list of a worker's receipts, and the content of stored ones."""

from __future__ import annotations

from prime_node.coordinator.core import Core
from prime_node.coordinator.state import audits
from prime_node.coordinator.state import events as ev
from prime_node.ports.store import StoredReceipt
from prime_protocol import limits
from prime_protocol.envelope import PayloadType, open_envelope, parse_json, seal
from prime_protocol.messages import ReceiptList, ReceiptsRequest
from prime_protocol.verdict import BundleStatus, Receipt, Verdict

RECEIPTS_MAX = 256
"""Receipts in one answer."""
RECEIPTS_CHARS_MAX = limits.ENVELOPE_BYTES_MAX // 2
"""Characters of all receipts in an answer, except for a single one.

A client reads twice as much, and an envelope inside JSON is a little longer."""


async def receipts(core: Core, signer: str, request: ReceiptsRequest) -> ReceiptList:
    """Return the receipts of a worker's bundles, by their last change. Banned and former workers get them too."""
    worker = core.state.workers.get(signer)
    if worker is not None and audits.is_releasable(core.state, worker):
        core.decide(ev.SuretyReleased((signer,)))
    await core.journal.synced()  # the store must have caught up with the state before it is read
    found, cursor = await core.store.receipts_of(
        signer, after=request.after, limit=RECEIPTS_MAX, chars_max=RECEIPTS_CHARS_MAX
    )
    return ReceiptList(receipts=tuple(_by_todays_key(core, receipt.envelope) for receipt in found), next=cursor)


def release_sureties(core: Core) -> None:
    """Release the escrow of all workers whose bundles are judged, at the end of the run."""
    workers = [one.worker for one in core.state.workers.values() if audits.is_releasable(core.state, one)]
    if workers:
        core.decide(ev.SuretyReleased(tuple(workers)))


async def replaced(core: Core, bundle: str) -> ev.Replaced:
    """Return the evidence in a bundle's receipt, for the receipt that will replace it. Read again if a verdict came meanwhile."""
    while True:
        is_waiting = bundle in core.state.bundles
        await core.journal.synced()
        stored = await core.store.receipt(bundle)
        if is_waiting is (bundle in core.state.bundles):
            return ev.Replaced(bundle, None if stored is None else _opened(stored).evidence)


def verdict_of(stored: StoredReceipt) -> Verdict | None:
    """Return the verdict in a receipt of our own; None while the bundle is pending."""
    receipt = _opened(stored)
    if receipt.status is BundleStatus.PENDING:
        return None
    return Verdict(accepted=receipt.status is BundleStatus.ACCEPTED, reason=receipt.reason, detail=receipt.detail)


def _opened(stored: StoredReceipt) -> Receipt:
    return parse_json(open_envelope(stored.envelope.encode()).payload, Receipt)


def _by_todays_key(core: Core, receipt: str) -> str:
    """Sign a receipt again if it is older than our key: workers reject the signature of an expired key."""
    envelope = open_envelope(receipt.encode()) if core.run.keys.version else None
    if envelope is None or envelope.sole_signer() == core.key.key_id:
        return receipt
    return seal(envelope.payload, PayloadType.RECEIPT, core.key).to_bytes().decode()
