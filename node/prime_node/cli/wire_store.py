"""The part of wire.py for the coordinator's store and blobs: `coordinator.store` and `coordinator.blobs` choose them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from prime_node.cli.missing_extra import needing_extra
from prime_node.cli.options import Options
from prime_node.cli.run_dir import STATE
from prime_protocol.errors import LocalError
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX
from prime_protocol.run_spec import PinnedRun

if TYPE_CHECKING:
    from prime_node.adapters.storage.sql_store import Database, SqlStore
    from prime_node.coordinator.api.direct_uploads import DirectBucket
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.ports.blobs import Blobs
    from prime_node.ports.documents import Documents
    from prime_node.ports.leadership import Leadership
    from prime_node.ports.store import Store

Summary = TypeVar("Summary")

PUBLIC, EVIDENCE = "public", "evidence"
"""Rooms of documents in a database. The second one is a folder of the coordinator's too."""
EMBEDDED, FOLDER = "sqlite", "folder"
"""Values of `coordinator.store` and `coordinator.blobs` for the run's folder."""


def store_setting(run_dir: Path) -> str:
    """Return `coordinator.store` of a run's folder. Raises LocalError."""
    from prime_node.coordinator.config import CoordinatorConfig

    return Options.of_run(str(run_dir), None, []).load(CoordinatorConfig).store


def has_store(setting: str, folder: Path) -> bool:
    """Return whether the coordinator's folder names a store that may hold something."""
    return setting != EMBEDDED or (folder / STATE).exists()


@dataclass(frozen=True, slots=True)
class Storage:
    """What a coordinator keeps apart from blobs."""

    store: Store
    published: Documents
    private: Documents
    leadership: Leadership | None = None


async def open_storage(settings: CoordinatorConfig, run: PinnedRun, folder: Path, *, public: Path) -> Storage:
    """Open the store and the documents of a coordinator's folder. Raises LocalError.

    With PostgreSQL, nothing is written before its leadership begins.
    """
    from prime_node.adapters.storage.folder_blobs import FolderDocuments

    published, private = FolderDocuments(public), FolderDocuments(folder / EVIDENCE)
    if settings.store == EMBEDDED:
        return Storage(await _open_embedded(run, folder), published, private)
    with needing_extra("postgres", "stores in PostgreSQL"):
        from prime_node.adapters.storage.postgres_store import follow_postgres
    from prime_node.adapters.storage.shared_documents import PostgresLeadership, SharedDocuments
    from prime_node.adapters.storage.sql_store import SqlStore

    database = await follow_postgres(settings.store, run=run.digest, term_s=settings.term_seconds)
    store = await SqlStore.open(database)
    rooms = {PUBLIC: published, EVIDENCE: private}
    return Storage(
        store,
        SharedDocuments(database, PUBLIC, published),
        SharedDocuments(database, EVIDENCE, private),
        PostgresLeadership(store, database, rooms, folder=folder, is_patient=settings.standby),
    )


async def _open_embedded(run: PinnedRun, folder: Path) -> SqlStore:
    from prime_node.adapters.storage.sqlite_store import open_sqlite

    return await open_sqlite(folder / STATE, run=run.digest)


async def open_database(setting: str, run: PinnedRun, folder: Path) -> tuple[Database, str]:
    """Open the tables of a store for a move, and return them with their place for messages. Raises LocalError."""
    if setting == EMBEDDED:
        from prime_node.adapters.storage.sqlite_store import sqlite_database

        path = (folder / STATE).resolve()  # the same name from each working folder
        return await sqlite_database(path, run=run.digest), str(path)
    with needing_extra("postgres", "stores in PostgreSQL"):
        from prime_node.adapters.storage.postgres_store import postgres_database, shown_place
    return await postgres_database(setting, run=run.digest), shown_place(setting)


async def move_store(
    present: str,
    target: str,
    run: PinnedRun,
    folder: Path,
    public: Path,
    summary_of: Callable[[Store, PinnedRun], Awaitable[Summary]],
) -> Summary:
    """Copy a store into another one, compare both by their summaries, and close the old one. Raises LocalError.

    Documents that another machine's coordinator wrote come from a database into the run's folder.
    If this move has ended before, return the summary of the new store.
    """
    from prime_node.adapters.storage.sql_store import SqlStore
    from prime_node.adapters.storage.store_copy import copy_store, has_moved

    old, old_place = await open_database(present, run, folder)
    try:
        await _require_rows(old, folder if present == EMBEDDED else None)
        before = await summary_of(await SqlStore.over(old), run)
        new, new_place = await open_database(target, run, folder)
        try:
            if await has_moved(old, new, target_place=new_place):
                return await summary_of(await SqlStore.over(new), run)

            async def check() -> None:
                after = await summary_of(await SqlStore.over(new), run)
                if after != before:
                    raise LocalError(f"the copy in {new_place} differs: {after}, not {before}; nothing was moved")
                if present != EMBEDDED:
                    await _bring_documents(old, folder, public)

            await copy_store(old, new, source_place=old_place, target_place=new_place, check=check)
            return before
        finally:
            await new.close()
    finally:
        await old.close()


async def _require_rows(database: Database, folder: Path | None) -> None:
    """Check all rows of a store before its target is opened. `folder` is that of a file. Raises LocalError."""
    from prime_node.adapters.storage.sql_store import SqlStore
    from prime_node.adapters.storage.store_copy import require_plain_rows

    if folder is not None:  # a server's columns have types
        await asyncio.to_thread(require_plain_rows, (folder / STATE).resolve())
    async for _ in (await SqlStore.over(database)).segments(after=-1):
        pass


async def _bring_documents(database: Database, folder: Path, public: Path) -> None:
    """Copy the documents that the folder lacks out of a database in PostgreSQL."""
    from prime_node.adapters.storage.folder_blobs import FolderDocuments
    from prime_node.adapters.storage.postgres_store import PostgresDatabase
    from prime_node.adapters.storage.shared_documents import PostgresLeadership
    from prime_node.adapters.storage.sql_store import SqlStore

    assert isinstance(database, PostgresDatabase)
    rooms = {PUBLIC: FolderDocuments(public), EVIDENCE: FolderDocuments(folder / EVIDENCE)}
    store = await SqlStore.over(database)
    await PostgresLeadership(store, database, rooms, folder=folder, is_patient=False).catch_up()


async def read_store(setting: str, run: PinnedRun, folder: Path) -> SqlStore:
    """Open the store of a coordinator that does not run here, to read it. Raises LocalError."""
    if not has_store(setting, folder):
        raise LocalError(f"{folder} holds no {STATE}: the coordinator has not run yet")
    if setting == EMBEDDED:
        return await _open_embedded(run, folder)
    with needing_extra("postgres", "stores in PostgreSQL"):
        from prime_node.adapters.storage.postgres_store import read_postgres
    return await read_postgres(setting, run=run.digest)


async def open_direct(settings: CoordinatorConfig, run: PinnedRun) -> DirectBucket | None:
    """Open the place for bodies that workers put into the bucket themselves, if they may. Raises LocalError."""
    if settings.uploads != "direct":
        return None
    from prime_node.coordinator.api.direct_uploads import DirectBucket

    incoming = await open_blobs(settings.blobs, run, Path("incoming"))
    from prime_node.adapters.storage.s3_blobs import S3Blobs, S3UploadUrls

    assert isinstance(incoming, S3Blobs)
    return DirectBucket(incoming, S3UploadUrls(incoming.place))


async def open_blobs(setting: str, run: PinnedRun, folder: Path) -> Blobs:
    """Open the blobs of a folder, or those of its name in a bucket. Raises LocalError."""
    if setting == FOLDER:
        from prime_node.adapters.storage.folder_blobs import FolderBlobs

        return FolderBlobs(folder)
    with needing_extra("s3", "blobs in S3"):
        from prime_node.adapters.storage.s3_blobs import open_s3
    bounds = run.spec.limits
    bytes_max = max(bounds.blob_bytes_max, bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX)
    return await open_s3(setting, folder.name, run=run.digest, bytes_max=bytes_max)
