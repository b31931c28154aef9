"""`prime-node seed`: lend bandwidth and a disk to a run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from prime_node.cli.options import READ_BY_ROLE, ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import HOME, Link, OwnKey, given_link, parse_link
from prime_protocol.run_spec import JoinLink

if TYPE_CHECKING:
    from prime_node.broadcast.seed.seeder import Seeder
    from prime_node.broadcast.swarm.peer import Peer
    from prime_node.ports.swarm import PeerFinder
    from prime_node.worker.config import WorkerConfig
    from prime_protocol.identity import SigningKey

log = logging.getLogger(__name__)

GRACE_S = 5.0
STATUS_S = 10.0
"""Interval between two status lines."""


def seed(
    link: Link,
    folder: Annotated[Path | None, typer.Option(help="Folder of policies [~/.prime-node/seeds/RUN].")] = None,
    identity: OwnKey = None,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "INFO",
    stop_with_parent: StopWithParent = False,
) -> None:
    """Store a run's newest policies and serve them to its workers: bandwidth without a GPU. Settings: [worker.swarm]."""
    from prime_node.cli.lifetime import run_role
    from prime_node.cli.wire_sandbox import Needs, confine_role
    from prime_node.folder_lock import FolderLock
    from prime_node.keyfile import load_or_create
    from prime_node.observe import setup_logging
    from prime_node.worker.config import WorkerConfig

    setup_logging("seed", level=log_level)
    parsed = parse_link(given_link(link))
    settings = Options(config, assignments, reads=READ_BY_ROLE["seed"]).load(WorkerConfig)
    place = (folder or HOME / "seeds" / parsed.run[:16]).resolve()
    with FolderLock(place):
        key = load_or_create(identity or place / "identity.key")
        confine_role(settings.sandbox, place, Needs())
        code = run_role(
            lambda stop: serve_policies(parsed, settings, place, key, stop),
            stop_with_parent=stop_with_parent,
            grace_s=GRACE_S,
        )
    raise typer.Exit(code)


async def serve_policies(
    link: JoinLink, settings: WorkerConfig, folder: Path, key: SigningKey, stop: asyncio.Event
) -> int:
    """Follow the run and serve its checkpoints until `stop`. Return the exit code."""
    from prime_node.cli import wire, wire_swarm
    from prime_node.patience import causes_of, unless

    async with wire.client(link, key) as client:

        async def serve() -> None:
            run = await wire.pinned_run(client, link.run, folder, mirrors=settings.mirrors)
            await require_admission(client, key)
            async with wire_swarm.seeder(run, key, client, folder, settings) as (seeder, peer):
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(_tell(peer, seeder))
                        await seeder.follow()
                except ExceptionGroup as group:
                    raise causes_of(group)[0] from None

        await unless(stop.wait(), serve())
    return 0


async def require_admission(client: PeerFinder, key: SigningKey) -> None:
    """Check that the run admits this key.

    Raises RemoteError if the run lists no peers for this key. If the coordinator is unreachable, or this machine's clock is
    wrong, log a warning and return: the peer asks again later.
    """
    from prime_node.patience import may_pass
    from prime_node.ports.transport import Unreachable
    from prime_protocol.errors import RemoteError
    from prime_protocol.requests import PeersRequest

    try:
        reply = await client.find_peers(PeersRequest())
    except (Unreachable, RemoteError) as error:
        if not may_pass(error):
            raise
        log.warning("the coordinator has not confirmed yet that this seeder may take part: %s", error)
        return
    if not reply.ticket:
        log.info(
            "this key is not a member: peers serve it from the share for non-members, and few peers learn its address; "
            "the operator can add it to coordinator.seeders: %s",
            key.key_id,
        )


async def _tell(peer: Peer, seeder: Seeder) -> NoReturn:
    """Log a status line every STATUS_S seconds."""
    while True:
        await asyncio.sleep(STATUS_S)
        log.info("policy %d | %s", seeder.seed_store.newest, peer.describe())
