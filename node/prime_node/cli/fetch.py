"""`prime-node fetch`: download a policy from the swarm, verify it, and write it as a Hugging Face model."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from prime_node import __version__
from prime_node.cli.options import ConfigFile, LogLevel, Options, Set
from prime_node.cli.place import HOME, Link, parse_link
from prime_node.cli.say import say
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.run_spec import JoinLink

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import Follower, Policy
    from prime_node.worker.config import WorkerConfig

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 5
PEERS_S = 1.0
"""Time to find peers before the download begins; peers found later join it."""


def fetch(
    link: Link,
    policy: Annotated[int | None, typer.Option("--policy", min=0, help="This policy instead of the newest.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the model [./policy-N].")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of downloaded pieces, from which an interrupted download resumes [~/.prime-node/fetch/RUN]."
        ),
    ] = None,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "WARNING",
) -> None:
    """Download a policy from the run's peers, verify every byte, and export it with its provenance.

    A warning says so where no source shows, with a fresh timestamp, that the policy is the newest.

    \b
    Exit codes: 0 done; 3 this machine is at fault, or there is no such policy yet; 4 no peer has it any more.
    """
    from prime_node.cli.kernels import ready_kernels
    from prime_node.folder_lock import FolderLock
    from prime_node.observe import setup_logging
    from prime_node.worker.config import WorkerConfig

    setup_logging("fetch", level=log_level)
    parsed = parse_link(link)
    settings = Options(config, assignments, reads=("worker",)).load(WorkerConfig)
    place = folder or HOME / "fetch" / parsed.run[:16]
    with FolderLock(place):
        ready_kernels(Console(stderr=True, highlight=False).print)
        written, files = asyncio.run(fetch_policy(parsed, settings, place, policy, out))
    say(f"{written}: {files} files", console=Console())


async def fetch_policy(
    link: JoinLink, settings: WorkerConfig, folder: Path, policy_version: int | None, out: Path | None
) -> tuple[Path, int]:
    """Download a policy, the newest if none is named, and write it. Return the folder and the number of files."""
    from prime_node.broadcast.audit.audit import Verified
    from prime_node.broadcast.audit.export import check_free, export_checkpoint
    from prime_node.broadcast.follow.pinned import model_files_in
    from prime_node.cli import wire, wire_swarm
    from prime_node.cli.screen import download_bar
    from prime_node.keyfile import load_or_create

    if out is not None:
        check_free(out)
    key = load_or_create(folder / "identity.key")
    with download_bar() as on_progress:
        async with wire.client(link, key) as client:
            run = await wire.pinned_run(client, link.run, folder, mirrors=settings.mirrors)
            following = wire_swarm.swarm_follower(run, key, client, folder, settings, on_progress=on_progress)
            async with following as (follower, trust, peer):
                if peer is not None:
                    await asyncio.sleep(PEERS_S)
                policy = await _policy(follower, policy_version)
                if policy_version is None and (doubt := trust.why_not_newest(policy.version)):
                    log.warning("policy %d may not be the newest: %s", policy.version, doubt)
    place = out or Path(f"policy-{policy.version}")
    check_free(place)
    files = model_files_in(folder / "model", run)
    verified = Verified(run, policy.signed, policy.weights, files)
    return place, len(export_checkpoint(verified, place, software=f"prime-node {__version__}"))


async def _policy(follower: Follower, policy_version: int | None) -> Policy:
    """Fetch a policy. Raises LocalError if it is not published yet, RemoteError if no peer has it any more."""
    from prime_node.broadcast.follow.heads import ANSWER_S_MAX
    from prime_node.ports.transport import Unreachable

    await follower.heads.look(grace_s=ANSWER_S_MAX)
    newest = follower.heads.newest
    wanted = newest if policy_version is None else policy_version
    if newest < 0 or wanted > newest:
        what = (
            "nothing is published yet"
            if newest < 0
            else f"policy {wanted} is not published yet; the newest is {newest}"
        )
        raise LocalError(f"{what}; try again later")
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            return await follower.fetch(wanted)
        except Unreachable as error:
            if attempt == ATTEMPTS_MAX:
                raise LocalError(
                    f"policy {wanted}: {error}; downloaded pieces are kept: run the command again"
                ) from None
            log.warning("policy %d: %s; trying again", wanted, error)
        except RemoteError as error:
            # If the coordinator serves no bytes, a peer that is not connected yet may have them.
            if error.code is not ErrorCode.NOT_FOUND or attempt == ATTEMPTS_MAX:
                raise
            await asyncio.sleep(PEERS_S)
            if policy_version is None:
                await follower.heads.look(grace_s=ANSWER_S_MAX)
                wanted = follower.heads.newest
    raise AssertionError("the loop returns or raises")
