"""Tensors <-> bytes: a flat tensor becomes a sequence of chunks, each of which decodes alone, in any order, on arrival.

A chunk holds at most `CHUNK_ELEMENTS` neighbouring elements of one tensor, either complete (an anchor) or as steps from
a base that the receiver holds (a delta). Every bit pattern survives: NaN payloads, -0, infinities and subnormals. The
encoder chooses the cheapest mode for each chunk; a decoder supports all of them.

    new, base = np.array([0x3F80, 0x3F81], np.uint16), np.array([0x3F80, 0x3F80], np.uint16)     # bf16: 1.0, 1.0078125
    for chunk in encode_tensor(new, base, dtype="bf16"):
        decode_chunk(chunk.data, out, base, dtype="bf16", start=chunk.start, count=chunk.count)

SPEC.md, section "Chunks", defines the format; `lab/prime_lab/codec_reference.py` is the same in plain Python.
The fast paths need numba and import it only when a tensor is large enough to profit. Without numba everything works,
slower and with somewhat larger deltas.
"""

from __future__ import annotations

from prime_protocol.codec.api import (
    EncodedChunk,
    Target,
    anchor_chunk_elements,
    decode_chunk,
    decode_chunks,
    encode_tensor,
    encode_tensors,
)
from prime_protocol.codec.compiling import warm_up
from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import CHUNK_ELEMENTS, DTYPES, Mode, mode_of

__all__ = [
    "CHUNK_ELEMENTS",
    "DTYPES",
    "CodecError",
    "EncodedChunk",
    "Mode",
    "Target",
    "anchor_chunk_elements",
    "decode_chunk",
    "decode_chunks",
    "encode_tensor",
    "encode_tensors",
    "mode_of",
    "warm_up",
]
