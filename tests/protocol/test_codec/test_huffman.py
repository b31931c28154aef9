"""Our frames of Huffman codes are zstd's: zstd reads what our reader accepts in the same way, and other frames go to zstd."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_protocol.codec.kernels import huffman

from .cases import Array

GUARD = 0xA5


def exponents(count: int, spread: float, seed: int) -> Array:
    """Return bytes distributed like the exponents of weights, with a few of the least and the greatest that a frame can hold."""
    rng = np.random.default_rng(seed)
    plane = np.maximum(118 - rng.geometric(1 / spread, count), 0)
    plane[rng.integers(0, count, 3)] = huffman.WEIGHTS_MAX
    return plane.astype(np.uint8)


def written(plane: Array) -> bytes:
    octets = np.zeros(plane.size + 4096, np.uint8)
    size = huffman.write_frame(plane, octets, np.zeros(1 << 16, np.uint32))
    return octets[:size].tobytes()


def read(frame: bytes, size: int) -> Array | None:
    """Return our reader's result for a frame, and check that it writes nowhere else."""
    guarded = np.full(size + 128, GUARD, np.uint8)
    taken = huffman.read_huffman_frame(np.frombuffer(frame, np.uint8), guarded[64:-64])
    assert (guarded[:64] == GUARD).all()
    assert (guarded[-64:] == GUARD).all()
    return guarded[64:-64] if taken else None


@pytest.mark.parametrize(
    "count", [3000, 16384, huffman.BLOCK_BYTES, huffman.BLOCK_BYTES + 9999, 2 * huffman.BLOCK_BYTES]
)
@pytest.mark.parametrize("spread", [1.1, 2.0, 5.0, 30.0])
def test_zstd_and_our_reader_read_what_is_written(count: int, spread: float) -> None:
    plane = exponents(count, spread, seed=count)
    frame = written(plane)
    assert len(frame) < plane.size
    assert zstandard.ZstdDecompressor().decompress(frame) == plane.tobytes()
    back = read(frame, count)
    assert back is not None
    assert np.array_equal(back, plane)


def test_codes_are_about_as_short_as_zstds() -> None:
    values = np.random.default_rng(0).standard_normal(huffman.BLOCK_BYTES, np.float32) * np.float32(0.02)
    plane = ((values.view(np.uint32) >> 23) & 0xFF).astype(np.uint8)
    level = zstandard.ZstdCompressor(level=1)
    assert len(written(plane)) <= 1.002 * len(level.compress(plane.tobytes()))


def test_what_has_no_such_frame_is_left_to_zstd() -> None:
    rng = np.random.default_rng(0)
    for plane in (
        np.full(20_000, 7, np.uint8),
        rng.integers(0, 256, 20_000, np.uint8),
        rng.integers(0, 128, 20_000, np.uint8) // 100 + 129,
        exponents(huffman.BLOCK_BYTES + 1, 5.0, 0),
    ):
        assert written(plane.astype(np.uint8)) == b""
    plane = exponents(20_000, 5.0, 1)
    assert read(zstandard.ZstdCompressor(level=3).compress(plane.tobytes()), plane.size) is None
    assert read(written(plane), plane.size - 1) is None


def test_a_block_longer_than_its_content_is_left_to_zstd_which_refuses_it() -> None:
    """Codes of 1 to 11 bits, and of 11: one plane holds only the two longest, so its block has 11 bits per byte."""
    plane = np.random.default_rng(3).integers(10, 12, 3000, np.uint8)
    streams = []
    for part in np.split(plane, 4):
        bits = "1" + "".join(f"{symbol - 10:011b}" for symbol in part.tolist())
        streams.append(int(bits, 2).to_bytes((len(bits) + 7) // 8, "little"))
    tree = bytes.fromhex("8a" + "ba987654321" + "0")
    jumps = b"".join(len(stream).to_bytes(2, "little") for stream in streams[:3])
    body = tree + jumps + b"".join(streams)
    literals = (2 | (3 << 2) | (plane.size << 4) | (len(body) << 22)).to_bytes(5, "little")
    header = (1 | (2 << 1) | ((len(literals + body) + 1) << 3)).to_bytes(3, "little")
    frame = bytes(huffman.HEAD) + plane.size.to_bytes(4, "little") + header + literals + body + b"\0"
    assert read(frame, plane.size) is None
    with pytest.raises(zstandard.ZstdError):
        zstandard.ZstdDecompressor().decompress(frame)


PLANE = exponents(5000, 4.0, 2)
FRAME = written(PLANE)


@settings(max_examples=400, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, len(FRAME) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 40),
)
def test_a_frame_with_changed_bytes_is_read_as_zstd_reads_it_or_left_to_it(
    places: list[tuple[int, int]], cut: int
) -> None:
    octets = bytearray(FRAME)
    for place, octet in places:
        octets[place] = octet
    frame = bytes(octets[: len(octets) - max(0, cut - 30)])
    mine = read(frame, PLANE.size)
    if mine is not None:
        assert zstandard.ZstdDecompressor().decompress(frame) == mine.tobytes()


@pytest.mark.parametrize("place", range(60))
def test_each_byte_of_the_heads_is_read_as_zstd_reads_it_or_left_to_it(place: int) -> None:
    for octet in range(256):
        frame = FRAME[:place] + bytes((octet,)) + FRAME[place + 1 :]
        mine = read(frame, PLANE.size)
        if mine is not None:
            assert zstandard.ZstdDecompressor().decompress(frame) == mine.tobytes()
