"""`prime-node status`: a run as its coordinator reports it, or this machine's workers as they report themselves.

Nothing here is proven: /v1/status is not signed, and a worker chooses its own name. `verify` and `ledger verify` prove.
Characters of untrusted text that could control a terminal are shown as `?`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from prime_node.cli.place import HOME, worker_folders
from prime_node.cli.run_status import run_status
from prime_protocol.errors import LocalError
from prime_protocol.visible import printable

REFRESH_S = 2.0


def status(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Run directory, join link, URL, or a worker's folder [the runs that this machine works for]."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON of the coordinator or the worker.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until Ctrl-C.")] = False,
) -> None:
    """Show the state of a run, its workers and what it waits for. Without a target: this machine's own workers.

    The coordinator, or the worker, reports this itself; `prime-node verify` and `ledger verify` prove things.

    \b
    Exit codes: 0 shown; 3 no answer, or there is nothing to show.
    """
    if as_json:
        print(json.dumps(_raw(target), indent=1))
        return
    console = Console(highlight=False)
    if not watch:
        console.print(_view(target))
        return
    if not sys.stdout.isatty():
        raise LocalError("--watch needs a terminal; leave it out, or use --json")
    try:
        with Live(_view(target), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(REFRESH_S)
                try:
                    live.update(_view(target), refresh=True)
                except LocalError as error:  # a restarting coordinator comes back
                    live.update(Text(printable(str(error))), refresh=True)
    except KeyboardInterrupt:
        pass


def _raw(target: str | None) -> Any:
    if target is not None and not _is_worker(Path(target)):
        return run_status(target)[1]
    from prime_node.worker.status import read_status

    return {str(folder): asdict(read_status(folder / "status.json")) for folder in _folders(target)}


def _view(target: str | None) -> RenderableType:
    from prime_node.cli import status_view

    if target is not None and not _is_worker(Path(target)):
        return status_view.of_run(run_status(target)[0])
    from prime_node.worker.status import read_status

    now_ms = time.time_ns() // 1_000_000
    return status_view.of_workers(
        [(folder, read_status(folder / "status.json")) for folder in _folders(target)], now_ms
    )


def _is_worker(folder: Path) -> bool:
    return (folder / "status.json").is_file()


def _folders(target: str | None) -> list[Path]:
    """Return the folders of workers. Raises LocalError if there are none."""
    if target is not None:
        return [Path(target)]
    found = worker_folders()
    if not found:
        raise LocalError(
            f"no worker has run here: nothing in {HOME / 'runs'}. Give a run directory, a join link or a worker's folder"
        )
    return found
