"""The wire protocol: message types and the checks on them.

Everything here takes bytes and returns values or raises: no I/O, no clock, no asyncio, no torch. `protocol/SPEC.md`
specifies the same protocol precisely enough to write another implementation.
"""

from __future__ import annotations

__version__ = "0.1.0"
