"""Ban dossiers: for every ban, write a dossier (prime_protocol/dossier.py) into the operator's folder.

`prime-node evidence verify` reads them there. `Decisions.decide` queues a banned worker in `banned` and never waits. One task
here takes it out, waits until the receipts are durable, and writes. Dossiers that a crash or a full disk prevented are written
after the next start.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state.records import Ban, WorkerRecord
from prime_node.ports.blobs import Blobs, DamagedBlob
from prime_node.ports.documents import Documents
from prime_node.ports.store import Store, StoredReceipt
from prime_protocol import limits
from prime_protocol.dossier import BanStatement, is_strike
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BanKind, Receipt, RejectReason

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BanDossiers:
    """The ban dossiers in the operator's folder."""

    run: PinnedRun
    key: SigningKey
    decisions: Decisions
    assigner: Assigner
    store: Store
    bundles: Blobs
    private: Documents

    async def keep_dossiers(self) -> None:
        """Write the ban dossiers until cancelled."""
        for known in self.decisions.state.workers.values():
            if known.banned is not None:
                self.decisions.banned.put_nowait(known.worker)
        while True:
            key = await self.decisions.banned.get()
            worker = self.decisions.state.workers.get(key)
            if worker is None or worker.banned is None or await self._is_written(worker, worker.banned):
                continue
            await self.decisions.synced()
            try:
                await self._write(worker, worker.banned)
            except OSError as error:
                log.error(
                    "the dossier on %s cannot be written: %s; the coordinator tries again at its next start", key, error
                )

    async def _is_written(self, worker: WorkerRecord, ban: Ban) -> bool:
        try:
            await self.private.read(dossier_name(worker.worker, ban))
        except KeyError:
            return False
        return True

    async def _write(self, worker: WorkerRecord, ban: Ban) -> None:
        receipts = await self._receipts(worker, ban)
        lease = next((one for one in worker.ended if one.bundle == ban.evidence), None)
        statement = BanStatement(
            run=self.run.digest,
            worker=worker.worker,
            kind=ban.kind,
            reason=ban.reason,
            bundle=ban.evidence,
            step=ban.step,
            at_ms=ban.at_ms,
            num_receipts=len(receipts),
            original=(lease.original or None) if ban.evidence is not None and lease is not None else None,
        )
        lines = [
            self.run.envelope,
            *(ring for _, ring in self.run.keys.rings),
            *(amendment for _, amendment in self.run.calibrations.amendments),
            seal(statement, PayloadType.BAN, self.key),
        ]
        if ban.evidence is not None and lease is not None:
            lines.append(seal(self.assigner.lease(lease), PayloadType.LEASE, self.key))
            for bundle in filter(None, (ban.evidence, lease.original)):
                await self._keep_parcel(bundle)
        if ban.kind is BanKind.HARD:
            lines += await self._contradicting_headers(worker.worker, receipts)
        data = b"".join(envelope.to_bytes() + b"\n" for envelope in (*lines, *receipts))
        await self.private.write(dossier_name(worker.worker, ban), data)
        log.info("dossier on %s: %s, %d receipts", worker.worker, dossier_name(worker.worker, ban), len(receipts))

    async def _keep_parcel(self, bundle: str) -> None:
        try:
            await self.private.write(f"{bundle}.parcel", await self.bundles.get(bundle))
        except (KeyError, DamagedBlob):
            log.warning("bundle %s, the evidence of a ban, is deleted or damaged", bundle[:12])

    async def _contradicting_headers(self, worker: str, receipts: list[Envelope]) -> list[Envelope]:
        """Return the headers that the intake kept for the receipts that reject a bundle as equivocation."""
        found: list[Envelope] = []
        for receipt in (parse_json(one.payload, Receipt) for one in receipts):
            if receipt.reason is RejectReason.EQUIVOCATION:
                try:
                    lines = (await self.private.read(contradiction_name(worker, receipt.lease_id))).splitlines()
                    found += [open_envelope(line) for line in lines]
                except (KeyError, RemoteError) as error:
                    log.warning("headers for lease %s, evidence of a ban, are lost: %s", receipt.lease_id[:12], error)
        return found

    async def _receipts(self, worker: WorkerRecord, ban: Ban) -> list[Envelope]:
        """Return the receipts that count, oldest first: the weighed ones for a statistical ban, the strikes for a hard one.

        A receipt that replaced another comes later with the same number, so the numbers give the order. Receipts from before the
        worker was unbanned are older than those with the same numbers.
        """
        if ban.kind is BanKind.OPERATOR:
            return []
        statistical = ban.kind is BanKind.STATISTICAL
        strikes: deque[Envelope] = deque(maxlen=worker.strikes)
        weighed: dict[int, Envelope] = {}
        cursor = 0
        while True:
            stored, following = await self.store.receipts_of(worker.worker, after=cursor, limit=limits.RECEIPTS_MAX)
            for one in stored:
                envelope, receipt = _opened(one)
                if is_strike(receipt):
                    strikes.append(envelope)
                if receipt.evidence is not None:
                    weighed[receipt.evidence.number] = envelope
            if not stored or following == cursor:
                break
            cursor = following
        if not statistical:
            return list(strikes)
        return [weighed[number] for number in range(1, worker.num_weighed + 1) if number in weighed]


def dossier_name(worker: str, ban: Ban) -> str:
    """Return the name of a ban dossier's file."""
    return f"ban-{worker}-{ban.at_ms}.jsonl"


def contradiction_name(worker: str, lease_id: str) -> str:
    """Return the name of the file with two headers that a worker signed for one lease."""
    return f"equivocation-{worker}-{lease_id[:16]}.jsonl"


def _opened(stored: StoredReceipt) -> tuple[Envelope, Receipt]:
    """Open a receipt of our own."""
    envelope = open_envelope(stored.envelope.encode())
    return envelope, parse_json(envelope.payload, Receipt)
