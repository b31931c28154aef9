"""Fuzz the chunk decoders: any bytes either decode within their range or raise CodecError, and all decoders agree.

    python scripts/fuzz/chunks.py --seconds 300

With `atheris` installed (Linux, x86-64), coverage of the Python parts guides the mutation; without it, valid chunks are
mutated at random. A finding ends the run with the chunk printed as hex.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from prime_lab import codec_reference as reference
from prime_protocol.codec import (
    CodecError,
    Mode,
    class_portable,
    classes,
    decode_chunk,
    encode_tensor,
    planes,
    portable,
)
from prime_protocol.codec.kernels.vector import HAS_WIDE
from prime_protocol.codec.layout import TYPES, chunk_bytes_max, write_head

COUNT = 1100
GUARD = 64
DTYPES = ("bf16", "fp16", "fp8_e4m3", "fp32")


def base_of(dtype: str) -> np.ndarray:
    """A fixed base whose elements fall into many classes."""
    rng, element = np.random.default_rng(7), TYPES[dtype]
    values = rng.standard_normal(COUNT, np.float32) * np.exp2(-rng.integers(0, 12, COUNT)).astype(np.float32)
    return np.ascontiguousarray(values.view(np.uint32) >> np.uint32(32 - 8 * element.itemsize)).astype(element.storage)


BASES = {dtype: base_of(dtype) for dtype in DTYPES}


def outcomes(data: bytes, dtype: str) -> list[list[int] | None]:
    """The result of every decoder that applies, None for a refusal."""
    element, base = TYPES[dtype], BASES[dtype]
    guarded = np.full(COUNT + 2 * GUARD, 0x5A, base.dtype)
    out = guarded[GUARD:-GUARD]

    def public() -> list[int]:
        decode_chunk(data, out, base, dtype=dtype, start=0, count=COUNT)
        return list(out.tolist())

    def kernels(wide: bool) -> list[int]:
        classes.decode_classes(data, out, base, element, wide=wide)
        return list(out.tolist())

    decoders: list[Any] = [lambda: reference.decode(data, base.tolist(), dtype=dtype, count=COUNT), public]
    head = write_head(Mode.CLASS, element, COUNT)
    if element.has_classes and data.startswith(head) and len(data) <= chunk_bytes_max(element, COUNT):
        decoders += [lambda: class_portable.portable_decode_classes(data, base, element).tolist()]
        decoders += [lambda wide=wide: kernels(wide) for wide in (False, HAS_WIDE)]
    results: list[list[int] | None] = []
    for decode in decoders:
        try:
            results.append(decode())
        except CodecError:
            results.append(None)
    assert (guarded[:GUARD] == 0x5A).all(), "wrote before its range"
    assert (guarded[-GUARD:] == 0x5A).all(), "wrote behind its range"
    return results


def judge(data: bytes, dtype: str) -> bool:
    """Raise AssertionError on a finding; True if the chunk was accepted."""
    results = outcomes(data, dtype)
    assert all(result == results[0] for result in results), f"decoders disagree: {dtype} {data.hex()}"
    return results[0] is not None


def seeds() -> list[tuple[bytes, str]]:
    """Valid chunks of all modes."""
    found: list[tuple[bytes, str]] = []
    for dtype, base in BASES.items():
        element = TYPES[dtype]
        found += [(chunk.data, dtype) for chunk in encode_tensor(base, None, dtype=dtype)]
        for seed, (density, spread) in enumerate([(0.01, 1), (0.01, 3000), (0.05, 2), (0.3, 2), (0.7, 20), (1.0, 300)]):
            rng, new = np.random.default_rng(seed), base.copy()
            where = rng.random(COUNT) < density
            new[where] += rng.integers(-spread, spread + 1, int(where.sum())).astype(base.dtype)
            found += [(chunk.data, dtype) for chunk in encode_tensor(new, base, dtype=dtype)]
            made = classes.encode_classes([(new, base)], element) if element.has_classes else []
            found += [(chunk, dtype) for chunk in made if chunk is not None]
    return found


def mutated(data: bytes, rng: random.Random) -> bytes:
    octets = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        place = rng.randrange(6, max(7, min(len(octets), 120 if rng.random() < 0.7 else len(octets))))
        if place < len(octets):
            octets[place] = rng.choice((octets[place] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 255))
    if rng.random() < 0.2:
        del octets[rng.randrange(6, len(octets) + 1) :]
    if rng.random() < 0.1:
        octets += rng.randbytes(rng.randrange(1, 9))
    return bytes(octets)


def at_random(seconds: float, seed: int) -> None:
    rng, corpus = random.Random(seed), seeds()
    end, tried, accepted = time.process_time() + seconds, 0, 0
    while time.process_time() < end:
        data, dtype = rng.choice(corpus)
        accepted += judge(mutated(data, rng), dtype)
        tried += 1
    print(f"{tried} chunks tried, {accepted} of them valid, all decoders agree (seed {seed})")


def with_atheris(seconds: float) -> None:
    import atheris

    def one(octets: bytes) -> None:
        if octets:
            dtype = DTYPES[octets[0] % len(DTYPES)]
            judge(write_head(Mode(octets[0] // 4 % 5), TYPES[dtype], COUNT) + octets[1:], dtype)

    # The plain decoders are instrumented; the kernels follow the same branches, and are compared with them.
    for holder in (reference, class_portable, portable, planes, reference.ReferenceBits, class_portable.BitReader):
        for function in vars(holder).values():
            if inspect.isfunction(function) and function.__module__.startswith("prime_protocol.codec"):
                atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as corpus:
        for number, (data, dtype) in enumerate(seeds()):
            first = bytes((DTYPES.index(dtype) + 4 * data[1],))
            Path(corpus, str(number)).write_bytes(first + data[6:])
        limits = [f"-max_total_time={int(seconds)}", "-max_len=1500", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *limits, corpus], one)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", action="store_true", help="mutate at random even where atheris is installed")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") and not options.random:
        with_atheris(options.seconds)
    else:
        at_random(options.seconds, options.seed)


if __name__ == "__main__":
    main()
