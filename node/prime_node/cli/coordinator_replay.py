"""`prime-node coordinator replay`: the archived journal, folded again through the coordinator's own state machine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_node.cli.options import AsJson
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.folder_lock import FolderInUse, FolderLock
from prime_node.keyfile import load_key
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.coordinator.journal_replay import JournalReport

ROW_DIFFERS = 1
OTHER_RULES = 14
NOTES_SHOWN = 3


def coordinator_replay(
    run: Annotated[Path, typer.Argument(help="Run directory of a coordinator.")],
    as_json: AsJson = False,
) -> None:
    """Fold the archived journal again: does all follow?

    State, ledger and batches must follow from the events. The first row that does not is named.

    The coordinator must be stopped if its store is in the run's folder. With PostgreSQL, stop it too: what it writes meanwhile
    would look like a fault. docs/operating.md says what is kept, and at what cost.

    \b
    Exit codes: 0 all follows; 1 a row does not; 3 cannot say: nothing is archived, another release wrote it, or this machine
    is at fault; 14 all that can be checked follows, but batches were chosen by the rules of another release.

    \b
    --json prints one object: ok, outcome (follows, does not follow, other rules), row and detail of the first row that does not
    follow, run, first and last event, num_segments, num_lines, num_batches, num_published, other_rules: {version: choices},
    state, ledger: {num_lines, digest}, notes.
    """
    from prime_node.cli.wire_store import EMBEDDED, store_setting
    from prime_node.coordinator.journal_replay import JournalReport, RowFault

    run_dir = RunDir(run)
    pinned, store = run_dir.load_run(), store_setting(run)
    lock: FolderLock | None = None
    if store == EMBEDDED:
        try:
            lock = FolderLock(run_dir.coordinator)
        except FolderInUse:
            raise LocalError(
                f"the coordinator of {run} runs: stop it, or fold the journal of a copy of the folder"
            ) from None
    report, fault = JournalReport(), None
    try:
        asyncio.run(_fold(run_dir, store, report))
    except RowFault as error:
        fault = error
    finally:
        if lock is not None:
            lock.release()
    code = ROW_DIFFERS if fault is not None else OTHER_RULES if report.other_rules else 0
    if as_json:
        outcome = {0: "follows", ROW_DIFFERS: "does not follow", OTHER_RULES: "other rules"}[code]
        found = {
            "outcome": outcome,
            "row": "" if fault is None else fault.row,
            "detail": "" if fault is None else fault.detail,
        }
        print(json.dumps({"ok": code == 0, **found, "run": pinned.digest, **asdict(report)}))
    else:
        _print(report, fault)
    raise typer.Exit(code)


async def _fold(run_dir: RunDir, store: str, report: JournalReport) -> None:
    from prime_node.cli.wire_coordinator import stored_journal

    run = run_dir.load_run()
    opened = stored_journal(run, run_dir.coordinator, load_key(run_dir.key("coordinator")), store=store, report=report)
    async with opened as replay:
        await replay.fold()


def _print(report: JournalReport, fault: Exception | None) -> None:
    from prime_node.coordinator.state.batches import CHOICE_RULES

    for note in report.notes[:NOTES_SHOWN]:
        say(f"note {note}")
    if len(report.notes) > NOTES_SHOWN:
        say(f"note and {len(report.notes) - NOTES_SHOWN} more; --json has all")
    if report.first > 1:
        say(f"note the archive begins at event {report.first}: what was before is older or more than is kept")
    if fault is not None:
        say(f"FAIL {fault}", f"     events {report.first} to {report.last} were folded before it")
        return
    say(
        f"ok   events {report.first} to {report.last} in {report.num_segments} segments fold to state {report.state[:16]}",
        f"ok   {report.num_lines} lines of the ledger follow; it has {report.ledger.num_lines}, to {report.ledger.digest[:16]}",
        f"ok   {report.num_batches} batches; {report.num_published} of them were compared with what was published",
        *(
            f"?    {count} choices of batches were made by other rules (version {version}); cannot be checked by this release, "
            f"which has version {CHOICE_RULES}"
            for version, count in sorted(report.other_rules.items())
        ),
    )
