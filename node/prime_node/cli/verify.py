"""`prime-node verify`: is a published checkpoint what it claims to be? Offline on a folder, online on a URL, without torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from prime_node.cli.run_dir import RunDir
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.broadcast.audit import AuditReport, Check
    from prime_node.ports.transport import CheckpointSource

DOES_NOT_HOLD = 1
"""Exit code where a check fails; 0 where all hold."""


def verify(
    target: Annotated[str, typer.Argument(help="Join link, URL, run directory or published folder.")],
    chain: Annotated[
        bool, typer.Option("--chain", help="Every policy from the first to the newest, not only the newest.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Digest of the run that you mean; the join link holds it.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check signatures, chain and every byte of a published checkpoint. Exits with 1 and the reason where one does not hold."""
    console = Console(highlight=False, soft_wrap=True)
    pinned = run or _pinned_by(target)
    report = asyncio.run(_verify(target, pinned, console=None if as_json else console, chain=chain))
    if as_json:
        print(json.dumps({"ok": report.passed, **asdict(report)}))
    elif report.passed:
        console.print(
            f"verified: policy {report.policy_version}, {report.num_policies} policies, {report.num_bytes:,} bytes"
        )
    else:
        console.print("does NOT hold; nothing after the failed check was looked at")
    raise typer.Exit(0 if report.passed else DOES_NOT_HOLD)


async def _verify(target: str, run: str | None, *, console: Console | None, chain: bool) -> AuditReport:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from prime_node.broadcast.audit import audit

    def show(check: Check) -> None:
        if console is not None:
            mark = "ok  " if check.passed else "FAIL"
            console.print(f"{mark} ({check.number}) {check.title}: {check.detail}", markup=False)

    columns = (TextColumn("hashing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=console is None or not console.is_terminal
    ) as progress:
        task = progress.add_task("hashing", total=None)
        async with _source(target) as source:
            return await audit(
                source, run, chain=chain, on_check=show, on_bytes=lambda count: progress.update(task, advance=count)
            )


def _pinned_by(target: str) -> str | None:
    """The run's digest, where the target itself tells it: a join link, or a run directory that holds one."""
    if target.startswith(("http://", "https://")):
        return urlsplit(target).fragment or None
    run_dir = RunDir(Path(target))
    return run_dir.join_link().run if run_dir.join_link_file.exists() else None


@contextlib.asynccontextmanager
async def _source(target: str) -> AsyncIterator[CheckpointSource]:
    """Where the target's bytes come from. Raises LocalError where it is neither a URL nor a folder."""
    from prime_node.cli import wire

    if target.startswith(("http://", "https://")):
        async with wire.public_source(target) as source:
            yield source
        return
    folder = Path(target)
    public = RunDir(folder).public
    if public.is_dir():
        folder = public
    if not (folder / "run.json").is_file():
        raise LocalError(
            f"{target} holds no published checkpoint: no run.json in it. Give a run directory, its public folder or a URL"
        )
    yield wire.folder_source(folder)
