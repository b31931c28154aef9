"""Compile or load the kernels before the first chunk needs them, so that nothing with a deadline waits for a compiler.

The first process on a machine compiles, for about ten seconds in each direction; later ones load machine code from
numba's cache. Without numba this module does nothing.
"""

from __future__ import annotations

import numpy as np

from prime_protocol.codec import portable
from prime_protocol.codec.api import KERNEL_ELEMENTS, decode_chunk, encode_chunks, load_kernels
from prime_protocol.codec.layout import TYPES, Mode, write_chunk

UNCHANGED = bytes((0, 0, 0, 4))
"""Body of a CLASS chunk: no boundaries, so one class, without changes or escapes."""


def ready_encoder() -> None:
    """Load the kernels that encode, or compile them."""
    if load_kernels():
        element, base = TYPES["bf16"], np.zeros(KERNEL_ELEMENTS, np.uint16)
        encode_chunks([(base, None), (base, base)], element)


def ready_decoder() -> None:
    """Load the kernels that decode, or compile them."""
    if load_kernels():
        element, out = TYPES["bf16"], np.zeros(KERNEL_ELEMENTS, np.uint16)
        out[::2] = 1 << 7  # two exponents, so that zstd has something to do
        full = write_chunk(Mode.FULL, element, out.size, portable.portable_encode_full(out, element))
        unchanged = write_chunk(Mode.CLASS, element, out.size, [UNCHANGED])
        for chunk in (full, unchanged):
            decode_chunk(chunk, out, out, dtype=element.name, start=0, count=out.size)


def warm_up() -> None:
    """Load or compile the kernels of both directions."""
    ready_encoder()
    ready_decoder()


def cache_place() -> tuple[str, str] | None:
    """Return the folder where numba keeps the kernels, and a name that changes whenever numba would recompile them.

    None if numba is missing or has found no writable folder: then each process compiles for itself.
    """
    if load_kernels() is None:
        return None
    from prime_protocol.codec.kernels.base import cache_key
    from prime_protocol.codec.kernels.decode import decode_class_table

    folder: str | None = decode_class_table.stats.cache_path
    return None if folder is None else (folder, cache_key())
