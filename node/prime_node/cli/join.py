"""`prime-node join`: lend this machine to a run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from prime_node.cli.options import ConfigFile, EngineName, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import HOME, parse_link
from prime_protocol.run_spec import JoinLink, PinnedRun

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import DownloadProgress
    from prime_node.cli.wire_environments import Launcher
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.ports.engine import Engine
    from prime_node.ports.environment import TurnEnvironment
    from prime_node.worker.config import WorkerConfig
    from prime_protocol.identity import SigningKey

UNSAFE = "Cheat on purpose (altered, stale, int4, forged-seed, ...), to see the checks at work. You will be banned."

TIMELINE_BYTES_MAX = 2**24
"""Size limit of a worker's timeline.jsonl. A full file is kept next to its successor."""


def join(
    link: Annotated[str, typer.Argument(help="Join link: http://host:port/#<64 hex digits>.")],
    name: Annotated[str | None, typer.Option(help="What the operator sees.", show_default=False)] = None,
    engine: Annotated[EngineName | None, typer.Option(help="Inference engine.", show_default=False)] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the worker keeps its spool and policies [~/.prime-node/runs/RUN].", show_default=False
        ),
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            help="Key file, made on first use [FOLDER/identity.key if --folder is given, else ~/.prime-node/identity.key].",
            show_default=False,
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Outbound only: announce no address, serve no other worker.")
    ] = False,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "INFO",
    unsafe_cheat: Annotated[str | None, typer.Option(help=UNSAFE, show_default=False)] = None,
    unsafe_cheat_after: Annotated[int, typer.Option(help="Policies to serve honestly before cheating.")] = 0,
    stop_with_parent: StopWithParent = False,
) -> None:
    """Lend this machine to a run: fetch the newest policy, generate, upload. Ctrl-C leaves cleanly.

    \b
    Exit codes: 0 left as asked, or the run is over; 3 this machine is at fault; 4 banned, or refused; 130 stopped at once.
    """
    from prime_node.cli.kernels import ready_kernels
    from prime_node.cli.lifetime import run_role
    from prime_node.cli.wire import environment_launcher
    from prime_node.cli.wire_sandbox import absolute_model, confine_role, worker_needs
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.folder_lock import FolderLock
    from prime_node.keyfile import load_or_create
    from prime_node.observe import setup_logging
    from prime_node.worker.config import WorkerConfig

    setup_logging("worker", level=log_level)
    parsed = parse_link(link)
    options = Options(config, assignments)
    for setting, value in (("name", name), ("engine", engine)):
        if value is not None:
            options.overrides.setdefault("worker", {})[setting] = value
    if private:
        options.overrides.setdefault("worker", {}).setdefault("swarm", {})["private"] = True
    settings, grants = options.load(WorkerConfig), options.load(EnvironmentSettings)
    settings = settings.model_copy(update={"base_model": absolute_model(settings.base_model)})
    place = (folder or HOME / "runs" / parsed.run[:16]).resolve()
    key_file = identity or (HOME / "identity.key" if folder is None else folder / "identity.key")
    cheat = None if unsafe_cheat is None else (unsafe_cheat, unsafe_cheat_after)
    FolderLock(place).release()  # fail early if another worker runs there; set_up takes the lock that is kept
    ready_kernels()
    launcher = environment_launcher(grants, settings.sandbox, folder=place)
    key = load_or_create(key_file)
    confine_role(settings.sandbox, place, worker_needs(settings, grants, launcher))
    raise typer.Exit(
        run_role(
            lambda stop: _join(parsed, settings, grants, launcher, place, key, cheat, stop),
            stop_with_parent=stop_with_parent,
            grace_s=settings.grace_seconds + 5.0,
        )
    )


async def _join(
    link: JoinLink,
    settings: WorkerConfig,
    grants: EnvironmentSettings,
    launcher: Launcher | None,
    folder: Path,
    key: SigningKey,
    cheat: tuple[str, int] | None,
    stop: asyncio.Event,
) -> int:
    from prime_node.cli import wire, wire_swarm
    from prime_node.observe import BestEffort, JsonLines
    from prime_node.patience import Switch, unless
    from prime_node.worker.loop import run_worker as run_worker
    from prime_node.worker.worker import Worker

    with download_bar() as on_progress:
        async with wire.client(link, key) as client:

            async def set_up() -> tuple[PinnedRun, Engine, dict[str, TurnEnvironment]]:
                """Wait for an unreachable coordinator, and build in a thread so that signals are still handled."""
                run = await wire.pinned_run(client, link.run, folder, mirrors=settings.mirrors)
                model = folder / "model"
                # The environment process starts while this process imports the engine's modules: each takes seconds.
                made, worlds = await asyncio.gather(
                    asyncio.to_thread(wire.engine, settings, model, run, cheat=cheat),
                    asyncio.to_thread(wire.turn_environments, run.spec, model, grants, launcher, folder=folder),
                )
                return run, made, worlds

            ready = await unless(stop.wait(), set_up())
            if ready is None:
                return 0
            run, engine, environments = ready
            timeline = BestEffort(JsonLines(folder / "timeline.jsonl", bytes_max=TIMELINE_BYTES_MAX))
            try:
                accepted = Switch()
                following = wire_swarm.swarm_follower(
                    run, key, client, folder, settings, accepted=accepted, on_progress=on_progress
                )
                async with following as (follower, trust, peer):
                    worker = Worker(
                        run=run,
                        config=settings,
                        key=key,
                        coordinator=client,
                        engine=engine,
                        follower=follower,
                        trust=trust,
                        hardware=wire.describe_hardware(),
                        swarm=(lambda: "") if peer is None else peer.describe,
                        folder=folder,
                        clock=wire.clock(),
                        environments=environments,
                        rng=random.Random(),
                        timeline=timeline,
                        accepted=accepted,
                    )
                    return (await run_worker(worker, stop)).exit_code
            finally:
                timeline.close()
                await engine.close()


@contextlib.contextmanager
def download_bar() -> Iterator[Callable[[DownloadProgress], None]]:
    """Show a progress bar for downloads that take long enough; show nothing without a terminal."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: None
        return
    with Bar(
        TextColumn("policy {task.fields[version]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("policy", total=None, version="-", visible=False)

        def show(progress: DownloadProgress) -> None:
            bar.update(
                task,
                completed=progress.bytes_done,
                total=progress.bytes_total,
                version=progress.policy_version,
                visible=progress.bytes_done < progress.bytes_total,
            )

        yield show
