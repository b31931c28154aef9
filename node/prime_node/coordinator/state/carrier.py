"""Frozen records that cost no more to make than others.

`dataclass(frozen=True)` sets each field by a call: an event of eight fields takes 1.0 us to make instead of 0.25 us, and making
the three events of a lease took a quarter of all that the scheduler does for it. What is declared with `carrier` is frozen for
the type checker, which every commit passes, and a plain dataclass when it runs. It is compared and hashed like a frozen one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as carrier
else:
    from dataclasses import dataclass

    def carrier(*, frozen, slots):
        """In place of `dataclass(frozen=True, slots=True)`."""
        return dataclass(unsafe_hash=frozen, slots=slots)


__all__ = ["carrier"]
