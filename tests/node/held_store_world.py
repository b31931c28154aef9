"""A store in memory whose disk a test can block or break."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prime_lab.memory_store import MemoryStore
from prime_node.ports.store import LoggedEvent, StoredReceipt


class HeldStore(MemoryStore):
    """Store whose disk a test can block or break."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.is_asked = asyncio.Event()
        self.broken = False
        self.stored: list[str] = []
        """Bundles of all receipts, in the order in which they were stored."""

    async def append(
        self, events: Sequence[LoggedEvent], receipts: Sequence[StoredReceipt] = (), ledger: Sequence[str] = ()
    ) -> None:
        self.is_asked.set()
        await self.may_write.wait()
        if self.broken:
            raise OSError(28, "No space left on device")
        self.stored += [receipt.bundle for receipt in receipts]
        await super().append(events, receipts, ledger)
