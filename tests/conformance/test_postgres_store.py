"""What the store on PostgreSQL does beyond ports/store.py: one writer, hosts, time limits, crashes of the server."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import asyncpg
import pytest
from tests.conformance.store_world import RUN, event, events, receipt

from prime_lab.postgres_server import PASSWORD, USER, PostgresServer, open_postgres, postgres_server
from prime_node.adapters.storage import postgres_store
from prime_node.adapters.storage.postgres_store import postgres_database, read_postgres, shown_place
from prime_node.ports.store import StoreConflict
from prime_protocol.errors import LocalError, TransientFault


async def test_a_second_coordinator_is_refused_while_the_first_one_uses_the_database(postgres: PostgresServer) -> None:
    url = postgres.make_database()
    first = await open_postgres(url, run=RUN)
    with pytest.raises(
        LocalError, match=rf"is used by the coordinator on .*, process {os.getpid()}: stop that one first"
    ):
        await open_postgres(url, run=RUN)
    await first.append([event(1)])
    await first.close()
    second = await open_postgres(url, run=RUN)
    await second.append([event(2)])
    await second.close()


async def test_a_coordinator_whose_place_was_taken_writes_nothing(postgres: PostgresServer) -> None:
    url = postgres.make_database()
    old = await open_postgres(url, run=RUN)
    await old.append([event(1)])
    # What a lost machine leads to: its lock has ended, and another coordinator has begun an epoch.
    postgres.execute("UPDATE leader SET epoch = epoch + 1", database=url.rsplit("/", 1)[1])
    for write in (old.append([event(2)], [receipt("a")], ["zero"]), old.save_snapshot(1, "one")):
        with pytest.raises(StoreConflict, match="another coordinator has taken over this database"):
            await write
    assert await events(old) == [event(1)]
    assert (await old.receipt("a"), await old.latest_snapshot()) == (None, None)
    await old.close()


async def test_a_reader_reads_beside_the_coordinator(postgres: PostgresServer) -> None:
    url = postgres.make_database()
    with pytest.raises(LocalError, match="holds no run: the coordinator has not run yet"):
        await read_postgres(url, run=RUN)
    writer = await open_postgres(url, run=RUN)
    await writer.append([event(1)], [], ["zero"])
    reader = await read_postgres(url, run=RUN)
    assert await reader.ledger(start=0, limit=1) == ["zero"]
    await reader.close()
    await writer.close()


@pytest.mark.slow
async def test_what_was_acknowledged_is_there_after_a_crash_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with postgres_server("-c", "synchronous_commit=off") as server:  # the store asks for durable commits itself
        url = server.make_database()
        store = await open_postgres(url, run=RUN)
        for number in range(1, 51):
            await store.append([event(number)], [receipt(f"{number}")], [f"line {number}"])
        server.stop("immediate")
        with pytest.raises(
            LocalError, match=r"postgresql://127.0.0.1:\d+/run_1 cannot be reached .*start the coordinator again"
        ):
            await store.append([event(51)])
        await store.close()
        server.start()
        again = await open_postgres(url, run=RUN)
        assert [entry.number for entry in await events(again)] == list(range(1, 51))
        assert await again.ledger_length() == 50
        await again.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"password": "wrong"}, "refuses this user .*: set PGPASSWORD, or write ~/.pgpass or a service file"),
        ({"password": None}, "refuses this user"),
        ({"database": "nowhere"}, "does not exist .*: make it with createdb"),
        ({"port": 1}, r"postgresql://127.0.0.1:1/run_\d+ cannot be reached .*: check the server"),
        ({"host": "no-such-host.invalid"}, "cannot be reached"),
        ({"user": "guest"}, "does not let this user make tables .*: let the user own the database"),
        ({"query": "?sslmode=nonsense"}, "coordinator.store names no database that can be used"),
        ({"port": "abc"}, "coordinator.store names no database that can be used: a port is no number"),
        ({"port": 70_000}, "a port is no number up to 65535. Write HOST:PORT"),
        ({"query": "?target_session_attrs=standby"}, "cannot be reached .*target attribute"),
        ({"host": "[::1"}, "coordinator.store names no database that can be used"),
        ({"user": "u:pa/ss"}, "a port is no number"),
    ],
)
async def test_a_mistake_of_the_operator_is_one_line(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    database = postgres.make_database().rsplit("/", 1)[1]
    if change.get("user"):
        postgres.execute(
            "DROP USER IF EXISTS guest; CREATE USER guest PASSWORD 'let-me-in'; REVOKE CREATE ON SCHEMA public FROM PUBLIC",
            database=database,
        )
    if change.get("password", PASSWORD) is None:
        monkeypatch.delenv("PGPASSWORD")
    else:
        monkeypatch.setenv("PGPASSWORD", change.get("password", PASSWORD))
    where = f"{change.get('host', '127.0.0.1')}:{change.get('port', postgres.port)}"
    url = f"postgresql://{change.get('user', USER)}@{where}/{change.get('database', database)}{change.get('query', '')}"
    with pytest.raises(LocalError, match=message) as found:
        await open_postgres(url, run=RUN)
    assert "\n" not in str(found.value)
    assert isinstance(found.value, TransientFault) == ("cannot be reached" in message)
    assert PASSWORD not in str(found.value)


async def test_several_hosts_are_one_place(postgres: PostgresServer) -> None:
    url = postgres.make_database()
    host, database = f"127.0.0.1:{postgres.port}", url.rsplit("/", 1)[1]
    store = await open_postgres(f"postgresql://{USER}@127.0.0.1:1,{host}/{database}", run=RUN)
    await store.append([event(1)])
    await store.close()
    assert shown_place(f"postgresql://u:secret@h1:5432,h2/{database}?x=1") == f"postgresql://h1:5432,h2/{database}"


async def test_the_time_limits_of_the_server_do_not_end_the_coordinator(postgres: PostgresServer) -> None:
    url = postgres.make_database()
    for limit in ("statement_timeout = '1min'", "idle_session_timeout = '1s'"):
        postgres.execute(f"ALTER ROLE {USER} SET {limit}")
    try:
        database = await postgres_database(url, run=RUN)
        assert [tuple(row) for row in await database.fetch("SHOW statement_timeout")] == [("0",)]
        postgres.execute("SELECT pg_sleep(1.5)")  # the server ends idle sessions meanwhile
        await database.set_closed("")
        await database.close()
    finally:
        postgres.execute(f"ALTER ROLE {USER} RESET ALL")


async def test_every_connection_of_the_coordinator_commits_durably(postgres: PostgresServer) -> None:
    url = postgres.make_database()
    postgres.execute(f"ALTER ROLE {USER} SET synchronous_commit = off")
    try:
        database = await postgres_database(url, run=RUN)
        for _ in range(2):  # the second time with a connection that was used before
            assert [tuple(row) for row in await database.fetch("SHOW synchronous_commit")] == [("on",)]
        await database.close()
    finally:
        postgres.execute(f"ALTER ROLE {USER} RESET ALL")


async def test_a_query_that_the_server_does_not_answer_ends_with_a_clear_error(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.make_database()
    store = await open_postgres(url, run=RUN)
    monkeypatch.setattr(postgres_store, "ANSWER_SECONDS", 0.5)
    other = await asyncpg.connect(url)
    async with other.transaction():
        await other.execute("LOCK TABLE events")
        with pytest.raises(LocalError, match=r"no answer in .* s") as found:
            await store.append([event(1)])
        with pytest.raises(TransientFault, match=r"no answer in .* s"):  # as a standby reads
            await events(store)
    assert not isinstance(found.value, StoreConflict)
    await other.close()
    await store.close()


async def test_a_table_that_is_gone_is_no_other_coordinator(postgres: PostgresServer) -> None:
    url = postgres.make_database()
    database = url.rsplit("/", 1)[1]
    store = await open_postgres(url, run=RUN)
    postgres.execute("DROP TABLE receipts", database=database)
    with pytest.raises(LocalError, match=r"cannot be written .*check the server, then start the coordinator") as found:
        await store.append([event(1)], [receipt("a")])
    assert not isinstance(found.value, StoreConflict)
    await store.close()


async def test_large_documents_are_read_one_by_one(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 32 bundles of banned workers were one read: 2 GB, for which a new standby had a minute at each of its starts."""
    monkeypatch.setattr(postgres_store, "PAGE_BYTES", 1_000)
    database = await postgres_database(postgres.make_database(), run=RUN)
    sizes = [400, 600, 1_500, 0, 1_000, 1]
    for number, size in enumerate(sizes):
        await database.write_document("evidence", f"{number}.parcel", bytes(size))
    pages, after = [], -1
    while rows := await database.documents(after=after, limit=3):
        pages.append([len(data) for *_, data in rows])
        after = rows[-1][0]
    assert pages == [[400, 600], [1_500], [0, 1_000], [1]]
    await database.close()


async def test_however_many_read_a_document_is_written(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, readers had all connections of the pool, and a coordinator whose write waits for too long ends."""
    monkeypatch.setattr(postgres_store, "ANSWER_SECONDS", 10.0)
    url = postgres.make_database()
    database, other = await postgres_database(url, run=RUN), await asyncpg.connect(url)
    async with other.transaction():
        await other.execute("LOCK TABLE ledger")
        reading = [asyncio.ensure_future(database.fetch("SELECT * FROM ledger")) for _ in range(20)]
        await asyncio.sleep(0)  # each has begun
        await database.write_document("public", "timestamp.json", b"{}")
        assert not any(one.done() for one in reading)
    assert await asyncio.gather(*reading) == [[]] * 20
    await other.close()
    await database.close()


@pytest.mark.timeout(20)
async def test_a_read_waits_for_its_place_within_its_time(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each three of these reads began their time when the three before them had ended."""
    url = postgres.make_database()
    database, other = await postgres_database(url, run=RUN), await asyncpg.connect(url)
    monkeypatch.setattr(postgres_store, "ANSWER_SECONDS", 1.0)
    async with other.transaction():
        await other.execute("LOCK TABLE ledger")
        reading = [asyncio.ensure_future(database.fetch("SELECT * FROM ledger")) for _ in range(100)]
        for each in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(each, TransientFault)
    assert await database.fetch("SELECT * FROM ledger") == []
    await other.close()
    await database.close()
