"""`prime-node operate`: ban, unban, drain, invite and amend, for the operator of a run."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError

from prime_node.cli.run_dir import RunDir
from prime_node.cli.run_status import keys_that_end
from prime_node.cli.say import say
from prime_node.keyfile import load_key
from prime_node.ports.transport import Unreachable
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.invite import Invite, invite_text
from prime_protocol.requests import AdminRequest

operate = typer.Typer(
    help="Ban, unban and invite workers, drain a run, and add to its calibration, with the run directory's keys.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
DAY_MS = 86_400_000
ENDING_MIN = 6
"""Minimum number of final characters that may stand for a key id."""
KEY_ID_MIN = 50
"""Minimum length of a complete key id."""

Run = Annotated[Path, typer.Argument(help="Run directory.")]
WorkerId = Annotated[
    str, typer.Argument(help="The worker's key id, or its last characters, as `prime-node status` shows them.")
]


@operate.command()
def ban(
    run: Run,
    worker: WorkerId,
    reason: Annotated[str, typer.Option("--reason", help="Reason; the worker sees it.")] = "by the operator",
) -> None:
    """Ban a key. Its leases end, and its bundles without a verdict are rejected."""
    say(f"banned {_ask(run, 'ban', worker, reason)}")


@operate.command()
def unban(run: Run, worker: WorkerId) -> None:
    """Forgive a banned key. It may join again as a newcomer, without its strikes and the evidence against it."""
    say(f"forgave {_ask(run, 'unban', worker)}")


@operate.command()
def drain(run: Run) -> None:
    """Give out no new work and accept outstanding work. Workers finish and leave."""
    _ask(run, "drain")
    say("draining: no new work is given out")


@operate.command()
def invite(
    run: Run,
    keys: Annotated[int, typer.Option("--keys", min=1, help="Maximum number of keys that may join with it.")] = 1,
    days: Annotated[float, typer.Option("--days", min=0.001, help="Validity for joining, in days.")] = 7.0,
) -> None:
    """Print an invitation.

    For runs with coordinator.invites_needed; needs no network.

    A contributor sets it as worker.invite: prime-node join LINK --set worker.invite=...
    """
    run_dir = RunDir(run)
    invitation = Invite(
        run=run_dir.load_run().digest,
        invite=secrets.token_hex(16),
        keys_max=keys,
        expires_at_ms=time.time_ns() // 1_000_000 + round(days * DAY_MS),
    )
    say(invite_text(seal(invitation, PayloadType.INVITE, _key(run_dir))))


@operate.command()
def amend(
    run: Run,
    calibration: Annotated[Path, typer.Argument(help="Calibration file from `prime-node calibrate --run`.")],
    key: Annotated[
        list[Path], typer.Option("--key", help="File of a further root key; repeatable.", show_default=False)
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
    note: Annotated[str, typer.Option("--note", help="Note; it is signed and public.")] = "",
) -> None:
    """Add engine classes to a running run's calibration.

    Only pairs of classes that it lacks are added, known pairs never change. The root signs them.
    They hold for bundles that are judged from now on.

    Measure on machines that you trust. Without a running coordinator, the amendment is stored in its folder.
    """
    from prime_node.cli.amending import amend_run

    for line in amend_run(RunDir(run), calibration, keys=key, note=note):
        say(line)


def _whole(run: Path, worker: str) -> str:
    """Return the only key id with this ending. Raises LocalError if there is none or more than one."""
    if len(worker) >= KEY_ID_MIN:
        return worker
    found = keys_that_end(str(run), worker) if len(worker) >= ENDING_MIN else []
    if len(found) != 1:
        raise LocalError(
            f"{len(found) or 'no'} keys end in {worker!r}, and {ENDING_MIN} characters or more must name one: "
            f"`prime-node status {run}` shows their last 8, with --json all of them"
        )
    return found[0]


def _key(run_dir: RunDir) -> SigningKey:
    for role in ("coordinator", "root"):
        if run_dir.key(role).exists():
            return load_key(run_dir.key(role))
    raise LocalError(
        f"{run_dir.path} holds neither keys/coordinator.key nor keys/root.key: run this where one of them is"
    )


def _ask(
    run: Path, action: Literal["ban", "unban", "drain"], worker: str | None = None, reason: str = ""
) -> str | None:
    """Send a request to the coordinator and return the key id that it was applied to."""
    from prime_node.cli import wire

    run_dir = RunDir(run)
    run_dir.load_run()
    link, key = run_dir.join_link(), _key(run_dir)
    whole = None if worker is None else _whole(run, worker)
    try:
        request = AdminRequest(action=action, worker=whole, reason=reason)
    except ValidationError as error:
        raise typer.BadParameter(error.errors(include_url=False)[0]["msg"]) from None

    async def ask() -> None:
        async with wire.client(link, key) as client:
            await client.admin(request)

    try:
        asyncio.run(ask())
    except Unreachable as error:
        raise LocalError(f"the coordinator at {link.url} does not answer: {error}") from None
    return whole
