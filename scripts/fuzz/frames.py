"""Fuzz the reader of Huffman frames: zstd reads everything that it accepts to the same bytes, and it writes only into its plane.

    python scripts/fuzz/frames.py --seconds 180

Valid frames are mutated at random, their heads and trees most often. Atheris cannot help here: the reader is machine
code, and without coverage Atheris drops the valid frames. A finding ends the run with the frame printed as hex.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

import numpy as np
import zstandard

from prime_protocol.codec.kernels import huffman

SIZES = (1500, 5000, 20_000, huffman.BLOCK_BYTES + 3000)
GUARD = 64
HEADS_BYTES = 100
"""Heads, tree and jump table of a first block."""


def seeds() -> list[bytes]:
    """Valid frames of each size, from two symbols to a hundred."""
    found = []
    for size in SIZES:
        for spread in (1.1, 2.0, 5.0, 20.0):
            plane = np.maximum(118 - np.random.default_rng(size).geometric(1 / spread, size), 0).astype(np.uint8)
            octets = np.zeros(size + 4096, np.uint8)
            end = huffman.write_frame(plane, octets, np.zeros(1 << 16, np.uint32))
            found.append(octets[:end].tobytes())
    return [frame for frame in found if frame]


def judge(frame: bytes) -> bool:
    """Raise AssertionError on a finding; True if the frame was taken. The plane has the size that the frame declares."""
    declared = int.from_bytes(frame[len(huffman.HEAD) : huffman.HEAD_BYTES], "little")
    size = declared if 0 < declared <= 2 * huffman.BLOCK_BYTES else SIZES[0]
    guarded = np.full(size + 2 * GUARD, 0x5A, np.uint8)
    taken = bool(huffman.read_huffman_frame(np.frombuffer(frame, np.uint8), guarded[GUARD:-GUARD]))
    assert (guarded[:GUARD] == 0x5A).all(), f"wrote before its plane: {frame.hex()}"
    assert (guarded[-GUARD:] == 0x5A).all(), f"wrote behind its plane: {frame.hex()}"
    if taken:
        try:
            content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
        except zstandard.ZstdError:
            content = b""
        assert content == guarded[GUARD:-GUARD].tobytes(), f"zstd reads it otherwise: {frame.hex()}"
    return taken


def mutated(frame: bytes, rng: random.Random) -> bytes:
    octets = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place = rng.randrange(min(len(octets), HEADS_BYTES) if rng.random() < 0.7 else len(octets))
        octets[place] = rng.choice((octets[place] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 255))
    if rng.random() < 0.1:
        del octets[rng.randrange(len(octets)) :]
    return bytes(octets)


def at_random(seconds: float, seed: int) -> None:
    rng, corpus, end, counts = random.Random(seed), seeds(), time.process_time() + seconds, Counter[bool]()
    while time.process_time() < end:
        counts[judge(mutated(rng.choice(corpus), rng))] += 1
    print(f"{counts.total()} frames tried, {counts[True]} of them taken, zstd reads those alike (seed {seed})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    at_random(options.seconds, options.seed)


if __name__ == "__main__":
    main()
