"""A database in a run folder of a stranger computes nothing for those who look at it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from pathlib import Path

import pytest
from tests.node.coordinator_world import COORDINATOR, make_run
from tests.node.operator_world import write_key
from typer.testing import CliRunner

from prime_node.adapters.storage.row_digests import sealed
from prime_node.adapters.storage.sql_store import TABLES
from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.cli.main import app
from prime_node.cli.run_dir import STATE, RunDir
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state.snapshot import state_to_json
from prime_protocol.errors import LocalError

RUN = make_run()
ENDLESS = "WITH RECURSIVE r(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM r)"
EVENTS = (
    "CREATE TABLE events (number BIGINT NOT NULL, at_ms BIGINT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (number))"
)
HIGH_STEP = re.sub(r'"head":-?[0-9]+', '"head":1' + "0" * 400, state_to_json(State(rules_of(RUN))))
HUGE = "hex(zeroblob(400000000))"


def execute(folder: Path, *statements: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(folder / STATE)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


@pytest.mark.parametrize(
    ("statements", "named"),
    [
        ([f"CREATE VIEW events AS {ENDLESS} SELECT number, 0 AS at_ms, '' AS payload FROM r"], "view 'events'"),
        (
            [
                f"CREATE TABLE snapshots (number BIGINT PRIMARY KEY, payload TEXT GENERATED ALWAYS AS ({HUGE}))",
                "INSERT INTO snapshots (number) VALUES (1)",
            ],
            "table 'snapshots'",
        ),
        ([EVENTS, f"CREATE TRIGGER late BEFORE INSERT ON events BEGIN SELECT {HUGE}; END"], "trigger 'late'"),
        ([EVENTS, "CREATE INDEX odd ON events (length(payload))"], "index 'odd'"),
        (["CREATE TABLE other (number BIGINT)"], "table 'other'"),
        ([EVENTS.replace("at_ms", "at_us")], "table 'events'"),
    ],
    ids=["endless view", "huge column", "trigger", "computed index", "other table", "other column"],
)
def test_a_database_that_computes_what_is_read_from_it_is_refused(
    tmp_path: Path, statements: list[str], named: str
) -> None:
    """Before, `prime-node status FOLDER` hung without end, or took gigabytes."""
    folder = RunDir(tmp_path)
    folder.run_spec.write_bytes(RUN.envelope.to_bytes())
    folder.join_link_file.write_text(f"http://127.0.0.1:9/#{RUN.digest}")
    execute(folder.coordinator, *statements)
    shown = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert isinstance(shown.exception, LocalError)
    assert f"has a {named} that no coordinator" in str(shown.exception)


async def test_a_coordinator_s_own_database_is_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        await (await open_sqlite(tmp_path / STATE, run=RUN.digest)).close()
        execute(tmp_path, "ANALYZE")


@pytest.mark.parametrize(
    ("table", "row", "arguments", "said"),
    [
        ("ledger", (0, b"\xff"), ["ledger", "export"], "row 0 of ledger is damaged"),
        ("ledger", (2**63 - 1, "{}"), ["ledger", "export"], "which no coordinator writes"),
        ("snapshots", (0, b"\xff"), ["status"], "row 0 of snapshots is damaged"),
        ("snapshots", (0, HIGH_STEP), ["status"], "is invalid at"),
    ],
    ids=["bytes in the ledger", "endless ledger", "bytes in a snapshot", "step above all counts"],
)
def test_no_row_whose_digest_is_right_gives_a_traceback(
    tmp_path: Path, table: str, row: tuple[int, object], arguments: list[str], said: str
) -> None:
    """The digests of rows are against rot: a stranger computes those of other rows."""
    folder = RunDir(tmp_path)
    write_key(folder.key("coordinator"), COORDINATOR)
    folder.run_spec.write_bytes(RUN.envelope.to_bytes())
    folder.join_link_file.write_text(f"http://127.0.0.1:9/#{RUN.digest}")
    folder.coordinator.mkdir()
    asyncio.run(_made(folder.coordinator / STATE))
    columns = TABLES[table]
    with contextlib.closing(sqlite3.connect(folder.coordinator / STATE)) as connection:
        places = ", ".join("?" * len(columns))
        connection.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})", sealed(*row))
        connection.commit()
    shown = CliRunner().invoke(app, [*arguments, str(tmp_path)])
    assert isinstance(shown.exception, LocalError)
    assert said in str(shown.exception)


async def _made(path: Path) -> None:
    await (await open_sqlite(path, run=RUN.digest)).close()
