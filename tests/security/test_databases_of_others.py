"""A database in a run folder of a stranger computes nothing for those who look at it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from tests.node.coordinator_world import make_run
from typer.testing import CliRunner

from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.cli.main import app
from prime_node.cli.run_dir import STATE, RunDir
from prime_protocol.errors import LocalError

RUN = make_run()
ENDLESS = "WITH RECURSIVE r(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM r)"
EVENTS = (
    "CREATE TABLE events (number BIGINT NOT NULL, at_ms BIGINT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (number))"
)
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
