"""The index blob: its content is derived and checked, and it cannot be wrong about anything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builder import rows_of

from prime_protocol.checkpoint import CheckpointDecoder, EncodedCheckpoint, encode_checkpoint, tensor_table
from prime_protocol.chunk_index import HEAD_BYTES, MAGIC, ROW, ChunkIndex, open_index, pack_index
from prime_protocol.codec import CHUNK_ELEMENTS
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import CheckpointKind, Encoding, Manifest, PartEntry, TensorEntry
from prime_protocol.weights import WeightTensor

Raises = Callable[..., RemoteError]
Rows = list[tuple[int, int, str]]


def signed_over(encoded: EncodedCheckpoint, index: bytes) -> Encoding:
    """Act as a trainer that signs an arbitrary index."""
    return encoded.encoding.model_copy(update={"index": PartEntry(digest=digest_of(index), size=len(index))})


def opened(sample: Any, index: bytes, version: int = 0) -> ChunkIndex:
    return open_index(index, signed_over(sample.encoded[version], index), sample.manifests[version].manifest.tensors)


def test_an_index_is_its_magic_its_number_of_rows_and_its_rows() -> None:
    digests = digest_of(b"a"), digest_of(b"b")
    index = pack_index([(3, 500, digests[0]), (70_000, 1, digests[1])])
    encoded = MAGIC + bytes.fromhex("02000000") + bytes.fromhex("03000000f4010000" + digests[0])
    assert index == encoded + bytes.fromhex("7011010001000000" + digests[1])


def test_the_place_of_a_chunk_follows_from_the_rows_before_it(sample: Any) -> None:
    encoded, tensors = sample.encoded[0], sample.manifests[0].manifest.tensors
    index = open_index(encoded.index, encoded.encoding, tensors)
    for part, data in enumerate(encoded.parts):
        for number in index.of_part(part):
            chunk = index[number]
            assert chunk.part == part
            assert digest_of(data[chunk.offset : chunk.offset + chunk.size]) == chunk.digest
    assert [tensors[index[number].tensor].name for number in range(len(index))] == ["embed", "head", "norm"]
    assert sum(index[number].count for number in range(len(index))) == 605


def test_every_flipped_bit_of_an_index_is_noticed_before_it_is_read(sample: Any, raises: Raises) -> None:
    encoded, tensors = sample.encoded[0], sample.manifests[0].manifest.tensors
    for place in range(len(encoded.index)):
        tampered = encoded.index[:place] + bytes([encoded.index[place] ^ 1]) + encoded.index[place + 1 :]
        raises(ErrorCode.DIGEST_MISMATCH, open_index, tampered, encoded.encoding, tensors)
    raises(ErrorCode.DIGEST_MISMATCH, open_index, encoded.index[:-1], encoded.encoding, tensors)
    raises(ErrorCode.DIGEST_MISMATCH, open_index, encoded.index + b"\0", encoded.encoding, tensors)


def test_an_index_of_another_encoding_is_refused(sample: Any, raises: Raises) -> None:
    tensors = sample.manifests[0].manifest.tensors
    raises(ErrorCode.DIGEST_MISMATCH, open_index, sample.encoded[1].index, sample.encoded[0].encoding, tensors)


LIES: dict[str, Callable[[Rows], Rows]] = {
    "3 an empty chunk": lambda rows: [(0, 1, rows[0][2]), *rows],
    "3 a chunk without elements": lambda rows: [(1, 0, rows[0][2]), *rows],
    "3 a chunk larger than the codec's": lambda rows: [(rows[0][0], CHUNK_ELEMENTS + 1, rows[0][2]), *rows[1:]],
    "4 truncated": lambda rows: rows[:-1],
    "4 nothing": lambda _: [],
    "4 an extra chunk": lambda rows: [*rows, (1, 1, rows[0][2])],
    "4 a chunk twice": lambda rows: [rows[0], *rows],
    "4 reordered": lambda rows: rows[::-1],
    "4 a larger chunk": lambda rows: [(rows[0][0] + 1, *rows[0][1:]), *rows[1:]],
    "4 a smaller chunk": lambda rows: [(rows[0][0] - 1, *rows[0][1:]), *rows[1:]],
    "5 more elements": lambda rows: [(rows[0][0], rows[0][1] + 1, rows[0][2]), *rows[1:]],
    "5 fewer elements": lambda rows: [(rows[0][0], rows[0][1] - 1, rows[0][2]), *rows[1:]],
    "5 elements of the next tensor": lambda rows: [
        (rows[0][0], rows[0][1] + 1, rows[0][2]),
        (rows[1][0], rows[1][1] - 1, rows[1][2]),
        *rows[2:],
    ],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("version", [0, 1])
def test_a_signed_index_that_lies_is_refused(
    lie: Callable[[Rows], Rows], version: int, sample: Any, raises: Raises
) -> None:
    rows = rows_of(sample.encoded[version].index)
    raises(ErrorCode.CHAIN_BROKEN, opened, sample, pack_index(lie(rows)), version)


HEADS = {
    "no magic": lambda index: b"PRX2" + index[4:],
    "a row fewer than said": lambda index: index[: -ROW.itemsize],
    "a row more than said": lambda index: index + bytes(ROW.itemsize),
    "half a row": lambda index: index[:-1],
    "2^32 - 1 rows": lambda index: MAGIC + b"\xff" * 4 + index[HEAD_BYTES:],
    "one byte": lambda index: index[:1],
}


@pytest.mark.parametrize("change", HEADS.values(), ids=HEADS)
def test_a_signed_index_of_another_form_is_refused(
    change: Callable[[bytes], bytes], sample: Any, raises: Raises
) -> None:
    raises(ErrorCode.CHAIN_BROKEN, opened, sample, change(sample.encoded[0].index))


@given(data=st.binary(min_size=1, max_size=400))
def test_any_bytes_are_refused_as_an_index(sample: Any, data: bytes) -> None:
    with pytest.raises(RemoteError):
        opened(sample, data)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400)), max_size=6),
)
def test_an_index_of_small_numbers_is_refused_or_fits_exactly(sample: Any, sizes: list[tuple[int, int]]) -> None:
    manifest, encoding = sample.manifests[0].manifest, sample.encoded[0].encoding
    try:
        index = opened(sample, pack_index([(*size, digest_of(b"")) for size in sizes]))
    except RemoteError:
        return
    assert sum(size for size, _ in sizes) == sum(part.size for part in encoding.parts)
    for number in range(len(index)):
        chunk, tensor = index[number], manifest.tensors[index[number].tensor]
        assert 0 <= chunk.start < chunk.start + chunk.count <= int(np.prod(tensor.shape))
        assert chunk.offset + chunk.size <= encoding.parts[chunk.part].size


def test_opening_and_feeding_take_linear_time(sample: Any, changed: Callable[..., Manifest]) -> None:
    """20,000 parts of one chunk each: a scan over all chunks for each part would take minutes."""
    count = 20_000
    one = encode_checkpoint({"x": WeightTensor("bf16", (1,), np.array([7], np.uint16))})
    [row], [data] = rows_of(one.index), one.parts
    weights = {"x": WeightTensor("bf16", (count,), np.full(count, 7, np.uint16))}
    packed = pack_index([row] * count)
    encoding = Encoding(
        kind=CheckpointKind.ANCHOR,
        base=None,
        index=PartEntry(digest=digest_of(packed), size=len(packed)),
        parts=one.encoding.parts * count,
    )
    manifest = changed(sample.manifests[0].manifest, tensors=tensor_table(weights), encodings=(encoding,))
    began = time.process_time()
    index = open_index(packed, encoding, manifest.tensors)
    assert time.process_time() - began < 0.1
    decoder = CheckpointDecoder(manifest, encoding, index)
    for number in range(0, count, 20):
        decoder.feed_part(number, data)
    assert time.process_time() - began < 3.0
    with pytest.raises(RemoteError, match=f"{count - count // 20} chunks are missing"):
        decoder.finish()


def test_the_index_of_seventy_billion_parameters_opens_in_a_moment() -> None:
    count = 267_000
    tensors = [TensorEntry(name="w", dtype="bf16", shape=(count, CHUNK_ELEMENTS), digest=digest_of(b""))]
    packed = pack_index([(1_000, CHUNK_ELEMENTS, digest_of(b""))] * count)
    parts = (PartEntry(digest=digest_of(b""), size=count * 10),) * 100
    encoding = Encoding(
        kind=CheckpointKind.ANCHOR, base=None, index=PartEntry(digest=digest_of(packed), size=len(packed)), parts=parts
    )
    began = time.process_time()
    assert len(open_index(packed, encoding, tensors)) == count
    assert time.process_time() - began < 1.0
    assert len(packed) < 11 * 10**6
