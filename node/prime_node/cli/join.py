"""`prime-node join`: lend this machine to a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from prime_node.cli.options import READ_BY_ROLE, ConfigFile, EngineName, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import Link, given_link

UNSAFE = "Cheat on purpose (altered, stale, int4, forged-seed, ...), to see the checks at work. You will be banned."


def join(
    link: Link,
    name: Annotated[str | None, typer.Option(help="Name of this worker on the operator's screens.")] = None,
    engine: Annotated[EngineName | None, typer.Option(help="Inference engine.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of policies and of rollouts that wait for upload [~/.prime-node/runs/RUN]."),
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            help="Key file, made on first use [FOLDER/identity.key if --folder is given, else ~/.prime-node/identity.key]."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Outbound only: announce no address, serve no other worker.")
    ] = False,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "INFO",
    unsafe_cheat: Annotated[str | None, typer.Option(help=UNSAFE, hidden=True)] = None,
    unsafe_cheat_after: Annotated[
        int, typer.Option(help="Policies to serve honestly before cheating.", hidden=True)
    ] = 0,
    stop_with_parent: StopWithParent = False,
) -> None:
    """Lend this machine to a run: fetch the newest policy, generate, upload. Ctrl-C leaves cleanly.

    \b
    Exit codes: 0 left as asked, or the run is over; 3 this machine is at fault; 4 banned, or refused; 6 a fault that may pass;
    130 stopped at once.
    """
    from prime_node.cli.api import confined_worker, run_confined
    from prime_node.cli.lifetime import counted_faults, run_role
    from prime_node.cli.node_screen import node_screen
    from prime_node.cli.wire import clock
    from prime_node.cli.wire_rows import traced
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.observe import setup_logging
    from prime_node.worker.config import WorkerConfig

    setup_logging("worker", level=log_level)
    options = Options(config, assignments, reads=READ_BY_ROLE["join"])
    for setting, value in (("name", name), ("engine", engine)):
        if value is not None:
            options.overrides.setdefault("worker", {})[setting] = value
    if private:
        options.overrides.setdefault("worker", {}).setdefault("swarm", {})["private"] = True
    worker = confined_worker(
        given_link(link),
        options.load(WorkerConfig),
        options.load(EnvironmentSettings),
        folder=folder,
        identity=identity,
        cheat=None if unsafe_cheat is None else (unsafe_cheat, unsafe_cheat_after),
    )

    async def main(stop: asyncio.Event) -> int:
        with node_screen() as screen:
            return (await run_confined(worker, stop, screen=screen)).exit_code

    with traced("worker", worker.link.run), counted_faults(worker.folder, clock()):
        code = run_role(main, stop_with_parent=stop_with_parent, grace_s=worker.settings.grace_seconds + 5.0)
    raise typer.Exit(code)
