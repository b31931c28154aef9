"""Receipts: the list of a worker's receipts, and the content of stored ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prime_node.coordinator.api.limiter import StoreReads
from prime_node.coordinator.api.requests import sender_of
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state import audits
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Settled
from prime_node.ports.store import Store, StoredReceipt
from prime_protocol import limits
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.replies import ReceiptList
from prime_protocol.requests import ReceiptsRequest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, Receipt, Verdict

log = logging.getLogger(__name__)

RECEIPTS_MAX = 256
"""Receipts in one answer."""
RECEIPTS_CHARS_MAX = limits.ENVELOPE_BYTES_MAX // 2
"""Characters of all receipts in an answer, except for a single one.

A client reads twice as much, and an envelope inside JSON is a little longer."""


@dataclass(slots=True)
class ReceiptLists:
    """The receipts of the workers, as the store has them."""

    run: PinnedRun
    key: SigningKey
    decisions: Decisions
    store: Store
    reads: StoreReads
    _restored: dict[str, bool | None] = field(init=False)
    """Bundles that were pending at the start, and whether the store had their receipts; None: not looked for yet."""

    def __post_init__(self) -> None:
        self._restored = dict.fromkeys(self.decisions.state.bundles)

    async def receipts(self, signer: str, request: ReceiptsRequest) -> ReceiptList:
        """Return the receipts of a worker's bundles, by their last change. Banned and former workers get them too."""
        worker = self.decisions.state.workers.get(signer)
        if worker is not None and audits.is_releasable(self.decisions.state, worker):
            self.decisions.decide(ev.EscrowReleased((signer,)))
        await self.decisions.synced()  # the store must have caught up with the state before it is read
        if worker is not None:
            await self._note_pending(signer, worker.pending)
        async with self._place(signer):
            found, cursor = await self.store.receipts_of(
                signer, after=request.after, limit=RECEIPTS_MAX, chars_max=RECEIPTS_CHARS_MAX
            )
        signed = (self._by_todays_key(receipt.envelope) for receipt in found)
        return ReceiptList(receipts=tuple(filter(None, signed)), next=cursor)

    def _place(self, signer: str) -> contextlib.AbstractAsyncContextManager[None]:
        return self.reads.place(sender_of(signer, run=self.run, state=self.decisions.state))

    async def _note_pending(self, signer: str, bundles: Sequence[str]) -> None:
        """Store the receipts of pending bundles that have none."""
        unread = [one for one in bundles if self._restored.get(one, True) is None]
        if unread:
            async with self._place(signer):
                for one in unread:
                    self._restored[one] = await self.store.receipt(one) is not None
        await self.decisions.note_pending([one for one in bundles if not self._restored.get(one)])

    def release_escrows(self) -> None:
        """Release the escrow of all workers whose bundles are judged, at the end of the run."""
        workers = [
            one.worker
            for one in self.decisions.state.workers.values()
            if audits.is_releasable(self.decisions.state, one)
        ]
        if workers:
            self.decisions.decide(ev.EscrowReleased(tuple(workers)))

    async def is_known(self, bundle: str) -> bool:
        """Return whether a bundle that is not pending has a receipt."""
        await self.decisions.synced()
        return await self.store.receipt(bundle) is not None

    async def read_for(self, worker: str, bundle: str) -> StoredReceipt | None:
        """Return the receipt of a bundle that is not pending, in the place of a worker; None if there is none."""
        await self.decisions.synced()  # its verdict may be being written
        async with self._place(worker):
            return await self.store.receipt(bundle)

    async def replaced(self, bundle: str) -> ev.Replaced:
        """Return the evidence in a bundle's receipt, for the receipt that will replace it. Read again after a verdict."""
        while True:
            is_waiting = bundle in self.decisions.state.bundles
            await self.decisions.synced()
            stored = await self.store.receipt(bundle)
            if is_waiting is (bundle in self.decisions.state.bundles):
                return ev.Replaced(bundle, None if stored is None else _opened(stored).evidence)

    def _by_todays_key(self, receipt: str) -> str:
        """Sign a receipt again if it is older than our key: workers reject the signature of an expired key.

        Return an empty text if no key of ours signed it: who can write in the store must not get a signature.
        """
        envelope = open_envelope(receipt.encode()) if self.run.keys.version else None
        if envelope is None or envelope.sole_signer() == self.key.key_id:
            return receipt
        try:
            self.run.keys.verify_kept(envelope, PayloadType.RECEIPT, Role.COORDINATOR)
        except RemoteError as error:
            log.error("a receipt in the store is not the coordinator's, check who may write there: %s", error)
            return ""
        return seal(envelope.payload, PayloadType.RECEIPT, self.key).to_bytes().decode()


def verdict_of(stored: StoredReceipt) -> Verdict | None:
    """Return the verdict in a receipt of our own; None while the bundle is pending."""
    receipt = _opened(stored)
    if receipt.status is BundleStatus.PENDING:
        return None
    return Verdict(accepted=receipt.status is BundleStatus.ACCEPTED, reason=receipt.reason, detail=receipt.detail)


def _opened(stored: StoredReceipt) -> Receipt:
    return parse_json(open_envelope(stored.envelope.encode()).payload, Receipt)


def receipt_of(run: PinnedRun, assigner: Assigner, settled: Settled, at_ms: int) -> Receipt:
    """Return the receipt of a settled bundle."""
    lease = settled.lease
    return Receipt(
        run=run.digest,
        worker=lease.worker,
        lease_id=lease.lease_id,
        bundle=settled.bundle,
        step=lease.step,
        policy_version=lease.policy_version,
        num_rollouts=settled.num_rollouts,
        num_tokens=settled.num_tokens,
        status=settled.status,
        reason=settled.reason,
        detail=settled.detail,
        at_ms=at_ms,
        evidence=settled.weighed,
        assigned=assigner.assigned(lease) if settled.status is BundleStatus.ACCEPTED else None,
    )


def receipt_signer(run: PinnedRun, key: SigningKey, assigner: Assigner) -> Callable[[Settled, int], Envelope]:
    """Return the function that makes a signed receipt from a settled bundle."""

    def sign(settled: Settled, at_ms: int) -> Envelope:
        return seal(receipt_of(run, assigner, settled, at_ms), PayloadType.RECEIPT, key)

    return sign
