"""The processes of a command that computes in several: rank 0 runs the command, and the others follow its calls.

`launch.py` starts them with torchrun.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    import asyncio

    from prime_node.cli.wire_training import Ranks

NumProcesses = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Processes on this machine, one for each GPU, started by torchrun.")
]
OutcomeFile = Annotated[Path | None, typer.Option("--outcome-file", hidden=True)]


def run_as_rank(
    ranks: Ranks,
    main: Callable[[asyncio.Event], Awaitable[int]],
    *,
    command: str,
    stop_with_parent: bool,
    grace_s: float,
    outcome_file: Path | None,
) -> NoReturn:
    """Run `main` as rank 0, or follow rank 0; then exit. Rank 0 writes its exit code to `outcome_file`, and exits with success.

    Rank 0 dismisses the others on an expected end. On a bug they end with it, and torchrun restarts all of them.
    """
    from prime_node.cli import wire_training
    from prime_node.cli.lifetime import run_role
    from prime_node.cli.outcome import tell
    from prime_protocol.errors import PrimeError

    if not ranks.is_first:
        _follow(ranks)
    try:
        code = run_role(main, stop_with_parent=stop_with_parent, grace_s=grace_s)
    except (PrimeError, BaseExceptionGroup) as error:
        code = tell(error, command)
    wire_training.dismiss_ranks(ranks)
    if outcome_file is None:
        raise typer.Exit(code)
    outcome_file.write_text(str(code), encoding="utf-8")
    raise typer.Exit(0)


def launch_ranks(
    command: str,
    arguments: list[str],
    nproc: int,
    *,
    replicas: int = 1,
    restarts_max: int = 0,
    unfinished: int,
    failed: int | None = None,
    stop_with_parent: bool = False,
) -> int:
    """Run a command of prime-node in several processes and return its exit code. Raises LocalError.

    Exit codes if rank 0 leaves none: `unfinished` after a stop request, else `failed`, for example after a process was killed;
    None: torchrun's, which is 1.
    """
    from prime_node.cli.launch import SHUTDOWN_S, launch, torchrun_command
    from prime_node.cli.lifetime import run_role

    if nproc % replicas:
        raise LocalError(f"--nproc {nproc}: trainer.ranks.replicas = {replicas} must divide it")
    torchrun = torchrun_command(nproc, restarts_max=restarts_max, command=command)
    return run_role(
        lambda stop: launch(torchrun, arguments, stop, unfinished=unfinished, failed=failed),
        stop_with_parent=stop_with_parent,
        grace_s=SHUTDOWN_S + 10.0,
    )


def _follow(ranks: Ranks) -> NoReturn:
    """Run any other rank until rank 0 dismisses it or dies. Only rank 0 handles stop requests."""
    from prime_node.cli import wire_training

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    wire_training.follow_first_rank(ranks)
    # Everything is written. A normal interpreter exit would abort while gloo's threads live ("terminate called").
    logging.shutdown()
    os._exit(0)
