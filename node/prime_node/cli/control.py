"""`prime-node pause`, `resume`, `finish` and `limit`: a contributor's control of the workers on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_node.cli.place import worker_folders
from prime_node.cli.say import say
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.worker.control import Control, Wanted

ANSWER_S = 10.0
"""Time for a running worker to follow a command before the command ends without an answer."""
POLL_S = 0.1

Folder = Annotated[Path | None, typer.Argument(help="The worker's folder [all workers that run here].")]


def pause_worker(folder: Folder = None) -> None:
    """Stop computing at once, until `resume`. Leases are handed back; the engine stays loaded. Restarts keep the pause.

    Uploads and downloads continue. To free memory too, use `finish` or Ctrl-C.
    """
    from prime_node.worker.control import Wanted

    _order(folder, Wanted.PAUSE, "its next start begins paused")


def resume_worker(folder: Folder = None) -> None:
    """Compute again after `pause`. The worker's limits still hold."""
    from prime_node.worker.control import Wanted

    _order(folder, Wanted.RUN, "its next start computes")


def finish_worker(folder: Folder = None) -> None:
    """Finish the leases in generation, upload them, and leave the run. There is no time limit; Ctrl-C ends it sooner."""
    from prime_node.worker.control import Wanted

    _order(folder, Wanted.FINISH, "it has ended meanwhile")


def limit_worker(
    folder: Annotated[Path, typer.Argument(help="The worker's folder.")],
    assignments: Annotated[
        list[str], typer.Argument(metavar="[NAME=VALUE]...", help='hours=22:00-07:00 ("hours=": all), on_battery=false')
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
) -> None:
    """Show or change when a worker computes. It is paused outside of its limits.

    They take effect at once, are kept over restarts, and replace the settings worker.limits.
    """
    from pydantic import ValidationError

    from prime_node.worker.control import WorkLimits, read_control

    _check(folder)
    control = read_control(folder)
    if not assignments:
        text = "those of its settings, worker.limits" if control.limits is None else _shown(control)
        say(f"{folder}: {text}")
        return
    changes = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name not in WorkLimits.model_fields:
            raise LocalError(f"{assignment!r} is no limit; write hours=22:00-07:00 or on_battery=false")
        changes[name] = value
    try:
        limits = WorkLimits.model_validate((control.limits or WorkLimits()).model_dump() | changes)
    except ValidationError as error:
        raise LocalError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
    changed = control.model_copy(update={"limits": limits})
    _tell(folder, changed, f"its next start keeps to {_shown(changed)}")


def _order(folder: Path | None, wanted: Wanted, stopped: str) -> None:
    from prime_node.worker.control import Control, Wanted, read_control

    folders = [folder] if folder is not None else [one for one in worker_folders() if _runs(one)]
    if not folders:
        raise LocalError("no worker runs here; name a worker's folder, or see `prime-node status`")
    for each in folders:
        _check(each)
        if wanted is Wanted.FINISH and not _runs(each):
            raise LocalError(f"no worker runs in {each}: there is nothing to finish")
        try:
            control = read_control(each)
        except LocalError as error:  # damaged: this command writes it again
            say(f"{error}; limits set there are lost")
            control = Control()
        _tell(each, control.model_copy(update={"wanted": wanted}), stopped)


def _tell(folder: Path, control: Control, stopped: str) -> None:
    """Write the file and show what the worker now does, or `stopped` if no worker runs."""
    from prime_node.worker.control import write_control

    ordered = control.model_copy(update={"at_ms": max(time.time_ns() // 1_000_000, control.at_ms + 1)})
    write_control(folder, ordered)
    if not _runs(folder):
        say(f"{folder}: no worker runs; {stopped}")
        return
    say(f"{folder}: {_answer(folder, ordered) or 'no answer yet; it follows once it is awake'}")


def _answer(folder: Path, ordered: Control) -> str:
    """Return the status line of the worker once it follows; empty if it does not answer in time."""
    from prime_node.worker.control import Wanted
    from prime_node.worker.status import read_status

    end_s = time.monotonic() + ANSWER_S
    while time.monotonic() < end_s:
        status = read_status(folder / "status.json")
        if status.control_at_ms == ordered.at_ms:
            if status.ended or ordered.wanted is not Wanted.FINISH:
                return f"ended: {status.ended}" if status.ended else status.line()
            return "it finishes its leases, uploads and leaves; `prime-node status` shows its progress"
        time.sleep(POLL_S)
    return ""


def _shown(control: Control) -> str:
    assert control.limits is not None
    return ", ".join(f"{name}={value}" for name, value in control.limits.model_dump(mode="json").items())


def _runs(folder: Path) -> bool:
    from prime_node.folder_lock import FolderInUse, FolderLock

    try:
        FolderLock(folder).release()
    except FolderInUse:
        return True
    return False


def _check(folder: Path) -> None:
    if not (folder / "status.json").is_file():
        raise LocalError(
            f"no worker has run in {folder}; `prime-node status` shows the folders of this machine's workers"
        )
