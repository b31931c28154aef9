"""`prime-node coordinator`: the daemon that leases work, accepts rollouts and serves checkpoints.

`prime-node coordinator move` takes a stopped run's state, receipts and ledger from SQLite to PostgreSQL or back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from typer.core import TyperGroup

from prime_node.cli.coordinator_replay import coordinator_replay
from prime_node.cli.new import write_join_link
from prime_node.cli.options import READ_BY_ROLE, ConfigFile, LogLevel, Options, Set, StopWithParent, command_group
from prime_node.cli.place import coordinator_hosts
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.wire_store import move_store, store_setting
from prime_node.files import write_durably
from prime_node.folder_lock import FolderLock
from prime_node.inside import refuse_links
from prime_node.keyfile import load_key
from prime_node.ports.documents import RUN_NAME
from prime_node.ports.store import Store
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import JoinLink, PinnedRun

if TYPE_CHECKING:
    from typer._click import Context

    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.envs.settings import EnvironmentSettings

log = logging.getLogger(__name__)

PORT = 8400
"""Default port, used if neither the settings nor the join link name one."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServeOrCommand(TyperGroup):
    """Group whose command `serve` needs no name: `prime-node coordinator RUN`."""

    default_command = "serve"

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Insert `serve` where no command is named."""
        return super().parse_args(ctx, args if args[:1] and args[0] in self.commands else [self.default_command, *args])


coordinator = command_group(
    "Serve a run, move a stopped one to another store, or fold its archived journal again.", cls=ServeOrCommand
)
coordinator.command("replay")(coordinator_replay)


@coordinator.command()
def serve(
    run: Annotated[Path, typer.Argument(help="Run directory made by `prime-node new`.")],
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "INFO",
    stop_with_parent: StopWithParent = False,
) -> None:
    """Serve a run to its workers, validators and trainer.

    It serves leases, uploads, verdicts, batches, checkpoints, /v1/status and /metrics. `prime-node coordinator move` takes a
    stopped run to another store, and `prime-node coordinator replay` folds its journal again; a folder called `move` is ./move.
    """
    from prime_node.cli.lifetime import run_role
    from prime_node.cli.wire_rows import traced
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.observe import setup_logging

    setup_logging("coordinator", level=log_level)
    run_dir = RunDir(run)
    pinned = run_dir.load_run()
    options = Options.of_run(str(run), config, assignments, reads=READ_BY_ROLE["coordinator"])
    settings, grants = options.load(CoordinatorConfig), options.load(EnvironmentSettings)
    with traced("coordinator", pinned.digest):
        code = run_role(
            lambda stop: _coordinate(run_dir, settings, grants, stop),
            stop_with_parent=stop_with_parent,
            grace_s=settings.grace_seconds + 5.0,
        )
    raise typer.Exit(code)


def unreachable(link: JoinLink, settings: CoordinatorConfig) -> Iterator[str]:
    """Yield the reasons why contributors cannot reach the join link unless something forwards connections to this machine."""
    if settings.gateways_listen:
        return  # the link's address is a gateway's
    url = urlsplit(link.url)
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    listening = listening_port(link, settings)
    if settings.host in LOOPBACK and url.hostname not in LOOPBACK:
        yield (
            f"the join link says {url.hostname}, but {settings.host} is reachable from this machine only: "
            'set coordinator.host = "0.0.0.0", unless a proxy forwards to it'
        )
    if listening and port != listening:
        yield f"the join link says port {port}: set coordinator.port = {port}, unless a proxy forwards to {listening}"


def listening_port(link: JoinLink, settings: CoordinatorConfig) -> int:
    """Return the configured port, or else the port in the join link."""
    return settings.port if settings.port is not None else urlsplit(link.url).port or PORT


async def _coordinate(
    run_dir: RunDir, settings: CoordinatorConfig, grants: EnvironmentSettings, stop: asyncio.Event
) -> int:
    from prime_node.cli import wire_coordinator
    from prime_node.coordinator.daemon import serve_coordinator

    refuse_links(run_dir.model)
    lock = FolderLock(run_dir.coordinator)  # taken before anything in the folder is opened or removed
    pinned = run_dir.load_run()
    if not run_dir.join_link_file.exists():
        made = write_join_link(run_dir, pinned, url=f"http://{settings.host}:{settings.port or PORT}")
        if (run_dir.public / RUN_NAME).exists():
            log.warning(
                "%s was missing and is now %s; if contributors use another address, put back a copy",
                run_dir.join_link_file,
                made,
            )
    link = run_dir.join_link()
    hosts = (*settings.hosts, *coordinator_hosts(link, pinned))
    settings = settings.model_copy(update={"port": listening_port(link, settings), "hosts": hosts})
    parts = await wire_coordinator.coordinator_parts(
        pinned,
        load_key(run_dir.key("coordinator")),
        settings,
        grants,
        folder=run_dir.coordinator,
        public=run_dir.public,
        model=run_dir.model,
        gateway_key=run_dir.key("gateway"),
    )
    for warning in unreachable(link, settings):
        log.warning(warning)
    await serve_coordinator(parts, stop)
    lock.release()
    return 0


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What two stores of one state have in common. Example: StoreSummary(812, "41c0...", 96, "77ab...")."""

    event: int
    """Number of the last event."""
    state: str
    """Digest of the snapshot of the state after it."""
    num_lines: int
    ledger: str
    """Digest of the ledger's last line, which names the line before."""


@coordinator.command()
def move(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    to: Annotated[str, typer.Argument(help='"sqlite", or a URL like postgresql://user@host/database.')],
    source: Annotated[str, typer.Option("--from", help="Present store, if the run's folder does not name it.")] = "",
) -> None:
    """Move a stopped run to another store. Both keep the same state, receipts, cursors and ledger; the old store is closed."""
    run_dir = RunDir(run)
    pinned = run_dir.load_run()
    present = _setting(source) if source else store_setting(run)
    target = _setting(to)
    if present == target:
        raise LocalError(f"the run is in {present} already")
    with FolderLock(run_dir.coordinator):
        found = asyncio.run(move_store(present, target, pinned, run_dir.coordinator, run_dir.public, _summary))
        _write_setting(run_dir, target)
    say(
        f"moved event {found.event}, state {found.state[:16]}, and {found.num_lines} lines of the ledger up to "
        f"{found.ledger[:16] or 'none'}",
        f"coordinator.store = {target} is in {run_dir.overrides_file}; a configuration that you give by --config needs it too",
    )


async def _summary(store: Store, run: PinnedRun) -> StoreSummary:
    """Return the summary of a store after its last event."""
    from prime_node.coordinator.ledger import load_chain
    from prime_node.coordinator.state.rules import rules_of
    from prime_node.coordinator.state.snapshot import state_to_json
    from prime_node.coordinator.state_follower import restore_state

    await store.check()
    number, state = await restore_state(store, rules_of(run))
    chain = await load_chain(store, run.digest)
    return StoreSummary(number, digest_of(state_to_json(state).encode()), chain.num_entries, chain.digest)


def _setting(store: str) -> str:
    """Return a value of `coordinator.store`. Raises LocalError if it cannot be one."""
    from prime_node.coordinator.config import CoordinatorConfig

    return CoordinatorConfig.load({}, {"store": store}).store


def _write_setting(run_dir: RunDir, store: str) -> None:
    kept = [line for line in run_dir.overrides() if not line.startswith("coordinator.store=")]
    lines = "".join(f"{line}\n" for line in (*kept, f"coordinator.store={store}"))
    write_durably(run_dir.overrides_file, lines.encode())
