"""`prime-node trainer`: turn accepted rollouts into policies and publish them, in one process or in those of torchrun."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prime_node.cli.options import READ_BY_ROLE, ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import Folder, Key, Place, Run, find_place
from prime_node.cli.ranks import NumProcesses, OutcomeFile, launch_ranks, run_as_rank

if TYPE_CHECKING:
    from prime_node.cli.wire_training import Ranks
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.ports.transport import PublishPort
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.trainer import Trainer

GRACE_S = 50.0
"""Time to finish the current step, save and publish."""
UNFINISHED = 5
"""Exit code after a stop request before the run was over."""


def trainer(
    run: Run,
    key: Key = None,
    folder: Folder = None,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "INFO",
    stop_with_parent: StopWithParent = False,
    nproc: NumProcesses = None,
    outcome_file: OutcomeFile = None,
) -> None:
    """Train: supervised first if configured, then on accepted rollouts; publish every policy. Resumes where it stopped.

    \b
    Exit codes: 0 the run is over; 3 this machine is at fault; 4 refused; 5 stopped as asked before the run was over; 130 stopped
    at once.
    """
    from prime_node.cli import wire_training
    from prime_node.cli.kernels import ready_kernels
    from prime_node.cli.lifetime import run_role
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.observe import setup_logging
    from prime_node.trainer.config import TrainerConfig

    setup_logging("trainer", level=log_level)
    options = Options.of_run(run, config, assignments, reads=READ_BY_ROLE["trainer"])
    settings, grants = options.load(TrainerConfig), options.load(EnvironmentSettings)
    wire_training.require_device(settings)
    ready_kernels(encodes=True)  # also needed before torchrun: each rank encodes
    if wire_training.is_under_torchrun():
        ranks = wire_training.trainer_ranks(settings)

        async def lead(stop: asyncio.Event) -> int:
            return await _train(find_place(run, "trainer", key=key, folder=folder), settings, grants, ranks, stop)

        run_as_rank(
            ranks,
            lead,
            command="trainer",
            stop_with_parent=stop_with_parent,
            grace_s=GRACE_S,
            outcome_file=outcome_file,
        )
    nproc = nproc or settings.ranks.nproc or 1
    if nproc > 1:
        arguments = [run, *_given("--key", key), *_given("--folder", folder), *_given("--config", config)]
        arguments += [part for assignment in assignments for part in ("--set", assignment)]
        raise typer.Exit(
            launch_ranks(
                "trainer",
                [*arguments, "--log-level", log_level],
                nproc,
                replicas=settings.ranks.replicas,
                restarts_max=settings.ranks.restarts_max,
                unfinished=UNFINISHED,
                stop_with_parent=stop_with_parent,
            )
        )
    place = find_place(run, "trainer", key=key, folder=folder)
    raise typer.Exit(
        run_role(
            lambda stop: _train(place, settings, grants, None, stop), stop_with_parent=stop_with_parent, grace_s=GRACE_S
        )
    )


def _given(option: str, path: Path | None) -> list[str]:
    return [] if path is None else [option, str(path)]


async def _train(
    place: Place, settings: TrainerConfig, grants: EnvironmentSettings, ranks: Ranks | None, stop: asyncio.Event
) -> int:
    from prime_node.cli import wire, wire_swarm, wire_training
    from prime_node.cli.wire_rows import traced
    from prime_node.patience import unless
    from prime_node.trainer.loop import run_trainer

    async with wire.client(place.link, place.key) as client, contextlib.AsyncExitStack() as seeding:
        seeding.enter_context(traced("trainer", place.link.run))

        async def set_up() -> Trainer:
            """Wait for an unreachable coordinator, and build in a thread so that signals are still handled."""
            run = await wire.pinned_run(client, place.link.run, place.folder)
            model = place.folder / "model"
            trust = await wire.trust(run, [(client.url, client)], place.folder)
            publish_to: PublishPort = client
            rows = await seeding.enter_async_context(wire_training.trainer_rows(settings, run, place.folder))
            if settings.swarm.enabled and not settings.swarm.private:
                publish_to, peer = wire_swarm.trainer_seeding(
                    run, place.key, client, settings.swarm, place.folder,
                    on_fault=lambda num_faults: rows.record(swarm_faults=num_faults),
                )  # fmt: skip
                await publish_to.restore()
                await seeding.enter_async_context(peer.running())
            # The environment process starts while this process builds the model: each takes seconds.
            worlds, backend = await asyncio.gather(
                asyncio.to_thread(wire.environments, run.spec, model, grants, folder=place.folder),
                asyncio.to_thread(wire_training.train_backend, settings, run.spec, ranks, model=model),
            )
            parts_of = functools.partial(
                wire_training.trainer_parts, run, client, place.key, settings, backend, rows,
                trust=trust, publish_to=publish_to, worlds=worlds, model=model, folder=place.folder,
            )  # fmt: skip
            return await asyncio.to_thread(parts_of)

        parts = await unless(stop.wait(), set_up())
        return 0 if parts is not None and await run_trainer(parts, stop) else UNFINISHED
