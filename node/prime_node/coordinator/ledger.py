"""The ledger as the store keeps it (prime_protocol/ledger.py): what the journal goes on from, and what others are shown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prime_node.ports.store import Store
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.identity import SigningKey
from prime_protocol.ledger import LedgerChain, LedgerEntry
from prime_protocol.seed_chain import OpenSecret
from prime_protocol.verdict import BundleStatus


async def load_chain(store: Store, run: str) -> LedgerChain:
    """Where the stored ledger stands."""
    length = await store.ledger_length()
    last = await _last(store)
    return LedgerChain(run, length, digest_of(last) if last else "")


async def settled_last_ms(store: Store) -> int:
    """When the last line was settled; 0 where there is none."""
    last = await _last(store)
    return parse_json(last, LedgerEntry).receipt.at_ms if last else 0


async def _last(store: Store) -> bytes:
    length = await store.ledger_length()
    return (await store.ledger(start=length - 1, limit=1))[0].encode() if length else b""


async def begin_ledger(store: Store, chain: LedgerChain) -> None:
    """Where a release without a ledger has settled bundles, their receipts become its first lines, in the order of their last
    change: a worker that looks for them would otherwise hold evidence against a coordinator that kept its word.

    A ledger that has begun is left as it is. Where an earlier release left out first lines, its operator answers for them: what
    is appended to a ledger cannot say that it came before.
    """
    if chain.num_entries:
        return
    lines: list[str] = []
    stored, cursor = await store.receipts_of(None, after=0, limit=limits.RECEIPTS_MAX)
    while stored:
        settled = (one for one in stored if one.status != BundleStatus.PENDING)
        lines += [chain.add(open_envelope(one.envelope.encode()).payload).decode() for one in settled]
        stored, cursor = await store.receipts_of(None, after=cursor, limit=limits.RECEIPTS_MAX)
    if lines:
        await store.append((), (), lines)


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """Implements ports.transport.LedgerSource for a run whose coordinator does not have to be at work."""

    store: Store
    run: str
    key: SigningKey
    now_ms: Callable[[], int]
    secret: Callable[[], Awaitable[OpenSecret | None]]
    """The newest one of the seed chain that is open. Asked after the chain was read: no line may be newer than it."""

    async def ledger_head(self) -> Envelope:
        chain = await load_chain(self.store, self.run)
        at_ms = max(self.now_ms(), await settled_last_ms(self.store))
        return seal(chain.head(at_ms, await self.secret()), PayloadType.LEDGER_HEAD, self.key)

    async def ledger(self, start: int) -> list[bytes]:
        return [line.encode() for line in await self.store.ledger(start=start, limit=limits.LEDGER_LINES_MAX)]
