"""Shared parts of the tests of the ledger: a published ledger, and a command that verifies it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.node.coordinator_world import (
    ANNA,
    COORDINATOR,
    World,
)
from typer.testing import CliRunner, Result

from prime_node.adapters.system_clock import SystemClock
from prime_node.cli.main import app
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, seal
from prime_protocol.ledger import LedgerChain
from prime_protocol.requests import ReceiptsRequest
from prime_protocol.run_spec import PinnedRun


async def receipts_of(world: World) -> list[Envelope]:
    listed = await world.client(ANNA).receipts(ReceiptsRequest())
    return [open_envelope(text.encode()) for text in listed.receipts]


def command(*arguments: str) -> Result:
    """Run `prime-node ledger` in a separate thread."""
    return CliRunner().invoke(app, ["ledger", *arguments], catch_exceptions=False)


class StoppedClock(SystemClock):
    """A wall clock that does not advance until a test sets it."""

    ms = 1_800_000_000_000

    def now_ms(self) -> int:
        return self.ms


class Shown:
    """Implementation of ports.transport.LedgerSource that serves any lines and head."""

    def __init__(self, lines: Sequence[bytes], head: Envelope) -> None:
        self.lines, self.head = list(lines), head

    async def ledger_head(self) -> Envelope:
        return self.head

    async def ledger(self, start: int) -> list[bytes]:
        return self.lines[start : start + 2]


def rewritten(run: PinnedRun, receipts: Sequence[bytes], *, at_ms: int = 2**50) -> Shown:
    """A ledger that the coordinator itself might sign over these receipts."""
    chain = LedgerChain(run.digest)
    lines = [chain.add(receipt) for receipt in receipts]
    return Shown(lines, seal(chain.head(at_ms), PayloadType.LEDGER_HEAD, COORDINATOR))


def payloads(lines: Sequence[bytes]) -> list[bytes]:
    return [line[line.index(b'"receipt":') + 10 : -1] for line in lines]
