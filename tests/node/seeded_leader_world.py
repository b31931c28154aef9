"""The term of a simulated run's leader: the real rules (leader_terms.py) over a row in memory, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace

from tests.node.seeded_parts_world import SimulatedProcess

from prime_node.adapters.storage.leader_terms import LOOKS_PER_TERM, RENEWALS_PER_TERM, HeldTerm, TermRow, WatchedTerm

TERM_S = 2.0


class LeaderRow:
    """The row in the database."""

    def __init__(self) -> None:
        self.row = TermRow(0, "", 0, 0)


class SimulatedTerm:
    """Leadership (ports.leadership.Leadership) of one process."""

    def __init__(self, row: LeaderRow, process: SimulatedProcess, drawn: random.Random) -> None:
        self._shared, self._process, self._drawn = row, process, drawn
        self._held: HeldTerm | None = None
        self._watched = WatchedTerm()
        self._leads, self._ended = asyncio.Event(), asyncio.Event()
        self.has_database = True
        self._keeping = asyncio.create_task(self._keep())

    @property
    def is_leading(self) -> bool:
        return self._held is not None and not self._held.is_lost

    def may_answer(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self._process.may_act.is_set() and self._held is not None and self._held.may_answer(now_s)

    async def catch_up(self) -> None:
        """Do nothing: the documents are in the database."""

    async def led(self) -> None:
        await self._leads.wait()

    async def lost(self) -> None:
        await self._ended.wait()

    async def end(self) -> None:
        """End with the process, which ends no term."""
        self._keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while not (self._held and self._held.is_lost):
            sent_s = loop.time()
            await self._process.may_act.wait()
            await asyncio.sleep(self._drawn.uniform(0.0, 0.1))
            if self.has_database:
                self._look(sent_s) if self._held is None else self._renew(self._held, sent_s)
            pauses = LOOKS_PER_TERM if self._held is None else RENEWALS_PER_TERM
            await asyncio.sleep(max(0.0, sent_s + TERM_S / pauses - loop.time()))

    def _look(self, asked_s: float) -> None:
        row = self._shared.row
        if not self._watched.is_over(row, asked_s=asked_s, seen_s=asyncio.get_running_loop().time()):
            return
        self._shared.row = TermRow(row.epoch + 1, "", row.renewals + 1, round(1_000 * TERM_S))
        self._process.epoch = self._process.disk.epoch = row.epoch + 1
        self._held = HeldTerm(TERM_S, row.epoch + 1)
        self._held.renewed(sent_s=asked_s)
        self._leads.set()

    def _renew(self, held: HeldTerm, sent_s: float) -> None:
        row = self._shared.row
        if row.epoch != held.epoch:
            held.lost()
            self._ended.set()
        else:
            self._shared.row = replace(row, renewals=row.renewals + 1)
            held.renewed(sent_s=sent_s)
