"""The right to answer for a run. One coordinator has it at a time, for a term that it keeps renewing."""

from __future__ import annotations

from typing import Protocol

from prime_protocol.errors import TransientFault


class Leadership(Protocol):
    """The place of one coordinator among those of a run: it follows, leads, and may lose its term."""

    @property
    def is_leading(self) -> bool:
        """Whether this coordinator has begun a term that no other one has ended."""

    def may_answer(self) -> bool:
        """Return whether the term lasts at this moment. Costs a microsecond; any thread may call it.

        False after a pause of the process that was longer than the term, although `is_leading` may still be true.
        """

    async def catch_up(self) -> None:
        """Bring the documents on this machine up to those of the leader."""

    async def led(self) -> None:
        """Return once this coordinator leads and may write to the store. Raises LocalError."""

    async def lost(self) -> None:
        """Return once another coordinator has taken over."""


class TermLost(TransientFault):
    """Another coordinator has taken over, so this one ends. Started again, it is a standby."""
