"""`prime-node up`: the whole system on one machine, new or resumed. up_session.py runs its processes."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from prime_node.cli.config import check_settings
from prime_node.cli.gpu_plan import GpuPlan
from prime_node.cli.missing_extra import require_extras
from prime_node.cli.options import ConfigFile, EngineName, Options, Set
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.up_config import UpConfig
from prime_node.cli.up_session import UpSession
from prime_node.config import read_toml
from prime_node.folder_lock import FolderLock
from prime_node.observe import setup_logging
from prime_node.patience import Stop, unless
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import JoinLink, PinnedRun


def up(
    directory: Annotated[
        Path, typer.Argument(help="Run directory; created if it does not exist, else resumed.")
    ] = Path("runs/demo"),
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    engine: Annotated[EngineName | None, typer.Option(help="Inference engine of the workers [worker.engine].")] = None,
) -> None:
    """Start everything on this machine and train, or resume a run that was stopped."""
    require_extras("up")
    run_dir = RunDir(directory)
    options = _options(run_dir, config, assignments)
    settings = _settings(run_dir, options)
    with FolderLock(run_dir.path):  # makes the folder, so errors in the command line must be reported before this line
        setup_logging("up", file=run_dir.log("up"), bytes_max=settings.log_bytes_max)
        code = asyncio.run(_up(run_dir, options, settings, config_file=config or _shipped_demo(), engine=engine))
    raise typer.Exit(code)


async def _up(run_dir: RunDir, options: Options, settings: UpConfig, *, config_file: Path, engine: str | None) -> int:
    console = Console()
    plan = await asyncio.to_thread(_planned, run_dir, options, engine)
    for remark in remarks_on_machine(options, engine):
        say(remark, "")
    run, resumed = _open_or_make(run_dir, options, config_file)
    link = _choose_address(run_dir, run, settings)
    say(
        f"{'resuming' if resumed else 'new run'} in {run_dir.path}",
        f"  join link  {link}",
        f"  page       {link.url}/    in a browser: whether it learns, who works",
        f"  metrics    {link.url}/metrics",
        f"  logs       {run_dir.path / 'logs'}    Ctrl-C stops; the same command resumes",
        "",
        console=console,
    )

    stop = Stop()

    def on_signal(number: signal.Signals) -> None:
        stop.hurry = stop.hurry or number is signal.SIGINT
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    session = UpSession(run_dir, run, link, settings, engine, options.assignments, plan)
    try:
        await unless(stop.wait(), session.start())
        finished = not stop.is_set() and await session.watch(console, stop)
        if finished:
            await unless(stop.wait(), session.until_workers_left())
    finally:
        await (session.interrupt() if stop.hurry else session.stop())
    if not finished:
        say("", f"stopped at step {session.progress.step}; `prime-node up {run_dir.path}` resumes", console=console)
        return 130 if stop.is_set() else 3
    from prime_node.cli.summary import summarise

    return await summarise(run_dir, run, session.status, console, replay_steps=settings.replay_steps)


def _planned(run_dir: RunDir, options: Options, engine: str | None) -> GpuPlan | None:
    """Return the division of this machine's GPUs, and print it; None if no role uses one. Raises LocalError."""
    from prime_node.cli.wire_gpus import plan_here

    plan = plan_here(run_dir, options, engine)
    if plan is not None:
        say(*plan.lines(), "")
    return plan


def remarks_on_machine(options: Options, engine: str | None) -> list[str]:
    """Return why workers with these settings generate slowly here, and why this machine's GPUs are not used."""
    from prime_node.cli.wire_classes import slow_arithmetic, unused_gpus, worker_kind
    from prime_node.worker.config import WorkerConfig

    chosen = {} if engine is None else {"engine": engine}
    unused = (reason := unused_gpus()) and f"no GPU is used: {reason}"
    slow = slow_arithmetic(worker_kind(options.load(WorkerConfig).model_copy(update=chosen)))
    return [remark for remark in (unused, slow) if remark]


def _options(run_dir: RunDir, config: Path | None, assignments: list[str]) -> Options:
    """Return the options: a new run takes the given config, or the demo's.

    An existing run keeps its own, apart from role settings.
    """
    if not run_dir.exists:
        return Options(config or _shipped_demo(), assignments)
    if config is not None and read_toml(config) != read_toml(run_dir.config):
        raise LocalError(f"{run_dir.path} was made with another config; leave --config out, or choose another folder")
    options = Options(run_dir.config, [*run_dir.overrides(), *assignments])
    if any(assignment.startswith("run.") for assignment in assignments):
        raise LocalError(f"the run in {run_dir.path} is signed and fixed: --set run.* is for a new folder")
    return options


def _settings(run_dir: RunDir, options: Options) -> UpConfig:
    """Return the settings of `up`, and check those of its children too, with the trainer's own code. Raises LocalError."""
    from prime_node.algo.registry import import_object
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.pinned_recipe import import_paths

    check_settings(options, with_run=not run_dir.exists)
    for path in sorted(import_paths(options.load(TrainerConfig))):
        import_object(path)  # the trainer would find a mistake only after the run is made
    return options.load(UpConfig)


def _open_or_make(run_dir: RunDir, options: Options, config_file: Path) -> tuple[PinnedRun, bool]:
    if run_dir.exists:
        return run_dir.load_run(), True
    from prime_node.cli.new import make_run

    return make_run(run_dir, options, config_file=config_file), False


def _choose_address(run_dir: RunDir, run: PinnedRun, settings: UpConfig) -> JoinLink:
    """Choose the address: the previous one if it is free, else the configured port, else any free port."""
    from prime_node.cli.new import write_join_link

    wanted = [settings.port]
    if run_dir.join_link_file.exists():
        wanted.insert(0, urlsplit(run_dir.join_link().url).port or 0)
    port = next((port for port in wanted if port and _is_free(settings.host, port)), 0) or _free_port(settings.host)
    return write_join_link(run_dir, run, url=f"http://{settings.host}:{port}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
    return port


def _shipped_demo() -> Path:
    from prime_node.cli.shipped import config_path

    return config_path("demo.toml")
