"""What crosses the wire, and what must be true of it.

Everything here takes bytes and returns values or raises: no I/O, no clock, no asyncio, no torch. `protocol/SPEC.md`
says the same in words, precisely enough to write another implementation.
"""

from __future__ import annotations

__version__ = "0.1.0"
