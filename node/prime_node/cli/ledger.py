"""`prime-node ledger`: the work done in a run, in one order that the coordinator cannot change later. SPEC.md, section 21."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from prime_node.cli.options import AsJson, EvidenceFolder, ExpectedRun, command_group
from prime_node.cli.place import is_url, named_in
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.target import answering
from prime_node.folder_lock import FolderInUse, FolderLock
from prime_node.keyfile import load_key
from prime_node.ports.transport import LedgerSource
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import LocalError, RemoteError

if TYPE_CHECKING:
    from prime_node.broadcast.audit.ledger_audit import LedgerReport
    from prime_node.broadcast.audit.ledger_file import LedgerFile
    from prime_node.broadcast.audit.seed_audit import Render
    from prime_protocol.run_spec import PinnedRun

DOES_NOT_HOLD = 1

ledger = command_group(
    "Export and verify a run's ledger: every accepted and rejected rollout, by whom, worth what, and why."
)


@dataclass(frozen=True, slots=True)
class _Opened:
    source: LedgerSource
    run: PinnedRun
    pinned: bool
    """Whether the user named the run, by the fragment of a link or by --run."""
    is_live: bool = False
    """Whether a running coordinator answers."""


@ledger.command("export")
def ledger_export(
    target: Annotated[str, typer.Argument(help="Join link, URL or run directory.")],
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("ledger.jsonl"),
    run: ExpectedRun = None,
) -> None:
    """Write the ledger to a file that verifies offline.

    One JSON text per line: the RunSpec and key rings as signed envelopes, the entries, and the signed head.
    """
    from prime_node.broadcast.audit.ledger_file import export_ledger

    async def write() -> int:
        async with open_ledger(target, run) as opened:
            return await export_ledger(opened.source, opened.run, out)

    say(f"{asyncio.run(write()):,} entries in {out}")


@ledger.command("verify")
def ledger_verify(
    target: Annotated[str, typer.Argument(help="Exported file, join link, URL or run directory.")],
    receipts: Annotated[
        Path | None,
        typer.Option(
            "--receipts",
            help="A worker's folder, or its receipts.jsonl: is each of its settled receipts in the ledger?",
        ),
    ] = None,
    known: Annotated[list[Path], typer.Option("--known", help="A ledger that was exported earlier; repeatable.")] = [],  # noqa: B006 - typer reads it, nothing changes it
    evidence: EvidenceFolder = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="The run's model files, such as `model` in a worker's folder: render the prompts again, with the environments "
            "of this machine.",
        ),
    ] = None,
    run: ExpectedRun = None,
    as_json: AsJson = False,
) -> None:
    """Verify a ledger: its chain, signatures and your receipts.

    It also shows the work of each worker, and checks its problems and seeds against the seed chain. Workers are shown by the
    end of their keys, as in `status`; --json has the complete keys.

    \b
    Exit codes: 0 all holds; 1 something does not; 3 this machine is at fault; 4 the other side refuses.

    \b
    --json prints one object: ok, run, pinned, num_entries, digest, at_ms, num_receipts, num_newer_receipts (of them,
    absent and dated after the head), seeds: {num_checked, num_waiting, num_evaluations, num_passed_over, num_rendered}, faults,
    notes, and workers: {key id: {rollouts, tokens, refused: {reason: rollouts}}}.
    """
    from prime_node.broadcast.audit.ledger_audit import audit_ledger
    from prime_node.cli import wire
    from prime_node.cli.verify_output import keep_evidence

    mine = [] if receipts is None else _receipts(receipts)

    async def read() -> tuple[LedgerReport, _Opened]:
        async with open_ledger(target, run) as opened:
            with contextlib.ExitStack() as files:
                kept = [files.enter_context(_kept(file, opened.run)) for file in known]
                now_ms = wire.clock().now_ms if opened.is_live else None
                render = None if prompts is None else files.enter_context(_rendering(opened, prompts))
                report = await audit_ledger(
                    opened.source, opened.run, kept=kept, receipts=mine, now_ms=now_ms, render=render
                )
                return report, opened

    report, opened = asyncio.run(read())
    if evidence is not None:
        keep_evidence(report.evidence, evidence)
    if as_json:
        print(json.dumps(_fields(report, opened)))
    else:
        _print(report, opened)
    raise typer.Exit(DOES_NOT_HOLD if report.faults else 0)


@contextlib.asynccontextmanager
async def open_ledger(target: str, run: str | None) -> AsyncIterator[_Opened]:
    """Open a ledger from an exported file, a join link, a URL or a run directory. Raises LocalError and RemoteError."""
    from prime_node.broadcast.audit.ledger_file import UnpinnedLedger, open_ledger_file
    from prime_node.cli import wire, wire_coordinator
    from prime_node.cli.key_request import known_of
    from prime_node.cli.wire_store import store_setting

    with answering(target):
        if is_url(target):
            known = (await known_of(target)).run
            if run not in (None, known.digest):
                raise LocalError(f"{target} is run {known.digest[:12]}, not {run}")
            async with wire.public_source(target) as source:
                pinned = (run or named_in(target)) is not None
                yield _Opened(source if pinned else UnpinnedLedger(source), known, pinned=pinned, is_live=True)
        elif RunDir(Path(target)).exists:
            run_dir = RunDir(Path(target))
            own, key = run_dir.load_run(), load_key(run_dir.key("coordinator"))
            if run not in (None, own.digest):
                raise LocalError(f"{target} holds run {own.digest[:12]}, not {run}")
            try:
                lock = FolderLock(run_dir.coordinator)
            except FolderInUse:  # it runs: a second signed head would be evidence against its key
                async with wire.public_source(str(run_dir.join_link())) as source:
                    yield _Opened(source, own, pinned=run is not None, is_live=True)
                return
            async with contextlib.AsyncExitStack() as stack:
                with lock:  # a coordinator may start while the lines are read
                    store = store_setting(run_dir.path)
                    opened = wire_coordinator.stored_ledger(own, run_dir.coordinator, key, store=store)
                    stored = await stack.enter_async_context(opened)
                yield _Opened(stored, own, pinned=run is not None)
        else:
            with open_ledger_file(Path(target), pinned=run) as file:
                yield _Opened(UnpinnedLedger(file) if run is None else file, file.run, pinned=run is not None)


def _receipts(path: Path) -> list[Envelope]:
    """Read receipts, skipping lines that a crash truncated. Raises LocalError."""
    file = path / "receipts.jsonl" if path.is_dir() else path
    found = []
    try:
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(RemoteError):
                found.append(open_envelope(line))
    except OSError as error:
        raise LocalError(f"{file}: {error.strerror}; give the worker's folder, where receipts.jsonl is") from None
    return found


@contextlib.contextmanager
def _kept(path: Path, run: PinnedRun) -> Iterator[LedgerFile]:
    """Open a kept ledger of the run, and add its newer key rings to the run's. Raises LocalError and RemoteError."""
    from prime_node.broadcast.audit.ledger_file import LedgerFile

    with contextlib.ExitStack() as files:
        try:
            kept = LedgerFile(files.enter_context(path.open("rb")), pinned=run.digest)
        except OSError as error:
            raise LocalError(f"{path}: {error.strerror}; give a ledger that was exported earlier") from None
        except RemoteError as error:
            raise LocalError(f"{path} is no ledger of run {run.digest[:12]}: {error.detail}") from None
        for _, ring in kept.run.keys.rings[run.keys.version :]:
            run.keys.add(ring)
        yield kept


def _rendering(opened: _Opened, model: Path) -> AbstractContextManager[Render]:
    """Start the run's deterministic environments. Raises LocalError."""
    from prime_node.cli.rendering import rendering

    if opened.pinned and not opened.run.spec.commits_to_prompts:
        raise LocalError("the receipts of this run state no prompts, so --prompts has nothing to compare")
    return rendering(opened.run, model, is_pinned=opened.pinned)


def _fields(report: LedgerReport, opened: _Opened) -> dict[str, object]:
    return {
        "ok": not report.faults,
        "run": opened.run.digest,
        "pinned": opened.pinned,
        "num_entries": report.num_entries,
        "digest": report.head.digest,
        "at_ms": report.head.at_ms,
        "num_receipts": report.num_receipts,
        "num_newer_receipts": report.num_newer_receipts,
        "seeds": asdict(report.seeds),
        "faults": report.faults,
        "notes": report.notes,
        "workers": {
            worker: {"rollouts": account.rollouts, "tokens": account.tokens, "refused": dict(account.refused)}
            for worker, account in report.accounts.items()
        },
    }


def _print(report: LedgerReport, opened: _Opened) -> None:
    from prime_node.broadcast.audit.audit_report import date_of

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "rollouts", "tokens", "rejected"):
        table.add_column(column, justify="left" if column in ("worker", "rejected") else "right")
    for worker, account in sorted(report.accounts.items(), key=lambda item: -item[1].tokens):
        rejected = ", ".join(f"{count:,} {reason}" for reason, count in account.refused.items())
        table.add_row(worker[-8:], f"{account.rollouts:,}", f"{account.tokens:,}", rejected)
    console.print(table)
    pinned = "" if opened.pinned else " (not pinned: give --run)"
    say(f"run {opened.run.digest[:12]}{pinned}, {report.num_entries:,} entries", console=console)
    for note in report.notes:
        say(f"note {note}", console=console)
    for fault in report.faults:
        say(f"FAIL {fault}", console=console)
    if report.faults:
        say("does NOT hold" + ("; --evidence DIR keeps the proof" if report.evidence else ""), console=console)
        return
    if due := report.num_receipts - report.num_newer_receipts:
        say(f"ok   all {due:,} settled receipts are in it", console=console)
    if report.num_newer_receipts:
        say(
            f"note {report.num_newer_receipts:,} settled receipts are not in it and are dated after its head of "
            f"{date_of(report.head.at_ms)}: verify again with a later head",
            console=console,
        )
    if opened.run.spec.seed_chain is not None:
        seeds = report.seeds
        say(
            f"ok   {seeds.num_checked:,} accepted bundles were assigned what the seed chain gives; {seeds.num_waiting:,} are of "
            f"steps that are not over, {seeds.num_evaluations:,} of evaluations; {seeds.num_passed_over:,} problems passed over",
            console=console,
        )
    if opened.run.spec.commits_to_prompts:
        rendered = f"{report.seeds.num_rendered:,} of them have the prompts that this machine renders"
        say(
            f"ok   {rendered}" if report.seeds.num_rendered else "note no prompts were rendered: give --prompts FOLDER",
            console=console,
        )
    say(f"ok   the chain ends as the coordinator signed on {date_of(report.head.at_ms)}", console=console)
