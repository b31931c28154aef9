"""`prime-node validator`: judge rollouts. Several may run at once."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from prime_node.cli.options import READ_BY_ROLE, ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import Folder, Key, Place, Run, find_place

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import Follower
    from prime_node.broadcast.follow.trust import Trust
    from prime_node.cli.wire_environments import Launcher
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.ports.engine import SamplingScorer
    from prime_node.validator.config import ValidatorConfig
    from prime_node.validator.scoring_workers import ScoringWorkers
    from prime_protocol.run_spec import PinnedRun

GRACE_S = 8.0


def validator(
    run: Run,
    key: Key = None,
    folder: Folder = None,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "INFO",
    stop_with_parent: StopWithParent = False,
) -> None:
    """Judge rollouts by a forward pass of the claimed policy, and compute their rewards."""
    from prime_node.cli.kernels import ready_kernels
    from prime_node.cli.lifetime import counted_faults, run_role
    from prime_node.cli.wire import clock, environment_launcher
    from prime_node.cli.wire_rows import traced
    from prime_node.cli.wire_sandbox import absolute_model, confine_role, validator_needs
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.observe import setup_logging
    from prime_node.validator.config import ValidatorConfig

    setup_logging("validator", level=log_level)
    options = Options.of_run(run, config, assignments, reads=READ_BY_ROLE["validator"])
    settings, grants = options.load(ValidatorConfig), options.load(EnvironmentSettings)
    place = find_place(run, "validator", key=key, folder=folder)
    settings = settings.model_copy(update={"base_model": absolute_model(settings.base_model)})
    place = replace(place, folder=place.folder.resolve())
    ready_kernels()
    launcher = environment_launcher(grants, settings.sandbox, folder=place.folder)
    confine_role(settings.sandbox, place.folder, validator_needs(settings, grants, launcher))
    with traced("validator", place.link.run), counted_faults(place.folder, clock()):
        code = run_role(
            lambda stop: _validate(place, settings, grants, launcher, stop),
            stop_with_parent=stop_with_parent,
            grace_s=GRACE_S,
        )
    raise typer.Exit(code)


async def _validate(
    place: Place,
    settings: ValidatorConfig,
    grants: EnvironmentSettings,
    launcher: Launcher | None,
    stop: asyncio.Event,
) -> int:
    from prime_node.cli import wire, wire_scorers, wire_swarm
    from prime_node.cli.lifetime import pause_after_faults
    from prime_node.patience import unless
    from prime_node.validator.loop import run_validator
    from prime_node.validator.validator import Validator

    model = place.folder / "model"
    async with wire.client(place.link, place.key) as client:

        async def set_up() -> tuple[PinnedRun, SamplingScorer, ScoringWorkers]:
            """Wait for an unreachable coordinator, and build in threads so that signals are still handled."""
            await pause_after_faults(place.folder, wire.clock())
            run = await wire.pinned_run(client, place.link.run, place.folder, mirrors=settings.mirrors)
            scoring_workers = wire.scoring_workers(
                run.spec, model, grants, launcher, folder=place.folder, workers_max=settings.scorers
            )
            # The environment process starts while this process imports the scorer's modules: each takes seconds.
            scorer, _ = await asyncio.gather(
                asyncio.to_thread(wire_scorers.scorer, settings, model, run), scoring_workers.open()
            )
            return run, scorer, scoring_workers

        ready = await unless(stop.wait(), set_up())
        if ready is None:
            return 0
        run, scorer, scoring_workers = ready
        kept = max(settings.policies_kept, run.spec.async_level + 2)
        following = wire_swarm.swarm_follower(
            run, place.key, client, place.folder, settings.model_copy(update={"policies_kept": kept})
        )
        try:
            async with following as (follower, trust, _):
                task = asyncio.create_task(_follow(trust, follower))
                task.add_done_callback(lambda _: stop.set())  # a full disk ends it; its error is raised below, not lost
                try:
                    await run_validator(
                        Validator(
                            run=run,
                            config=settings,
                            coordinator=client,
                            scorer=scorer,
                            scoring_workers=scoring_workers,
                            tokenizer=wire.tokenizer(model),
                            policy=follower.weights,
                            policy_versions=follower.versions,
                            clock=wire.clock(),
                        ),
                        stop,
                    )
                finally:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
        finally:
            scoring_workers.close()
            await scorer.close()
    return 0


async def _follow(trust: Trust, follower: Follower) -> None:
    """Follow policies with the current keys. Showing a validator a frozen run does no harm: it judges what it is asked to."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(trust.follow())
        tasks.create_task(follower.follow())
