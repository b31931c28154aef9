"""What follows from a piece that did not come, or came wrong: the source lacks it, or the publisher signed broken bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from prime_node.broadcast.swarm.piece_sets import PieceSet
from prime_node.broadcast.swarm.sources import NamedSource, SourcePool, fetch_from
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import PartEntry
from prime_protocol.pieces import Piece


class Absences:
    """The pieces of one encoding that sources reported missing."""

    def __init__(self, encoding: str, pool: SourcePool) -> None:
        """Begin without reports. `encoding` is the digest of the index."""
        self._encoding = encoding
        self._pool = pool
        self._absent: dict[str, PieceSet] = {}

    def report(self, name: str, pieces: PieceSet) -> None:
        """Record what a source lacks."""
        self._absent[name] = self._absent.get(name, 0) | pieces

    def of(self, name: str) -> PieceSet:
        """Return what a source lacks, as far as it was reported."""
        return self._absent.get(name, 0)

    def nowhere(self, wanted: PieceSet) -> PieceSet:
        """Return those of the wanted pieces that every permanent source lacks and no peer announces."""
        lasting = self._pool.lasting
        if not lasting:
            return 0
        for named in lasting:
            wanted &= self._absent.get(named.name, 0)
        for named in self._pool.peers:
            wanted &= ~named.has.get(self._encoding, 0)
        return wanted


async def broken_publication(
    named: NamedSource, entry: PartEntry, piece: Piece, check: Callable[[Piece, bytes], None]
) -> RemoteError | None:
    """Return the error if a wrong piece from a permanent source is the publisher's fault, else None.

    It is if the part has its digest and its chunks do not match those that the index names. No source can do better then.
    """
    with contextlib.suppress(RemoteError, Unreachable):
        data = await fetch_from(named.source, entry)
        try:
            await asyncio.to_thread(check, piece, data[piece.start : piece.end])
        except RemoteError as wrong:
            return RemoteError(ErrorCode.CHAIN_BROKEN, f"published damaged: {wrong.detail}")
    return None
