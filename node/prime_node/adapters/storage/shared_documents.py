"""Documents that each coordinator of a run needs, kept in the run's folder and in the database.

The leader writes a document to the database, which requires its epoch, and then to its folder, from which it reads. A standby
copies what changed into its own folder (`catch_up`), and a leader does so before its first write. A file in the folder holds the
number of the last change that was copied; without it, all documents are compared again. An empty database gets those of the
folder in one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from prime_node.adapters.storage.folder_blobs import FolderDocuments
from prime_node.adapters.storage.postgres_store import PostgresDatabase
from prime_node.adapters.storage.sql_store import SqlStore
from prime_node.files import write_durably
from prime_protocol.errors import LocalError

PAGE_DOCUMENTS = 32
"""Documents that are copied at once at most."""
CURSOR = "documents.cursor"


class SharedDocuments:
    """Implementation of ports.documents.Documents, for one room of the database."""

    def __init__(self, database: PostgresDatabase, room: str, folder: FolderDocuments) -> None:
        self._database, self._room, self._folder = database, room, folder

    async def write(self, name: str, data: bytes) -> None:
        """Store or replace a document. Raises StoreConflict if another coordinator has taken over."""
        await self._database.write_document(self._room, name, data)
        await self._folder.write(name, data)

    async def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        return await self._folder.read(name, start=start, end=end)

    async def size(self, name: str) -> int:
        return await self._folder.size(name)


class PostgresLeadership:
    """Implementation of ports.leadership.Leadership. `rooms` are the documents by their rooms."""

    def __init__(
        self,
        store: SqlStore,
        database: PostgresDatabase,
        rooms: Mapping[str, FolderDocuments],
        *,
        folder: Path,
        is_patient: bool,
    ) -> None:
        self._store, self._database, self._rooms, self._is_patient = store, database, rooms, is_patient
        self._cursor_file = folder / CURSOR
        self._cursor: int | None = None

    @property
    def is_leading(self) -> bool:
        keeper = self._database.keeper
        return keeper is not None and keeper.epoch is not None and not keeper.is_lost

    def may_answer(self) -> bool:
        return self._database.keeper is not None and self._database.keeper.may_answer()

    async def led(self) -> None:
        await self._database.lead(is_patient=self._is_patient)
        await self._store.reload()
        if not await self._database.documents(after=-1, limit=1):
            await self._database.write_first_documents(self._in_folder())

    async def _in_folder(self) -> AsyncIterator[tuple[str, str, bytes]]:
        for room, documents in self._rooms.items():
            for name in await asyncio.to_thread(documents.names):
                yield room, name, await documents.read(name)

    async def lost(self) -> None:
        assert self._database.keeper is not None
        await self._database.keeper.lost()

    async def catch_up(self) -> None:
        """Copy the documents that the leader has written since the last call into the folder."""
        after = await self._copied()
        while rows := await self._database.documents(after=after, limit=PAGE_DOCUMENTS):
            for _, room, name, data in rows:
                if (documents := self._rooms.get(room)) is not None and not await _holds(documents, name, data):
                    await documents.write(name, bytes(data))
            self._cursor = after = rows[-1][0]
            line = f"{self._database.place} {after}\n"
            await asyncio.to_thread(write_durably, self._cursor_file, line.encode())

    async def _copied(self) -> int:
        """Return the number of the last change that is in the folder; -1 if it is of another database."""
        if self._cursor is None:
            found = await asyncio.to_thread(_text_of, self._cursor_file)
            place, _, number = found.strip().rpartition(" ")
            self._cursor = int(number) if place == self._database.place and number.isdecimal() else -1
            if not await self._database.documents(after=self._cursor - 1, limit=1):
                if await self._database.documents(after=-1, limit=1):
                    raise LocalError(
                        f"{self._database.place} lacks documents that {self._cursor_file} names: it is an older copy. Put back a "
                        "newer copy, or delete that file if the older one is to be used"
                    )
                self._cursor = -1
        return self._cursor


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""


async def _holds(documents: FolderDocuments, name: str, data: bytes) -> bool:
    try:
        return await documents.read(name) == data
    except KeyError:
        return False
