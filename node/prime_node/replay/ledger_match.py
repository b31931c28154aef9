"""Agreement of batches with the ledger: each group of a batch was accepted from its worker, for its slot and policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prime_node.broadcast.audit.ledger_audit import audit_ledger
from prime_node.ports.transport import LedgerSource
from prime_protocol.envelope import Envelope, parse_json
from prime_protocol.ledger import LedgerEntry
from prime_protocol.replies import TrainBatch
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, Receipt


@dataclass
class LedgerCopy:
    """A ledger that is audited while its accepting receipts are kept: implementation of ports.transport.LedgerSource."""

    source: LedgerSource
    receipts: dict[str, Receipt] = field(default_factory=dict)
    """The newest receipt of each bundle."""

    async def ledger_head(self) -> Envelope:
        """Return the signed head, unverified."""
        return await self.source.ledger_head()

    async def ledger(self, start: int) -> list[bytes]:
        """Return lines from line `start` on, and keep their receipts."""
        lines = await self.source.ledger(start)
        for line in lines:
            receipt = parse_json(line, LedgerEntry).receipt
            self.receipts[receipt.bundle] = receipt
        return lines


async def audited_receipts(source: LedgerSource, run: PinnedRun) -> tuple[Mapping[str, Receipt], list[str]]:
    """Return the newest receipt of each bundle, and the ledger's own faults. Raises RemoteError if there is no ledger."""
    copy = LedgerCopy(source)
    report = await audit_ledger(copy, run)
    return copy.receipts, report.faults


def ledger_faults(batches: Sequence[TrainBatch], receipts: Mapping[str, Receipt]) -> list[str]:
    """Return what batches state that the ledger does not, as text for people."""
    faults = []
    for batch in batches:
        for group in batch.groups:
            receipt, here = receipts.get(group.bundle), f"slot {group.slot}, bundle {group.bundle[:12]}"
            if receipt is None or receipt.status is not BundleStatus.ACCEPTED:
                faults.append(f"{here}: the ledger does not accept it")
            elif (receipt.worker, receipt.policy_version) != (group.worker, group.policy_version):
                faults.append(f"{here}: the ledger names another worker or policy")
            elif receipt.assigned is not None and group.slot not in {slot for slot, _ in receipt.assigned.places()}:
                faults.append(f"{here}: the ledger assigns it other slots")
    return faults
