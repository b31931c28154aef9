"""`prime-node evaluate`: evaluate a run's policies on held-out problems, on any machine, in parallel with training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from prime_node.cli.options import ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import HOME, Link, OwnKey, parse_link
from prime_node.cli.say import say
from prime_node.patience import unless
from prime_protocol.run_spec import JoinLink, PinnedRun

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import Policy
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.observe import Recorder
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.evaluate import Evaluator
    from prime_node.worker.config import WorkerConfig

GRACE_S = 10.0


def evaluate(
    link: Link,
    every: Annotated[int, typer.Option("--every", min=1, help="Evaluate every N-th policy.")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Where policies and evaluations.jsonl are kept [~/.prime-node/evaluate/RUN].")
    ] = None,
    key: OwnKey = None,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "WARNING",
    stop_with_parent: StopWithParent = False,
) -> None:
    """Evaluate the newest policies on held-out problems until the run ends; one line and one row for each.

    The [trainer] settings evaluation_* define the evaluation, the [worker] settings the engine. Each row is labelled:
    `eval_trusted` is true only for a key of the run.
    """
    from prime_node.cli.lifetime import run_role
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.observe import setup_logging
    from prime_node.trainer.config import TrainerConfig
    from prime_node.worker.config import WorkerConfig

    setup_logging("evaluate", level=log_level)
    parsed, options = parse_link(link), Options(config, assignments, reads=("trainer", "worker", "environments"))
    how, engine = options.load(TrainerConfig), options.load(WorkerConfig)
    grants = options.load(EnvironmentSettings)
    place = folder or HOME / "evaluate" / parsed.run[:16]
    raise typer.Exit(
        run_role(
            lambda stop: _evaluate(parsed, how, engine, grants, place, key or place / "identity.key", every, stop),
            stop_with_parent=stop_with_parent,
            grace_s=GRACE_S,
        )
    )


async def _evaluate(
    link: JoinLink,
    how: TrainerConfig,
    settings: WorkerConfig,
    grants: EnvironmentSettings,
    folder: Path,
    key_file: Path,
    every: int,
    stop: asyncio.Event,
) -> int:
    from prime_node.cli import wire, wire_swarm, wire_training
    from prime_node.cli.screen import download_bar
    from prime_node.folder_lock import FolderLock
    from prime_node.keyfile import load_or_create
    from prime_node.observe import JsonLines

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with FolderLock(folder), download_bar() as on_progress:
        key = load_or_create(key_file)
        async with wire.client(link, key) as client:
            run = await unless(stop.wait(), wire.pinned_run(client, link.run, folder, mirrors=settings.mirrors))
            if run is None:
                return 0
            say(
                f"run '{run.spec.name}': a line for each policy, and a row in {folder / 'evaluations.jsonl'}",
                console=console,
            )
            model = folder / "model"
            engine = await asyncio.to_thread(wire.engine, settings, model, run, cheat=None)
            worlds = await asyncio.to_thread(wire.environments, run.spec, model, grants, folder=folder)
            evaluator = wire_training.evaluator_of(run, how, engine, wire.tokenizer(model), worlds)
            rows = JsonLines(folder / "evaluations.jsonl")
            following = wire_swarm.swarm_follower(run, key, client, folder, settings, on_progress=on_progress)
            try:
                async with following as (follower, trust, _), asyncio.TaskGroup() as tasks:
                    beside = [tasks.create_task(trust.follow()), tasks.create_task(follower.follow())]
                    await each_policy(
                        follower.wait_newer,
                        evaluator,
                        rows,
                        stop,
                        run=run,
                        every=every,
                        marks=marks_of(run, key.key_id),
                    )
                    for task in beside:
                        task.cancel()
            finally:
                rows.close()
                await evaluator.close()
    return 0


def marks_of(run: PinnedRun, key_id: str) -> dict[str, Any]:
    """Return the labels of a row: the evaluating key, and whether the run trusts it in any role."""
    keys = run.keys.current
    return {
        "eval_by": key_id,
        "eval_trusted": key_id in {*keys.root, *keys.coordinator, *keys.trainer, *keys.validator},
    }


async def each_policy(
    wait_newer: Callable[[int], Coroutine[Any, Any, Policy]],
    evaluator: Evaluator,
    rows: Recorder,
    stop: asyncio.Event,
    *,
    run: PinnedRun,
    every: int,
    marks: dict[str, Any],
) -> None:
    """Evaluate policies until `stop` is set or the run's last policy is evaluated.

    Skip policies that arrive during an evaluation.
    """
    version, last = -1, run.spec.max_steps
    while version < last:
        policy = await unless(stop.wait(), wait_newer(version))
        if policy is None:
            return
        is_due = version < 0 or policy.version // every > version // every or policy.version == last
        version = policy.version
        if not is_due:
            continue
        figures = await evaluator.evaluate(policy.weights, version)
        rows.record(step=version, **figures, **marks)
        shown = ("eval_greedy", "eval_sampled", "eval_reward")
        line = "  ".join(
            f"{name.removeprefix('eval_')} {figures[name]:.2f} ({figures[f'{name}_low']:.2f} to {figures[f'{name}_high']:.2f})"
            for name in shown
            if f"{name}_low" in figures
        )
        if failed := figures.get("eval_failed"):
            line += f"  {failed:.0f} answers could not be scored"
        say(f"policy {version}  {line}")
