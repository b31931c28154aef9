"""Writes tests/vectors/codec.json: one chunk for each mode and each way to code a class, with its base and its result.

    python tests/protocol/test_codec/make_vectors.py

Only ever add vectors: the chunks that are there were sent once, and every later decoder must read them.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np

from prime_protocol.codec import class_portable, classes, encode_tensor, portable
from prime_protocol.codec.layout import HEAD_BYTES, TYPES, Mode, write_chunk
from prime_protocol.codec.wire import EXCEPTIONS, GOLOMB, ONES, PLANE, RICE, SPARSE, lowest_exponents

VECTORS = Path(__file__).parents[2] / "vectors" / "codec.json"


def text(octets: bytes) -> str:
    return base64.b64encode(octets).decode()


def case(name: str, dtype: str, new: np.ndarray, base: np.ndarray | None, chunk: bytes) -> dict[str, object]:
    return {
        "name": name,
        "dtype": dtype,
        "count": new.size,
        "base": None if base is None else text(base.tobytes()),
        "chunk": text(chunk),
        "new": text(new.tobytes()),
    }


def codings(body: bytes, num_elements: int) -> set[tuple[int, int]]:
    """Return the (coder, magnitude code) of every class in a CLASS body."""
    lowest = lowest_exponents(body[0], int.from_bytes(body[1:3], "little"))
    reader = class_portable.BitReader(body[3:])
    plans = [class_portable.portable_read_plan(reader, num_elements) for _ in lowest]
    return {(plan.coder, plan.magnitudes) for plan in plans}


def class_case(
    name: str, wanted: tuple[int, int], dtype: str, count: int, density: float, spread: float
) -> dict[str, object]:
    """Return the first random delta whose encoding shows the wanted coding."""
    element = TYPES[dtype]
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        bias = (1 << (8 * element.itemsize - 1 - element.exponent_shift)) // 2
        exponents = np.maximum(bias - rng.geometric(0.5, count), 0) << element.exponent_shift
        fractions = rng.integers(0, 1 << element.exponent_shift, count)
        signs = rng.integers(0, 2, count) << (8 * element.itemsize - 1)
        base = (exponents | fractions | signs).astype(element.storage)
        steps = np.where(rng.random(count) < density, np.rint(rng.laplace(0, spread, count)), 0).astype(np.int64)
        new = (base.astype(np.int64) + steps).astype(element.storage)
        (chunk,) = classes.encode_classes([(new, base)], element)
        if chunk is not None and wanted in codings(chunk[HEAD_BYTES:], count):
            return case(name, dtype, new, base, chunk)
    raise ValueError(f"no seed gives {name}")


def main() -> None:
    words = np.array([0, 0x8000, 1, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0080] * 4, np.uint16)
    moved = words.copy()
    moved[3], moved[17] = 0x3F81, 0x8001
    cases = []
    for dtype, new in (
        ("bf16", words),
        ("fp8_e4m3", words.view(np.uint8)),
        ("fp32", words.view(np.uint32)),
        ("i64", words.view(np.uint64)),
    ):
        (full,) = encode_tensor(new, None, dtype=dtype)
        cases.append(case(f"full {dtype}", dtype, new, None, full.data))
    element, changes, shifted = TYPES["bf16"], np.flatnonzero(moved != words), words + np.uint16(1)
    for mode, new, body in (
        (Mode.SKIP, words, []),
        (Mode.GAP, moved, portable.encode_gap(moved, words, element, changes)),
        (Mode.DENSE, shifted, portable.encode_dense(shifted, words, element)),
    ):
        cases.append(case(f"{mode.name.lower()} bf16", "bf16", new, words, write_chunk(mode, element, new.size, body)))
    cases += [
        class_case("class ones", (SPARSE, ONES), "bf16", 300, 0.05, 0.8),
        class_case("class exceptions", (SPARSE, EXCEPTIONS), "bf16", 300, 0.3, 1.0),
        class_case("class rice", (SPARSE, RICE), "bf16", 300, 0.5, 8.0),
        class_case("class golomb", (SPARSE, GOLOMB), "bf16", 300, 0.5, 4.0),
        class_case("class plane", (PLANE, ONES), "bf16", 6000, 0.95, 2.0),
        class_case("class fp16", (SPARSE, ONES), "fp16", 300, 0.05, 0.8),
        class_case("class fp8_e4m3", (SPARSE, ONES), "fp8_e4m3", 300, 0.05, 0.8),
        class_case("class fp8_e5m2", (SPARSE, ONES), "fp8_e5m2", 300, 0.05, 0.8),
    ]
    escaped = words.copy()
    escaped[[2, 30]] = 0x4000, 0xC123
    (coded,) = classes.encode_classes([(escaped, words)], TYPES["bf16"])
    assert coded is not None
    cases.append(case("class escapes", "bf16", escaped, words, coded))
    VECTORS.write_text(json.dumps({"chunks": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
