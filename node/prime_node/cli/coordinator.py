"""`prime-node coordinator`: the daemon that leases work, takes rollouts in and serves checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_node.cli.new import write_join_link
from prime_node.cli.options import ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.run_dir import RunDir
from prime_node.folder_lock import FolderLock
from prime_node.keyfile import load_key

if TYPE_CHECKING:
    from prime_node.coordinator.config import CoordinatorConfig


def coordinator(
    run: Annotated[Path, typer.Argument(help="Run directory made by `prime-node new`.")],
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nobody changes it
    log_level: LogLevel = "INFO",
    stop_with_parent: StopWithParent = False,
) -> None:
    """Serve a run: leases, uploads, verdicts, batches, checkpoints, /v1/status and /metrics."""
    from prime_node.cli.lifetime import run_role
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.observe import setup_logging

    setup_logging("coordinator", level=log_level)
    run_dir = RunDir(run)
    run_dir.load_run()
    settings = Options(config, assignments).load(CoordinatorConfig)
    raise typer.Exit(
        run_role(
            lambda stop: _coordinate(run_dir, settings, stop),
            stop_with_parent=stop_with_parent,
            grace_s=settings.grace_seconds + 5.0,
        )
    )


async def _coordinate(run_dir: RunDir, settings: CoordinatorConfig, stop: asyncio.Event) -> int:
    from prime_node.cli import wire_coordinator
    from prime_node.coordinator.daemon import serve

    lock = FolderLock(run_dir.coordinator)  # before anything in the folder is opened or swept
    pinned = run_dir.load_run()
    parts = await wire_coordinator.coordinator_parts(
        pinned,
        load_key(run_dir.key("coordinator")),
        settings,
        folder=run_dir.coordinator,
        public=run_dir.public,
        model=run_dir.model,
    )
    if not run_dir.join_link_file.exists():
        write_join_link(run_dir, pinned, url=f"http://{settings.host}:{settings.port}")
    await serve(parts, stop)
    lock.release()
    return 0
