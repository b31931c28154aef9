"""Pieces: runs of whole chunks that cover an encoding once, the same for all peers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_protocol.chunk_index import ChunkIndex, open_index, pack_index
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import CheckpointKind, Encoding, PartEntry, TensorEntry
from prime_protocol.pieces import PIECE_BYTES_MAX, PIECE_BYTES_MIN, check_piece, cut_pieces


def encoding_of(parts: list[list[bytes]]) -> tuple[Encoding, ChunkIndex]:
    """Return one encoding of these chunks, each of one element."""
    chunks = [chunk for part in parts for chunk in part]
    packed = pack_index((len(chunk), 1, digest_of(chunk)) for chunk in chunks)
    blobs = [b"".join(part) for part in parts]
    encoding = Encoding(
        kind=CheckpointKind.ANCHOR,
        base=None,
        index=PartEntry(digest=digest_of(packed), size=len(packed)),
        parts=tuple(PartEntry(digest=digest_of(blob), size=len(blob)) for blob in blobs),
    )
    tensor = TensorEntry(name="w", dtype="bf16", shape=(len(chunks),), digest=digest_of(b"w"))
    return encoding, open_index(packed, encoding, [tensor])


@given(
    st.lists(st.lists(st.integers(1, 2 * PIECE_BYTES_MIN), min_size=1, max_size=8), min_size=1, max_size=4),
)
def test_pieces_cover_every_part_once_and_end_where_chunks_end(sizes: list[list[int]]) -> None:
    parts = [[bytes(size) for size in part] for part in sizes]
    encoding, index = encoding_of(parts)
    pieces = cut_pieces(encoding, index)
    chunk = 0
    for number, part in enumerate(parts):
        at = 0
        for piece in (piece for piece in pieces if piece.part == number):
            assert (piece.start, piece.first_chunk) == (at, chunk)
            assert piece.size == sum(
                len(part[i]) for i in range(len(part)) if chunk <= i + first(sizes, number) < piece.last_chunk
            )
            assert piece.size >= PIECE_BYTES_MIN or piece.end == encoding.parts[number].size
            at, chunk = piece.end, piece.last_chunk
        assert at == encoding.parts[number].size
    assert chunk == len(index)


def first(sizes: list[list[int]], number: int) -> int:
    return sum(len(part) for part in sizes[:number])


def test_a_large_encoding_is_cut_into_larger_pieces_but_not_too_large_ones() -> None:
    for chunk_bytes, expected in ((2**12, PIECE_BYTES_MIN), (2**17, 2**17), (2**20, PIECE_BYTES_MAX)):
        encoding, index = encoding_of([[bytes(chunk_bytes)] * 1_024])
        assert cut_pieces(encoding, index)[0].size == expected


def test_the_chunks_of_a_piece_are_its_bytes() -> None:
    chunks = [bytes([number]) * (PIECE_BYTES_MIN // 3) for number in range(9)]
    encoding, index = encoding_of([chunks[:5], chunks[5:]])
    blobs = [b"".join(chunks[:5]), b"".join(chunks[5:])]
    found: dict[int, bytes] = {}
    for piece in cut_pieces(encoding, index):
        data = blobs[piece.part][piece.start : piece.end]
        check_piece(piece, data, index)
        found |= dict(zip(piece.chunks, map(bytes, index.cut(piece.chunks, data)), strict=True))
    assert found == dict(enumerate(chunks))


def test_one_wrong_byte_is_found_wherever_it_is() -> None:
    chunks = [bytes([number]) * (PIECE_BYTES_MIN // 3) for number in range(4)]
    encoding, index = encoding_of([chunks])
    piece = cut_pieces(encoding, index)[0]
    right = b"".join(chunks)[: piece.end]
    for place in (0, piece.size // 2, piece.size - 1):
        wrong = bytearray(right)
        wrong[place] ^= 1
        with pytest.raises(RemoteError) as caught:
            check_piece(piece, bytes(wrong), index)
        assert caught.value.code is ErrorCode.DIGEST_MISMATCH


def test_a_piece_of_another_length_is_refused() -> None:
    encoding, index = encoding_of([[bytes(100)]])
    [piece] = cut_pieces(encoding, index)
    for data in (bytes(99), bytes(101), b""):
        with pytest.raises(RemoteError) as caught:
            check_piece(piece, data, index)
        assert caught.value.code is ErrorCode.MALFORMED
