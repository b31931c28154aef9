"""Shared parts of all kernel files: the compiler's settings, the plan's columns, and steps.

Importing this package imports numba and compiles or loads machine code. All kernels release the GIL. None starts
threads of its own: numba's `parallel=True` performs badly where cores are shared.

A call takes a table of chunks, not one chunk. Between two calls a thread needs the GIL. If another thread holds it, the
thread sleeps and wakes up, which may take as long as a chunk.

Terms: a class's *plane* holds one signed byte per element of the class: the step in units in the last place, 0 if
unchanged, wire.ESCAPE if the step does not fit. A *rank* is an element's number within its class. A *plan* has a row
per class.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, int64, njit, uint64
from numba.core.registry import cpu_target

from prime_protocol.codec.kernels.words import leading_zeros, pointer

CODER, COUNT, GAP_BITS, MAGNITUDES, NUM_EXCEPTIONS, MAGNITUDE_BITS, FIRST = range(7)
"""Columns of the plan."""
PLAN_COLUMNS = 7
OLD_AT, NEW_AT, ELEMENTS, SHIFT, DATA_AT, DATA_BYTES = range(6)
"""Columns of a table of chunks, one per row: addresses of its words in the base and in the new tensor, their number, the
position of a word's exponent, and the encoded chunk. Before encoding, DATA_AT holds the code of its dtype."""


_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_STAMP = f"{zlib.crc32(b''.join(path.read_bytes() for path in _SOURCES)):08x}"


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function for Python callers, with an on-disk cache if a folder is writable.

    Compiling takes seconds, loading milliseconds. numba's cache notices a change of a function's own file, but not of
    files whose functions it inlines. So the name in the cache contains a checksum of all kernel files.
    """
    function.__qualname__ += f"-{_STAMP}"
    try:
        return njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function)
    except RuntimeError:  # numba found neither __pycache__ nor the user's cache folder writable
        return njit(nogil=True, no_cfunc_wrapper=True)(function)


def cache_key() -> str:
    """Return a key that changes whenever numba would recompile: with the kernel files, numba, Python and the processor.

    It begins with the checksum in the names of the compiled kernels.
    """
    parts = (
        [path.stat().st_mtime for path in _SOURCES],
        numba.__version__,
        sys.version,
        cpu_target.target_context.codegen().magic_tuple(),
    )
    return f"{_STAMP}-{zlib.crc32(repr(parts).encode()):08x}"


part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator for functions that only kernels call, compiled once."""
inline = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)
"""Decorator for functions that LLVM inlines into their callers. numba's own inlining would run its front end each time,
which is the slow part of compiling."""


@inline
def step_between(base, new):
    """Return the step from one pattern to another, as a signed 16-bit number."""
    return ((int64(new) - int64(base) + 0x8000) & 0xFFFF) - 0x8000


@inline
def floor_log2(value):
    """Return the number of the highest set bit of a positive value."""
    return int64(63) - leading_zeros(uint64(value))


@inline
def words_at(address, count):
    """Return the bit patterns at an address."""
    return carray(pointer(address), (count,), np.uint16)


@inline
def octets_at(address, size):
    """Return the bytes at an address."""
    return carray(pointer(address), (size,), np.uint8)
