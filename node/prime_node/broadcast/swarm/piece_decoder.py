"""Processing of the bytes of a piece, in threads: verified, stored on the disk, decoded.

One job in a decoder's thread does all three, so that a piece crosses between threads once. It reports a piece before it decodes
it, so that peers learn of the piece early.

Invariant: nothing is stored or decoded before each of its chunks matched its digest.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.piece_sets import PieceSet, members, piece_set
from prime_node.ports.transport import Unreachable
from prime_protocol.chunk_index import ChunkIndex
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Encoding
from prime_protocol.pieces import Piece, check_piece

DECODERS = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "decode")
"""Thread pool of all downloads.

Each thread keeps a dozen megabytes of codec buffers, which would otherwise be allocated for each delta.
"""

Decode = Callable[[range, bytes | memoryview], None]
"""Function of (numbers of neighbouring chunks, the verified bytes of all of them). Called from threads. Raises RemoteError."""


class PieceDecoder:
    """The pieces of one encoding, on their way to the disk and to its decoder."""

    def __init__(
        self, encoding: Encoding, index: ChunkIndex, pieces: Sequence[Piece], parts: PartStore, decode: Decode
    ) -> None:
        self._encoding = encoding
        self._index = index
        self._pieces = pieces
        self._parts = parts
        self._decode = decode
        self.of_part: list[PieceSet] = [0] * len(encoding.parts)
        """Pieces of each part."""
        for number, piece in enumerate(pieces):
            self.of_part[piece.part] |= 1 << number
        self._stored: set[int] = set()
        """Parts with room on the disk."""
        self._guard = threading.Lock()
        self._decoded: PieceSet = 0
        """Pieces that a thread has started; a duplicate is not decoded again. Guarded by `_guard`."""

    @property
    def storable(self) -> PieceSet:
        """Pieces of the parts that have room on the disk."""
        made = 0
        for part in self._stored:
            made |= self.of_part[part]
        return made

    async def restore(self, on_bytes: Callable[[int], None]) -> PieceSet:
        """Decode what is on disk from an earlier download. Return the pieces; `on_bytes` gets their bytes. Raises OSError."""
        found = 0
        for part, entry in enumerate(self._encoding.parts):
            is_new = not self._parts.has_some(entry.digest)
            if not await asyncio.to_thread(self._parts.begin, entry):
                continue
            self._stored.add(part)
            if is_new:
                continue
            here = await asyncio.get_running_loop().run_in_executor(DECODERS, self._take_verified, part)
            on_bytes(sum(self._pieces[number].size for number in members(here)))
            found |= here
            if here == self.of_part[part]:
                await asyncio.to_thread(self._parts.finish, entry)
            elif self._parts.has(entry.digest):
                await asyncio.to_thread(self._parts.reopen, entry.digest)
        return found

    def take(self, number: int, data: bytes) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        """Return futures (verified and stored, decoded) of one job in a thread. Await the second only if the first succeeds."""
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if stored.cancelled():
                return
            stored.set_result(None) if error is None else stored.set_exception(error)

        def job() -> None:
            try:
                self._store(self._pieces[number], data)
            except Exception as error:  # noqa: BLE001 - carried over to the task
                loop.call_soon_threadsafe(settle, error)
                return
            loop.call_soon_threadsafe(settle, None)
            with self._guard:
                if self._decoded >> number & 1:
                    return
                self._decoded |= 1 << number
            self._decode(self._pieces[number].chunks, data)

        return stored, loop.run_in_executor(DECODERS, job)

    async def finish(self, part: int, have: PieceSet) -> None:
        """Name a part as whole on the disk, if all its pieces are in `have`.

        Raises RemoteError(CHAIN_BROKEN) if its digest is wrong although every piece is right: the publisher signed both. Raises
        Unreachable if a piece on the disk is not the one that arrived. The part is removed then, and fetched again.
        """
        if have & self.of_part[part] == self.of_part[part] and part in self._stored:
            await asyncio.to_thread(self._finish, part)

    def check(self, piece: Piece, data: bytes | memoryview) -> None:
        """Compare a piece with the digests of its chunks. Raises RemoteError."""
        check_piece(piece, data, self._index)

    def is_storable(self, number: int) -> bool:
        """Return whether the part of a piece has room on the disk."""
        return self._pieces[number].part in self._stored

    def _store(self, piece: Piece, data: bytes) -> None:
        self.check(piece, data)
        if piece.part in self._stored:
            self._parts.put(self._encoding.parts[piece.part].digest, piece.start, data)

    def _finish(self, part: int) -> None:
        entry = self._encoding.parts[part]
        if self._parts.finish(entry):
            return
        is_sound = all(self._verified(number) is not None for number in members(self.of_part[part]))
        self._parts.remove(entry.digest)
        if is_sound:
            raise RemoteError(ErrorCode.CHAIN_BROKEN, f"part {entry.digest[:12]} was published with another digest")
        raise Unreachable(
            f"part {entry.digest[:12]} on this disk is not what arrived: test the disk; fetching it again"
        )

    def _verified(self, number: int) -> bytes | None:
        """Return a piece that is on the disk, or None if its bytes are wrong."""
        piece = self._pieces[number]
        data = self._parts.get(self._encoding.parts[piece.part].digest, piece.start, piece.end)
        try:
            self.check(piece, data or b"")
        except RemoteError:
            return None
        return data

    def _take_verified(self, part: int) -> PieceSet:
        """Return the pieces of a part on disk that verify, decoded. It reads one at a time, since a part may be large."""
        here = []
        for number in members(self.of_part[part]):
            if (data := self._verified(number)) is not None:
                self._decode(self._pieces[number].chunks, data)
                here.append(number)
        return piece_set(here)
