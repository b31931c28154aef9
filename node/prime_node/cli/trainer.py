"""`prime-node trainer`: turns accepted rollouts into policies and publishes them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer

from prime_node.cli.options import ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import Folder, Key, Place, Run, find_place

if TYPE_CHECKING:
    from prime_node.trainer.trainer import Trainer

GRACE_S = 50.0
"""Time to finish the step under way, save and publish."""
UNFINISHED = 5
"""Exit code where it was asked to stop before the run was over."""


def trainer(
    run: Run,
    key: Key = None,
    folder: Folder = None,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nobody changes it
    log_level: LogLevel = "INFO",
    stop_with_parent: StopWithParent = False,
) -> None:
    """Train: supervised first where configured, then on accepted rollouts; publish every policy. Resumes where it stopped."""
    from prime_node.cli.lifetime import run_role
    from prime_node.observe import setup_logging

    setup_logging("trainer", level=log_level)
    place = find_place(run, "trainer", key=key, folder=folder)
    options = Options(config, assignments)
    raise typer.Exit(
        run_role(lambda stop: _train(place, options, stop), stop_with_parent=stop_with_parent, grace_s=GRACE_S)
    )


async def _train(place: Place, options: Options, stop: asyncio.Event) -> int:
    from prime_node.broadcast.pinned import fetch_run
    from prime_node.cli import wire
    from prime_node.patience import unless
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.loop import run as run_trainer

    settings = options.load(TrainerConfig)
    async with wire.client(place.link, place.key) as client:

        async def set_up() -> Trainer:
            """Waits for a coordinator that is away, and builds in a thread: signals are heard all the while."""
            run = await fetch_run(client, place.link.run, clock=wire.clock())
            client.bounds = run.spec.limits
            model = await wire.model_folder(client, run, place.folder / "model")
            return await asyncio.to_thread(
                wire.trainer_parts, run, client, place.key, settings, model=model, folder=place.folder
            )

        parts = await unless(stop.wait(), set_up())
        return 0 if parts is not None and await run_trainer(parts, stop) else UNFINISHED
