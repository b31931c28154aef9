"""The codec is lossless on every bit pattern, and all its decoders are one decoder.

Three implementations read chunks: lab/prime_lab/codec_reference.py (plain Python, defines the format), numpy, and numba's
kernels in a wide and a scalar form. Every property below holds them against each other.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prime_lab import codec_reference as reference
from prime_protocol.codec import (
    CHUNK_ELEMENTS,
    DTYPES,
    Mode,
    classes,
    decode_chunk,
    encode_tensor,
    encode_tensors,
    mode_of,
    portable,
)
from prime_protocol.codec.api import CHUNKS_PER_TASK, TASKS_AHEAD
from prime_protocol.codec.kernels.patch import GROUP_ELEMENTS
from prime_protocol.codec.kernels.vector import GROUP, HAS_WIDE
from prime_protocol.codec.layout import TYPES, chunk_bytes_max, write_chunk

from .cases import (
    ALL_DECODERS,
    FLOATS_WITH_CLASSES,
    KERNELS,
    SPECIALS,
    changed,
    class_chunk,
    decode_all_ways,
    round_trip,
    weights,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 63, GROUP + 1, 3000, 16384, CHUNK_ELEMENTS + 5])
def test_every_dtype_and_size_survives(dtype: str, count: int) -> None:
    base = weights(count, dtype, seed=count)
    assert set(round_trip(base, None, dtype)) <= {Mode.FULL}
    assert set(round_trip(base.copy(), base, dtype)) <= {Mode.SKIP}
    for density in (0.0005, 0.02, 0.3, 1.0):
        round_trip(changed(base, density, 1.0, seed=1), base, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "u16"])
def test_every_pair_of_neighbouring_and_of_opposite_patterns_survives(dtype: str) -> None:
    base = np.arange(65536, dtype=np.uint16)
    for new in (
        base + np.uint16(1),
        base - np.uint16(1),
        base[::-1].copy(),
        base ^ np.uint16(0x8000),
        base * np.uint16(40503),
    ):
        round_trip(new, base, dtype)


@pytest.mark.parametrize("dtype", FLOATS_WITH_CLASSES)
def test_every_special_value_changes_into_every_other(dtype: str) -> None:
    patterns = np.array(SPECIALS[dtype], TYPES[dtype].storage)
    base = np.repeat(patterns, patterns.size)
    new = np.tile(patterns, patterns.size)
    assert decode_all_ways(class_chunk(new, base, dtype), base, dtype) == [new.tolist()] * 4
    round_trip(np.tile(new, 100), np.tile(base, 100), dtype)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS_WITH_CLASSES),
    count=st.integers(1, 2000),
    density=st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.9, 1.0]),
    spread=st.sampled_from([0.05, 0.3, 1.0, 5.0, 40.0]),
    seed=st.integers(0, 2**32 - 1),
)
@example(dtype="fp8_e4m3", count=2000, density=1.0, spread=40.0, seed=0)
def test_all_class_decoders_agree_with_the_encoder(
    dtype: str, count: int, density: float, spread: float, seed: int
) -> None:
    base = weights(count, dtype, seed)
    new = changed(base, density, spread, seed + 1)
    data = class_chunk(new, base, dtype)
    if mode_of(data) is Mode.SKIP:
        assert np.array_equal(new, base)
    else:
        # One-byte floats that cross zero take three bytes each: the chunk may be too long, and encode_chunk takes another mode.
        allowed = len(data) <= chunk_bytes_max(TYPES[dtype], count)
        assert decode_all_ways(data, base, dtype) == [new.tolist() if allowed else None] * 4


@pytest.mark.parametrize("dtype", FLOATS_WITH_CLASSES)
@pytest.mark.parametrize("count", [GROUP_ELEMENTS - 1, GROUP_ELEMENTS, 5 * GROUP_ELEMENTS + 77, CHUNK_ELEMENTS])
def test_few_changes_are_found_one_by_one_and_many_by_a_walk(dtype: str, count: int) -> None:
    base = weights(count, dtype, seed=3)
    for density, spread in ((0.0003, 0.3), (0.01, 1.0), (0.015, 3000.0), (0.1, 2.0)):
        new = changed(base, density, spread, seed=4)
        data = class_chunk(new, base, dtype)
        decoders = ALL_DECODERS if count < CHUNK_ELEMENTS else KERNELS
        assert mode_of(data) is Mode.SKIP or decode_all_ways(data, base, dtype, decoders) == [new.tolist()] * len(
            decoders
        )


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    octets=st.binary(min_size=8, max_size=600),
    other=st.binary(min_size=8, max_size=600),
)
def test_the_portable_modes_agree_with_the_reference_on_any_bytes(dtype: str, octets: bytes, other: bytes) -> None:
    element = TYPES[dtype]
    count = min(len(octets), len(other)) // element.itemsize
    base = np.frombuffer(octets, element.storage, count)
    new = np.frombuffer(other, element.storage, count)
    bodies = {
        Mode.FULL: portable.portable_encode_full(new, element),
        Mode.DENSE: portable.encode_dense(new, base, element),
    }
    if (changes := np.flatnonzero(new != base)).size:
        bodies[Mode.GAP] = portable.encode_gap(new, base, element, changes)
    for mode, body in bodies.items():
        data = write_chunk(mode, element, count, body)
        assert reference.decode(data, base.tolist(), dtype=dtype, count=count) == new.tolist()
        out = np.empty_like(new)
        decode_chunk(data, out, base, dtype=dtype, start=0, count=count)
        assert np.array_equal(out, new)


def test_the_wide_and_the_scalar_encoder_write_the_same_bytes() -> None:
    base = weights(CHUNK_ELEMENTS - 77, "bf16", 0)
    for density in (0.01, 0.3, 0.9):
        new = changed(base, density, 2.0, 1)
        made: list[bytes | None] = []
        for wide in (True, False):
            made += classes.encode_classes([(new, base)], TYPES["bf16"], wide=wide and HAS_WIDE)
        assert made[0] == made[1] is not None


def test_full_chunks_of_kernels_and_of_numpy_are_read_by_both() -> None:
    element, new, read = TYPES["bf16"], weights(50_000, "bf16", 3), np.empty(50_000, np.uint16)
    for body in (classes.encode_full(new), portable.portable_encode_full(new, element)):
        data = write_chunk(Mode.FULL, element, new.size, body)
        classes.decode_full(data, read)
        assert np.array_equal(read, new)
        assert np.array_equal(portable.portable_decode_full(data, new.size, element), new)


@pytest.mark.parametrize(("density", "expected"), [(0.0, Mode.SKIP), (0.01, Mode.CLASS), (0.4, Mode.CLASS)])
def test_a_delta_takes_the_mode_that_its_density_asks_for(density: float, expected: Mode) -> None:
    base = weights(CHUNK_ELEMENTS, "bf16", 0)
    assert round_trip(changed(base, density, 0.3, 1), base, "bf16") == [expected]


def test_unrelated_weights_are_sent_in_full() -> None:
    new, base = (
        weights(CHUNK_ELEMENTS, "bf16", 0),
        np.random.default_rng(1).integers(0, 65536, CHUNK_ELEMENTS, np.uint16),
    )
    assert round_trip(new, base, "bf16") == [Mode.FULL]


def test_small_tensors_and_wide_types_take_the_portable_modes() -> None:
    for dtype, count in (("bf16", 1000), ("fp32", 40_000), ("i32", 40_000)):
        base = weights(count, dtype, 0)
        assert round_trip(changed(base, 0.02, 1.0, 1), base, dtype) == [Mode.GAP]
        assert set(round_trip(changed(base, 0.9, 1.0, 1), base, dtype)) == {Mode.DENSE}


def test_a_typical_step_of_training_costs_less_than_a_hundredth() -> None:
    rng = np.random.default_rng(0)
    master = rng.standard_normal(CHUNK_ELEMENTS, np.float32) * np.float32(0.03)
    update = rng.standard_normal(CHUNK_ELEMENTS, np.float32) * np.float32(1e-6)
    base, new = ((values.view(np.uint32) >> 16).astype(np.uint16) for values in (master, master - update))
    (chunk,) = encode_tensor(new, base, dtype="bf16")
    assert len(chunk.data) < base.nbytes / 100


def test_threads_write_the_same_chunks_in_the_same_order() -> None:
    bases = [weights(count, "bf16", count) for count in (700_000, 10, 0, 300_000)]
    tensors = [(changed(base, 0.02, 0.5, 1), base, "bf16") for base in bases]
    alone = list(encode_tensors(tensors))
    with ThreadPoolExecutor(3) as pool:
        assert list(encode_tensors(tensors, pool=pool)) == alone
        outs = [base.copy() for base in bases]

        def apply(item: tuple[int, Any]) -> None:
            tensor, chunk = item
            decode_chunk(chunk.data, outs[tensor], outs[tensor], dtype="bf16", start=chunk.start, count=chunk.count)

        list(pool.map(apply, reversed(alone)))
    for out, (new, _, _) in zip(outs, tensors, strict=True):
        assert np.array_equal(out, new)


def test_a_pool_reads_no_further_ahead_than_its_window() -> None:
    taken = []

    def tensors() -> Any:
        for number in range(100):
            taken.append(number)
            yield weights(10, "u8", number), None, "u8"

    with ThreadPoolExecutor(2) as pool:
        next(encode_tensors(tensors(), pool=pool))
    assert len(taken) <= (TASKS_AHEAD + 1) * CHUNKS_PER_TASK


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import numpy as np
from prime_protocol.codec import decode_chunk, encode_tensor, mode_of
base = np.arange(40000, dtype=np.uint16)
new = base.copy()
new[::50] += 1
(made,) = encode_tensor(new, base, dtype="bf16")
for data in (made.data, bytes.fromhex(sys.stdin.read())):
    out = np.zeros_like(base)
    decode_chunk(data, out, base, dtype="bf16", start=0, count=base.size)
    assert (out == new).all()
    print(mode_of(data).name)
"""


def test_without_numba_deltas_are_gaps_and_foreign_class_chunks_are_read() -> None:
    base = np.arange(40000, dtype=np.uint16)
    new = base.copy()
    new[::50] += 1
    foreign = class_chunk(new, base, "bf16").hex()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA], input=foreign, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["GAP", "CLASS"]


def test_small_models_never_import_numba() -> None:
    program = (
        "import sys, numpy as np; from prime_protocol.codec import encode_tensor, decode_chunk\n"
        "base = np.arange(9999, dtype=np.uint16)\n"
        "for chunk in encode_tensor(base + np.uint16(1), base, dtype='bf16'):\n"
        "    decode_chunk(chunk.data, base.copy(), base, dtype='bf16', start=0, count=9999)\n"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
