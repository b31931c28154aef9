"""Bytes from outside: any chunk either decodes within its range or raises CodecError, in memory bounded by the chunk.

The guard words around the output show writes out of bounds. Each attack tampers with a valid chunk.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prime_lab import codec_reference as reference
from prime_protocol.codec import CHUNK_ELEMENTS, DTYPES, CodecError, Mode, decode_chunk, encode_tensor
from prime_protocol.codec.layout import HEAD_BYTES, TYPES, write_head
from prime_protocol.errors import ErrorCode

from .cases import Array, changed, class_chunk, decode_all_ways, weights

COUNT = 700
BASE = weights(COUNT, "bf16", 5)


def refused(data: bytes, base: Array | None = BASE, *, dtype: str = "bf16", count: int = COUNT) -> CodecError:
    """Return the error that a chunk raises; check that the elements outside its range are unchanged."""
    out = np.full(count + 200, 0x55, TYPES[dtype].storage)
    padded = None if base is None else np.concatenate([np.zeros(100, base.dtype), base, np.zeros(100, base.dtype)])
    with pytest.raises(CodecError) as caught:
        decode_chunk(data, out, padded, dtype=dtype, start=100, count=count)
    assert (out[:100] == 0x55).all()
    assert (out[-100:] == 0x55).all()
    assert caught.value.code is ErrorCode.MALFORMED
    return caught.value


def valid(mode: Mode) -> bytes:
    """Return a chunk of each mode over BASE."""
    if mode is Mode.SKIP:
        return write_head(mode, TYPES["bf16"], COUNT)
    if mode is Mode.CLASS:
        return class_chunk(changed(BASE, 0.2, 3.0, 1), BASE, "bf16")
    new = changed(BASE, {Mode.GAP: 0.05, Mode.DENSE: 1.0, Mode.FULL: 0.0}[mode], 1.0, 1)
    (chunk,) = encode_tensor(new, None if mode is Mode.FULL else BASE, dtype="bf16")
    assert chunk.data[1] == mode
    return chunk.data


@pytest.mark.parametrize("mode", Mode)
def test_each_field_of_the_head_is_checked(mode: Mode) -> None:
    data = valid(mode)
    for place, octet in ((0, 0xC6), (1, 5), (1, 255), (2, 3), (2, 200), (3, data[3] ^ 1), (5, 255)):
        refused(data[:place] + bytes((octet,)) + data[place + 1 :])


@pytest.mark.parametrize("mode", Mode)
def test_truncated_and_extended_chunks_are_refused(mode: Mode) -> None:
    data = valid(mode)
    for size in {0, 1, HEAD_BYTES - 1, len(data) // 2, len(data) - 1} - {len(data)}:
        refused(data[:size])
    for tail in (b"\0", b"\0" * 100, b"\xff" * 5000):
        refused(data + tail)


def test_a_chunk_longer_than_its_elements_allow_is_refused_though_its_body_would_decode() -> None:
    base = weights(1275, "fp8_e4m3", 39)
    data = class_chunk(changed(base, 0.8, 3000.0, 39), base, "fp8_e4m3")
    assert len(data) > HEAD_BYTES + base.nbytes + 1024
    with pytest.raises(CodecError, match="bytes are too many"):
        decode_chunk(data, base.copy(), base, dtype="fp8_e4m3", start=0, count=base.size)


@pytest.mark.parametrize("mode", [Mode.SKIP, Mode.CLASS, Mode.GAP, Mode.DENSE])
def test_a_delta_without_a_base_is_refused(mode: Mode) -> None:
    refused(valid(mode), None)


def test_class_chunks_are_only_for_small_floats() -> None:
    data = valid(Mode.CLASS)
    for dtype in ("u16", "fp32"):
        head = write_head(Mode.CLASS, TYPES[dtype], COUNT)
        refused(head + data[HEAD_BYTES:], BASE.astype(TYPES[dtype].storage), dtype=dtype)


def plane(kind: int, payload: bytes) -> bytes:
    return bytes((kind,)) + len(payload).to_bytes(3, "little") + payload


@pytest.mark.parametrize("declared", [0, COUNT - 1, COUNT + 1, 2**29, 2**40])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(declared: int) -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(70_000)))
    frame = bytearray(b"\x28\xb5\x2f\xfd") + bytes((0xE0,)) + declared.to_bytes(8, "little") + frame[8:]
    data = write_head(Mode.FULL, TYPES["bf16"], COUNT) + plane(1, bytes(frame)) + plane(0, bytes(COUNT))
    tracemalloc.start()
    refused(data)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "bad",
    [
        plane(0, bytes(COUNT - 1)),
        plane(2, b""),
        plane(2, b"ab"),
        plane(3, bytes(COUNT)),
        plane(1, b""),
        plane(1, b"junk" * 20),
        plane(1, zstandard.ZstdCompressor().compress(bytes(COUNT)) + b"tail"),
        plane(1, zstandard.ZstdCompressor(write_content_size=False).compressobj().compress(bytes(COUNT))),
        plane(1, b"\x50\x2a\x4d\x18\x04\0\0\0skip"),
    ],
)
def test_malformed_planes_are_refused(bad: bytes) -> None:
    refused(write_head(Mode.FULL, TYPES["bf16"], COUNT) + bad + plane(0, bytes(COUNT)))
    refused(write_head(Mode.DENSE, TYPES["bf16"], COUNT) + plane(0, bytes(COUNT)) + bad)


@pytest.mark.parametrize(("num_changes", "gap"), [(0, 0), (COUNT + 1, 0), (3, 255), (2**24 - 1, 0)])
def test_positions_behind_the_end_are_refused(num_changes: int, gap: int) -> None:
    size = min(num_changes, 1000)
    gaps = [plane(0, bytes((gap,)) * size), plane(2, b"\0"), plane(2, b"\0")]
    body = num_changes.to_bytes(3, "little") + b"".join(gaps) + plane(2, b"\1") * 2
    refused(write_head(Mode.GAP, TYPES["bf16"], COUNT) + body, BASE[:COUNT])


def mutate(data: bytes, edits: list[tuple[int, int]], cut: int, tail: bytes) -> bytes:
    octets = bytearray(data)
    for place, value in edits:
        octets[place % len(octets)] ^= value
    return bytes(octets[: len(octets) - cut % 8]) + tail


tampering: Any = st.tuples(
    st.lists(st.tuples(st.integers(HEAD_BYTES, 4000), st.integers(1, 255)), max_size=6),
    st.one_of(st.just(0), st.integers(0, 7)),
    st.one_of(st.just(b""), st.binary(max_size=4)),
)


@settings(max_examples=400, deadline=None)
@given(
    dtype=st.sampled_from(["bf16", "fp16", "fp8_e4m3"]),
    density=st.sampled_from([0.004, 0.015, 0.2, 0.8]),
    spread=st.sampled_from([0.1, 2.0, 30.0, 3000.0]),
    seed=st.integers(0, 50),
    how=tampering,
)
@example(dtype="fp8_e4m3", density=0.8, spread=3000.0, seed=39, how=([], 0, b""))  # longer than a chunk may be
def test_all_class_decoders_agree_on_tampered_chunks(
    dtype: str, density: float, spread: float, seed: int, how: tuple[list[tuple[int, int]], int, bytes]
) -> None:
    base = weights(300 + 25 * seed, dtype, seed)
    data = class_chunk(changed(base, density, spread, seed), base, dtype)
    if data[1] == Mode.SKIP:
        return
    edits, cut, tail = how
    results = decode_all_ways(mutate(data, [(p % (len(data) - 6) + 6, v) for p, v in edits], cut, tail), base, dtype)
    assert results == [results[0]] * 4


@settings(max_examples=400, deadline=None)
@given(body=st.binary(max_size=400), top=st.integers(100, 140), boundaries=st.integers(0, 2**16 - 1))
def test_all_class_decoders_agree_on_any_bytes(body: bytes, top: int, boundaries: int) -> None:
    data = write_head(Mode.CLASS, TYPES["bf16"], 300) + bytes((top,)) + boundaries.to_bytes(2, "little") + body
    results = decode_all_ways(data, BASE[:300], "bf16")
    assert results == [results[0]] * 4


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    mode=st.sampled_from(Mode),
    body=st.binary(max_size=300),
    count=st.integers(1, 90),
)
def test_any_body_in_any_mode_decodes_or_is_refused(dtype: str, mode: Mode, body: bytes, count: int) -> None:
    element = TYPES[dtype]
    data, base = write_head(mode, element, count) + body, np.arange(count).astype(element.storage)
    out = np.zeros(count, element.storage)
    try:
        decode_chunk(data, out, base, dtype=dtype, start=0, count=count)
    except CodecError:
        with pytest.raises(CodecError):
            reference.decode(data, base.tolist(), dtype=dtype, count=count)
    else:
        assert out.tolist() == reference.decode(data, base.tolist(), dtype=dtype, count=count)


def test_a_refused_chunk_does_not_disturb_the_next_one() -> None:
    base = weights(CHUNK_ELEMENTS, "bf16", 0)
    new = changed(base, 0.3, 4.0, 1)
    good = class_chunk(new, base, "bf16")
    rng = np.random.default_rng(0)
    for _ in range(30):
        bad = bytearray(good)
        bad[int(rng.integers(6, len(bad)))] ^= int(rng.integers(1, 256))
        out = base.copy()
        try:
            decode_chunk(bytes(bad), out, base, dtype="bf16", start=0, count=base.size)
        except CodecError:
            decode_chunk(good, out, base, dtype="bf16", start=0, count=base.size)
            assert np.array_equal(out, new)


def test_a_foreign_base_is_noticed_or_decodes_within_its_range() -> None:
    base = weights(CHUNK_ELEMENTS, "bf16", 0)
    good = class_chunk(changed(base, 0.9, 1.0, 1), base, "bf16")
    error = refused(good, weights(CHUNK_ELEMENTS, "bf16", 99), count=CHUNK_ELEMENTS)
    assert "classes do not match this base" in error.reason
