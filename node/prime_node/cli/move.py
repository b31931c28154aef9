"""`prime-node coordinator move`: a stopped run's state, receipts and ledger, from SQLite to PostgreSQL or back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.wire_store import move_store, store_setting
from prime_node.files import write_durably
from prime_node.folder_lock import FolderLock
from prime_node.ports.store import Store
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import PinnedRun


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What two stores of one state have in common. Example: StoreSummary(812, "41c0...", 96, "77ab...")."""

    event: int
    """Number of the last event."""
    state: str
    """Digest of the snapshot of the state after it."""
    num_lines: int
    ledger: str
    """Digest of the ledger's last line, which names the line before."""


def move(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    to: Annotated[str, typer.Argument(help='"sqlite", or a URL like postgresql://user@host/database.')],
    source: Annotated[str, typer.Option("--from", help="Present store, if the run's folder does not name it.")] = "",
) -> None:
    """Move a stopped run to another store. Both keep the same state, receipts, cursors and ledger; the old store is closed."""
    run_dir = RunDir(run)
    pinned = run_dir.load_run()
    present = _setting(source) if source else store_setting(run)
    target = _setting(to)
    if present == target:
        raise LocalError(f"the run is in {present} already")
    with FolderLock(run_dir.coordinator):
        found = asyncio.run(move_store(present, target, pinned, run_dir.coordinator, run_dir.public, _summary))
        _write_setting(run_dir, target)
    say(
        f"moved event {found.event}, state {found.state[:16]}, and {found.num_lines} lines of the ledger up to "
        f"{found.ledger[:16] or 'none'}",
        f"coordinator.store = {target} is in {run_dir.overrides_file}; a configuration that you give by --config needs it too",
    )


async def _summary(store: Store, run: PinnedRun) -> StoreSummary:
    """Return the summary of a store after its last event."""
    from prime_node.coordinator.ledger import load_chain
    from prime_node.coordinator.state.rules import rules_of
    from prime_node.coordinator.state.snapshot import state_to_json
    from prime_node.coordinator.state_follower import restore_state

    await store.check()
    number, state = await restore_state(store, rules_of(run))
    chain = await load_chain(store, run.digest)
    return StoreSummary(number, digest_of(state_to_json(state).encode()), chain.num_entries, chain.digest)


def _setting(store: str) -> str:
    """Return a value of `coordinator.store`. Raises LocalError if it cannot be one."""
    from prime_node.coordinator.config import CoordinatorConfig

    return CoordinatorConfig.load({}, {"store": store}).store


def _write_setting(run_dir: RunDir, store: str) -> None:
    kept = [line for line in run_dir.overrides() if not line.startswith("coordinator.store=")]
    lines = "".join(f"{line}\n" for line in (*kept, f"coordinator.store={store}"))
    write_durably(run_dir.overrides_file, lines.encode())
