"""Frozen records without the cost of frozen dataclasses.

`dataclass(frozen=True)` sets each field by a call: an event of eight fields takes 1.0 us to create instead of 0.25 us. Creating
the three events of a lease took a quarter of the scheduler's time per lease. A class declared with `carrier` is frozen for the
type checker, which every commit passes, and a plain dataclass at runtime. It compares and hashes like a frozen one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as carrier
else:
    from dataclasses import dataclass

    def carrier(*, frozen, slots):
        """Replace `dataclass(frozen=True, slots=True)`."""
        return dataclass(unsafe_hash=frozen, slots=slots)


__all__ = ["carrier"]
