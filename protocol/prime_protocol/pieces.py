"""Pieces of an encoding: what peers announce, request and send. SPEC.md, section "Peers over HTTP".

A piece is a run of whole chunks of one part. So its receiver checks each chunk's digest before it stores, applies or
passes on anything. The cut follows from the manifest and the index alone, so all peers number the pieces alike without
exchanging it. An encoding is named by its index's digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from prime_protocol.chunk_index import ChunkIndex
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Encoding

PIECES_WISHED = 1_024
"""Target number of pieces of an encoding, within the two size bounds below."""
PIECE_BYTES_MIN = 64 * 2**10
"""Minimum size. Smaller pieces would cost more in requests than they gain."""
PIECE_BYTES_MAX = 2**20
"""Maximum size. Peers would pass larger pieces on too late."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of one part: the chunks [first_chunk, last_chunk)."""

    part: int
    start: int
    end: int
    first_chunk: int
    last_chunk: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start

    @property
    def chunks(self) -> range:
        """Numbers of its chunks."""
        return range(self.first_chunk, self.last_chunk)


def cut_pieces(encoding: Encoding, index: ChunkIndex) -> tuple[Piece, ...]:
    """Cut an encoding into pieces; its index was opened for it.

    In each part, a piece takes chunks until the target size is reached.
    """
    total = sum(part.size for part in encoding.parts)
    wished = max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, total // PIECES_WISHED))
    made: list[Piece] = []
    for part in range(len(encoding.parts)):
        made += _pieces_of(part, index.of_part(part), index, wished)
    return tuple(made)


def check_piece(piece: Piece, data: bytes | memoryview, index: ChunkIndex) -> None:
    """Check the digest of every chunk of a piece.

    Raises RemoteError(MALFORMED) for another length, otherwise RemoteError(DIGEST_MISMATCH).
    """
    if len(data) != piece.size:
        raise RemoteError(ErrorCode.MALFORMED, f"sent {len(data)} bytes for a piece of {piece.size}")
    for number, chunk in zip(piece.chunks, index.cut(piece.chunks, data), strict=True):
        if digest_of(chunk) != index.digest(number):
            raise RemoteError(ErrorCode.DIGEST_MISMATCH, f"chunk {number} does not match its digest")


def _pieces_of(part: int, chunks: range, index: ChunkIndex, wished: int) -> list[Piece]:
    made, first, start = [], chunks.start, 0
    for chunk, end in zip(chunks, accumulate(index.rows["size"][chunks.start : chunks.stop].tolist()), strict=True):
        if end - start >= wished or chunk == chunks.stop - 1:
            made.append(Piece(part, start, end, first, chunk + 1))
            first, start = chunk + 1, end
    return made
