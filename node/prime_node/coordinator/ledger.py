"""The ledger as the store keeps it (prime_protocol/ledger.py): what the journal goes on from, and what others are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prime_node.ports.store import Store
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.ledger import LedgerChain


async def load_chain(store: Store, run: str) -> LedgerChain:
    """Where the stored ledger stands."""
    length = await store.ledger_length()
    last = await store.ledger(start=length - 1, limit=1) if length else []
    return LedgerChain(run, length, digest_of(last[0].encode()) if last else "")


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """Implements ports.transport.LedgerSource for a run whose coordinator does not have to be at work."""

    store: Store
    run: str
    key: SigningKey
    now_ms: Callable[[], int]

    async def ledger_head(self) -> Envelope:
        chain = await load_chain(self.store, self.run)
        return seal(chain.head(self.now_ms()), PayloadType.LEDGER_HEAD, self.key)

    async def ledger(self, start: int) -> list[bytes]:
        return [line.encode() for line in await self.store.ledger(start=start, limit=limits.LEDGER_LINES_MAX)]
