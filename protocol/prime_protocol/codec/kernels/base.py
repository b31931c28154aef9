"""What every kernel file shares: the compiler's settings, the plan's columns, and steps.

Importing this package imports numba and compiles, or loads, machine code. All kernels release the GIL and none starts threads
of its own: numba's `parallel=True` collapses where cores are shared.

A call takes a table of chunks, not one chunk: between two calls a thread needs the GIL, and where another one holds it, it is put
to sleep and woken up, which may take as long as a chunk.

Words: a class's *plane* holds one signed byte per element of the class: the step in units in the last place, 0 where nothing
changed, wire.ESCAPE where the step does not fit. A *rank* is an element's number inside its class. A *plan* has a row per class.
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
"""The plan's columns."""
PLAN_COLUMNS = 7
OLD_AT, NEW_AT, ELEMENTS, SHIFT, DATA_AT, DATA_BYTES = range(6)
"""The columns of a table of chunks, one a row: addresses of its words in the base and in the new tensor, their number, where a
word's exponent begins; and the encoded chunk (its dtype's code stands at DATA_AT where it is yet to be made)."""
CHUNK_COLUMNS = 6


_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_STAMP = f"{zlib.crc32(b''.join(path.read_bytes() for path in _SOURCES)):08x}"


def kernel(function: Callable[..., Any]) -> Any:
    """What Python calls: njit with an on-disk cache where some folder takes one. Compiling costs seconds, loading milliseconds.

    numba's cache notices a change of a function's own file, not of those whose functions it inlines. So the name under
    which it looks carries a checksum of all kernel files.
    """
    function.__qualname__ += f"-{_STAMP}"
    try:
        return njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function)
    except RuntimeError:  # numba found neither __pycache__ nor the user's cache folder writable
        return njit(nogil=True, no_cfunc_wrapper=True)(function)


def cache_key() -> str:
    """Changes whenever numba would compile the kernels anew: with their files, numba itself, Python and the processor.

    Begins with the checksum that the names of the compiled kernels carry.
    """
    parts = (
        [path.stat().st_mtime for path in _SOURCES],
        numba.__version__,
        sys.version,
        cpu_target.target_context.codegen().magic_tuple(),
    )
    return f"{_STAMP}-{zlib.crc32(repr(parts).encode()):08x}"


part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""What kernels alone call, compiled once."""
inline = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)
"""The same, and LLVM puts it where it is called. numba's own inlining would pass its front end each time, which is what takes
long when compiling.
"""


@inline
def step_between(base, new):
    """The step from one pattern to another, as a signed number of 16 bits."""
    return ((int64(new) - int64(base) + 0x8000) & 0xFFFF) - 0x8000


@inline
def floor_log2(value):
    return int64(63) - leading_zeros(uint64(value))


@inline
def words_at(address, count):
    """The bit patterns at an address."""
    return carray(pointer(address), (count,), np.uint16)


@inline
def octets_at(address, size):
    return carray(pointer(address), (size,), np.uint8)
