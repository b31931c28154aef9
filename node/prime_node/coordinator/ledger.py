"""The ledger in the store (prime_protocol/ledger.py): where the journal continues, and a source for readers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prime_node.ports.store import Store
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.ledger import LedgerChain, LedgerEntry, LedgerHead
from prime_protocol.seed_chain import OpenSecret


async def load_chain(store: Store, run: str) -> LedgerChain:
    """Return the length and last digest of the stored ledger. Raises LocalError."""
    length = await store.ledger_length()
    if length > limits.COUNT_MAX:
        raise LocalError(f"the store has a ledger of {length} lines, which no coordinator writes: put back a copy")
    last = await _last(store)
    return LedgerChain(run, length, digest_of(last) if last else "")


async def settled_last_ms(store: Store) -> int:
    """Return the time at which the last line was settled; 0 if there is none."""
    last = await _last(store)
    return parse_json(last, LedgerEntry).receipt.at_ms if last else 0


async def _last(store: Store) -> bytes:
    length = await store.ledger_length()
    return (await store.ledger(start=length - 1, limit=1))[0].encode() if length else b""


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """A ports.transport.LedgerSource for a run whose coordinator was not active when the head was signed.

    The coordinator only appends lines, so the head holds while it is active again.
    """

    store: Store
    head: Envelope

    @classmethod
    async def signed(
        cls,
        store: Store,
        run: str,
        key: SigningKey,
        shown: LedgerHead | None,
        secret: Callable[[], Awaitable[OpenSecret | None]],
    ) -> StoredLedger:
        """Sign a head for the stored lines.

        It bears no present date: the folder may be an older copy, and the coordinator may have settled receipts since. A head
        dated as its last line contradicts none of these, nor any head that the coordinator showed before or shows later.

        `shown` is the last head that the coordinator stored, and may have shown. `secret` returns the newest open secret of the
        seed chain. It is called after the chain was read, so that no line is newer than it.
        """
        chain, at_ms = await load_chain(store, run), await settled_last_ms(store)
        if shown is not None and shown.num_entries <= chain.num_entries:  # else the copy is older than it
            at_ms = max(at_ms, shown.at_ms)
        return cls(store, seal(chain.head(at_ms, await secret()), PayloadType.LEDGER_HEAD, key))

    async def ledger_head(self) -> Envelope:
        """Return the signed head of the stored ledger."""
        return self.head

    async def ledger(self, start: int) -> list[bytes]:
        """Return the ledger's lines from line `start` on."""
        return [line.encode() for line in await self.store.ledger(start=start, limit=limits.LEDGER_LINES_MAX)]
