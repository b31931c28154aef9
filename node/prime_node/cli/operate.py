"""`prime-node operate`: the operator's orders to a run, as commands and as a page on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from prime_node.broadcast.follow.pinned import fetch_amendments, fetch_key_rings
from prime_node.cli.operator import Operator, hand_over
from prime_node.cli.options import command_group
from prime_node.cli.run_calibration import require_covers
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.shipped import read_calibration
from prime_node.cli.target import open_source
from prime_node.keyfile import load_key
from prime_node.ports.documents import amendment_name
from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.key_ring import Role
from prime_protocol.requests import AdminRequest, JoiningAsked
from prime_protocol.run_spec import CONFIG_FILE, PinnedRun, open_run_spec

operate = command_group(
    "Ban, unban and invite workers, pause, limit or drain a run, and add to its calibration, with the run directory's keys."
)

Run = Annotated[Path, typer.Argument(help="Run directory.")]
WorkerId = Annotated[
    str, typer.Argument(help="The worker's key id, or its last characters, as `prime-node status` shows them.")
]


@operate.command("open")
def open_page(
    run: Run,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port on this machine; 0: any free one.")] = 0,
    socket: Annotated[
        bool,
        typer.Option("--socket", help="Listen on RUN/operate.sock instead, for this user alone: ssh -L PORT:SOCKET."),
    ] = False,
) -> None:
    """Serve a page with these orders to a browser.

    It is for a browser on this machine, until Ctrl-C.
    The printed address is good for one browser, which then operates the run. The keys stay in this process.
    """
    from prime_node.cli.lifetime import run_role
    from prime_node.cli.operate_page.serving import serve_page
    from prime_node.observe import setup_logging

    setup_logging("operate", level="WARNING")
    operator = Operator.of(run)
    path = operator.run_dir.operate_socket.resolve() if socket else None
    raise typer.Exit(
        run_role(
            lambda stop: serve_page(operator, stop, port=port, socket=path, shown=say),
            stop_with_parent=False,
            grace_s=2.0,
        )
    )


@operate.command()
def ban(
    run: Run,
    worker: WorkerId,
    reason: Annotated[str, typer.Option("--reason", help="Reason; the worker sees it.")] = "by the operator",
) -> None:
    """Ban a key. Its leases end, and its bundles without a verdict are rejected."""
    say(f"banned {_order(run, 'ban', worker=worker, reason=reason)}")


@operate.command()
def unban(run: Run, worker: WorkerId) -> None:
    """Forgive a banned key. It may join again as a newcomer, without its strikes and the evidence against it."""
    say(f"forgave {_order(run, 'unban', worker=worker)}")


@operate.command("pause")
def pause_run(
    run: Run,
    reason: Annotated[str, typer.Option("--reason", help="Reason; workers and visitors see it.")] = "",
) -> None:
    """Give out no new work until `resume`. Workers stay and wait; work that is out is accepted and trained."""
    _order(run, "pause", reason=reason)
    say(f"paused, also over restarts: continue with `prime-node operate resume {run}`")


@operate.command("resume")
def resume_run(run: Run) -> None:
    """Give out work again after `pause`."""
    _order(run, "resume")
    say("resumed: work is given out")


@operate.command()
def drain(run: Run) -> None:
    """Give out no new work and accept outstanding work. Workers finish and leave. This cannot be undone: see `pause`."""
    _order(run, "drain")
    say("draining: no new work is given out")


@operate.command("limit")
def limit_joining(
    run: Run,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Workers at one time.")] = None,
    per_network: Annotated[
        int | None, typer.Option("--per-network", min=1, help="Workers of one network at one time.")
    ] = None,
    invites: Annotated[
        bool | None, typer.Option("--invites/--no-invites", help="Whether new keys need an invitation.")
    ] = None,
) -> None:
    """Limit who joins from now on, also after restarts. Workers that take part stay.

    Each call replaces all limits; without an option, the coordinator's settings hold again.
    """
    joining = JoiningAsked(workers_max=workers, workers_per_network_max=per_network, invites_needed=invites)
    _order(run, "limit", joining=joining)
    asked = ", ".join(f"{name} = {value}" for name, value in joining.model_dump(exclude_none=True).items())
    say(f"limits: {asked}" if asked else "the limits are those of the coordinator's settings")


@operate.command("snapshot")
def save_snapshot(run: Run) -> None:
    """Save the state of the coordinator now, for a quick restart."""
    _order(run, "snapshot")
    say("saved")


@operate.command()
def invite(
    run: Run,
    keys: Annotated[int, typer.Option("--keys", min=1, help="Maximum number of keys that may join with it.")] = 1,
    days: Annotated[float, typer.Option("--days", min=0.001, help="Validity for joining, in days.")] = 7.0,
) -> None:
    """Print a join link with an invitation.

    It is for runs that need one. This needs no network. Anyone who has the link can use the invitation up.
    """
    say(str(Operator.of(run).invite(keys=keys, days=days)))


@operate.command()
def amend(
    run: Run,
    calibration: Annotated[Path, typer.Argument(help="Calibration file from `prime-node calibrate --run`.")],
    key: Annotated[list[Path], typer.Option("--key", help="File of a further root key; repeatable.")] = [],  # noqa: B006 - typer reads it, nothing changes it
    note: Annotated[str, typer.Option("--note", help="Note; it is signed and public.")] = "",
) -> None:
    """Add engine classes to a running run's calibration.

    Only pairs of classes that it lacks are added, known pairs never change. The root signs them.
    They hold for bundles that are judged from now on.

    Measure on machines that you trust. Without a running coordinator, the amendment is stored in its folder.
    """
    for line in amend_run(RunDir(run), calibration, keys=key, note=note):
        say(line)


def _order(run: Path, action: str, *, worker: str | None = None, **fields: object) -> str | None:
    """Send an order to the coordinator and return the key id that it was applied to. Raises LocalError, RemoteError."""
    operator = Operator.of(run)

    async def order() -> str | None:
        whole = None if worker is None else await operator.whole_key(worker)
        try:
            request = AdminRequest.model_validate({"action": action, "worker": whole, **fields})
        except ValidationError as error:
            raise typer.BadParameter(error.errors(include_url=False)[0]["msg"]) from None
        await operator.order(request)
        return whole

    return asyncio.run(order())


def amend_run(run_dir: RunDir, file: Path, *, keys: Sequence[Path] = (), note: str = "") -> Iterator[str]:
    """Add the pairs of a calibration file that a run lacks. Yield what was done. Raises LocalError or RemoteError."""
    from prime_node.coordinator.api.amendments import check_new, pairs_of

    found = read_calibration(file)
    run = asyncio.run(_known_run(run_dir))
    advice = f"`prime-node calibrate {file} --run {run_dir.path}` measures for this run"
    config_json = (run_dir.model / CONFIG_FILE).read_bytes()
    require_covers(str(file), found, config_json, run.spec.sampling.temperature, advice=advice)
    amendment = CalibrationAmendment(
        run=run.digest,
        version=run.calibrations.version + 1,
        previous=run.calibrations.digest,
        pairs=_new_pairs(found, file, run),
        created_at_ms=time.time_ns() // 1_000_000,
        note=note or found.note,
    )
    files = [*([run_dir.key(Role.ROOT)] if run_dir.key(Role.ROOT).exists() else []), *keys]
    signers = {key.key_id: key for key in map(load_key, files)}
    present = run.keys.current
    if (signed := len(signers.keys() & set(present.root))) < present.threshold(Role.ROOT):
        raise LocalError(
            f"{signed} of {present.threshold(Role.ROOT)} root keys are here; add `--key FILE` for each of the others"
        )
    envelope = seal(amendment, PayloadType.CALIBRATION, *signers.values())
    check_new(envelope, run)
    name = amendment_name(amendment.version)
    is_running = asyncio.run(hand_over(run_dir, name, envelope, lambda client: client.add_amendment(envelope)))
    when = "is in force" if is_running else "is stored, and in force as soon as the coordinator starts"
    yield f"calibration {amendment.version} {when}: {pairs_of(amendment)}"


async def _known_run(run_dir: RunDir) -> PinnedRun:
    """Return the run with its key rings and amendments, from the folder that the coordinator publishes."""
    target = str(run_dir.path)
    async with open_source(target) as source:
        run = open_run_spec(await source.run_spec(), pinned=run_dir.load_run().digest)
        await fetch_key_rings(source, run.keys)
        await fetch_amendments(source, run)
    return run


def _new_pairs(found: Calibration, file: Path, run: PinnedRun) -> tuple[PairMoments, ...]:
    """Return the pairs that the run lacks, with the run's statistics. Raises LocalError if there are none."""
    known = run.checks.calibration
    if known is None:
        raise LocalError("this run has no calibration, so none can be added: its evidence has no statistics for it")
    classes = {(pair.worker, pair.validator) for pair in known.pairs}
    pairs = [
        pair.model_copy(
            update={"moments": {name: one for name, one in pair.moments.items() if name in known.statistics}}
        )
        for pair in found.pairs
        if (pair.worker, pair.validator) not in classes
    ]
    if not (usable := tuple(pair for pair in pairs if pair.moments)):
        raise LocalError(f"{file} has no pair of engine classes that the run lacks; known pairs are never changed")
    return usable
