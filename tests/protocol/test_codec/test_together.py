"""Several chunks in one call: the same bytes and the same elements as one by one, in any combination."""

from __future__ import annotations

import numpy as np
import pytest

from prime_protocol.codec import (
    CHUNK_ELEMENTS,
    CodecError,
    Mode,
    Target,
    anchor_chunk_elements,
    decode_chunks,
    encode_tensors,
    mode_of,
)
from prime_protocol.codec.api import CHUNKS_PER_TASK, encode_chunks
from prime_protocol.codec.layout import TYPES

from .cases import Array, changed, class_chunk, weights

Tensor = tuple[Array, Array | None, str]


def tensors() -> list[Tensor]:
    """Return chunks of every mode, with planes and escapes, of several types and sizes."""
    made: list[Tensor] = []
    for number, (dtype, count, density, spread) in enumerate(
        [
            ("bf16", CHUNK_ELEMENTS + 20_000, 0.01, 1.0),
            ("bf16", 40_000, 0.95, 2.0),
            ("bf16", 40_000, 0.0, 1.0),
            ("bf16", 500, 0.02, 1.0),
            ("fp16", 40_000, 0.02, 3000.0),
            ("fp8_e4m3", 40_000, 0.02, 1.0),
            ("fp8_e4m3", 40_000, 0.95, 2.0),
            ("i32", 40_000, 0.9, 1.0),
            ("bf16", 40_000, 0.9, 2.0),
        ]
    ):
        base = weights(count, dtype, number)
        made.append((changed(base, density, spread, number), base, dtype))
    return [*made, (weights(300_000, "bf16", 99), None, "bf16")]


def test_any_chunks_are_decoded_together_into_other_memory_or_in_place() -> None:
    given = tensors()
    chunks = list(encode_tensors(given))
    assert {mode_of(chunk.data) for _, chunk in chunks} == set(Mode)
    beside = [np.full_like(new, 7) for new, _, _ in given]
    in_place = [np.full_like(new, 7) if base is None else base.copy() for new, base, _ in given]
    for outs in (beside, in_place):
        targets = [
            Target(out, out if base is not None and outs is in_place else base, dtype=dtype)
            for out, (_, base, dtype) in zip(outs, given, strict=True)
        ]
        decode_chunks((chunk.data, chunk.start, chunk.count, targets[number]) for number, chunk in reversed(chunks))
        for out, (new, _, _) in zip(outs, given, strict=True):
            assert np.array_equal(out, new)


def test_chunks_that_are_encoded_together_are_those_that_are_encoded_alone() -> None:
    rng, element = np.random.default_rng(0), TYPES["bf16"]
    bases = [weights(count, "bf16", seed) for seed, count in enumerate([40_000] * CHUNKS_PER_TASK)]
    pairs: list[tuple[Array, Array | None]] = [(changed(base, rng.random(), 50.0, 1), base) for base in bases]
    assert encode_chunks(pairs, element) == [encode_chunks([pair], element)[0] for pair in pairs]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_chunk_among_good_ones_is_refused_and_nothing_outside_them_is_written(place: int) -> None:
    base = weights(3 * 40_000, "bf16", 0)
    parts = [slice(start, start + 40_000) for start in range(0, base.size, 40_000)]
    for density in (0.01, 0.95):
        chunks = [class_chunk(changed(base[part], density, 1.0, 1), base[part], "bf16") for part in parts]
        chunks[place] = chunks[place][:-1]
        room = np.full(base.size + 256, 0x5A5A, np.uint16)
        target = Target(room[128:-128], base, dtype="bf16")
        with pytest.raises(CodecError):
            decode_chunks((data, part.start, 40_000, target) for data, part in zip(chunks, parts, strict=True))
        assert (room[:128] == 0x5A5A).all()
        assert (room[-128:] == 0x5A5A).all()


def test_a_chunk_is_never_decoded_beyond_its_target() -> None:
    base = weights(40_000, "bf16", 0)
    data, target = class_chunk(changed(base, 0.01, 1.0, 1), base, "bf16"), Target(base.copy(), base, dtype="bf16")
    for start, count in ((1, 40_000), (-1, 40_000), (40_000, 40_000)):
        with pytest.raises(ValueError, match=f"elements {start} to {start + count} of a tensor of 40000"):
            decode_chunks([(data, start, count, target)])


def test_tensors_whose_addresses_would_lead_the_kernels_elsewhere_are_refused_with_or_without_assertions() -> None:
    base, element = weights(CHUNK_ELEMENTS + 1, "bf16", 0), TYPES["bf16"]
    frozen = base.copy()
    frozen.flags.writeable = False
    for out, other in ((frozen, base), (base, base[:-1]), (base[::2], None), (base.view(np.uint8), None)):
        with pytest.raises(ValueError, match=r"read-only|its base has|not a flat, contiguous tensor"):
            Target(out, other, dtype="bf16")
    for new, other in ((base, base), (base, None), (base[:0], None), (base[:9], base[:8]), (base[:20:2], base[:10])):
        with pytest.raises(ValueError, match=r"a chunk has 1 to|its base has|not a flat, contiguous tensor"):
            encode_chunks([(new, other)], element)
    with pytest.raises(ValueError, match="its base has"):
        list(encode_tensors([(base, base[:-1], "bf16")]))


def test_a_base_that_only_the_call_holds_lives_until_its_chunks_are_decoded() -> None:
    given = [
        (changed(base, 0.01, 1.0, 1), base) for base in (weights(CHUNK_ELEMENTS, "bf16", seed) for seed in range(3))
    ]
    chunks = [class_chunk(new, base, "bf16") for new, base in given]
    outs = [np.zeros_like(new) for new, _ in given]
    decode_chunks(
        (data, 0, new.size, Target(out, base.copy(), dtype="bf16"))
        for data, out, (new, base) in zip(chunks, outs, given, strict=True)
    )
    for out, (new, _) in zip(outs, given, strict=True):
        assert np.array_equal(out, new)


def test_an_anchor_is_cut_into_about_as_many_chunks_as_wished_within_two_sizes() -> None:
    assert [anchor_chunk_elements(num) for num in (0, 10**6, 10**7, 32 * 10**6, 10**11)] == [
        2**14, 2**14, 2**16, 2**17, 2**17,
    ]  # fmt: skip
    for num in (5 * 10**6, 10**7, 3 * 10**7):
        assert 128 <= num // anchor_chunk_elements(num) <= 512
