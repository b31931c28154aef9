"""`prime-node pause`, `resume`, `finish` and `limit`: a contributor's control of the workers on this machine."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_node.cli.place import worker_folders
from prime_node.cli.say import say
from prime_node.folder_lock import is_in_use
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


def open_worker(
    folder: Folder = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the address. It opens the page once, in a browser of this machine.")
    ] = False,
) -> None:
    """Open a worker's page in the browser: what it does and why it waits, history, limits, pause and finish.

    Where there is no browser, print the address. Over SSH, forward its port first: ssh -L PORT:127.0.0.1:PORT HOST
    """
    for each in _running(folder):
        address = _page_address(each)
        if print_only or not _opened_in_browser(address):
            say(address)
        else:
            say(f"{each}: opened in the browser; `prime-node open --print` prints an address instead")


def limit_worker(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[FOLDER] [NAME=VALUE]...",
            help="The worker's folder [all workers that run here]; hours=22:00-07:00, on_battery=false; NAME= removes one.",
        ),
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
) -> None:
    """Show or change when a worker computes and how much it uses. It is paused outside of its limits on when.

    \b
    hours=22:00-07:00      hours of the day, in local time
    on_battery=false       not on battery power
    when_busy=false        not while other programs use the processor
    when_gpu_busy=false    not while other programs use the GPU
    when_in_use=false      not while someone uses its keyboard and mouse
    upload_mbit_per_s=5    for serving peers; download_mbit_per_s for policies
    threads=2              at the next lease; with vLLM at the next start
    gpu_memory_share=0.5   at the next start

    They are kept over restarts, and replace all of the settings worker.limits.
    """
    is_named = bool(arguments) and "=" not in arguments[0]
    for folder in _running(Path(arguments[0]) if is_named else None):
        _limit(folder, arguments[is_named:])


def _limit(folder: Path, assignments: list[str]) -> None:
    from pydantic import ValidationError

    from prime_node.at_desk import SEATS
    from prime_node.worker.control import WorkLimits, read_control

    _check(folder)
    control = read_control(folder)
    if not assignments:
        text = "those of its settings, worker.limits" if control.limits is None else _shown(control)
        say(f"{folder}: {text}")
        return
    changes: dict[str, object] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name not in WorkLimits.model_fields:
            raise LocalError(f"{assignment!r} is no limit; limits are {', '.join(WorkLimits.model_fields)}")
        changes[name] = value or WorkLimits.model_fields[name].default
    try:
        limits = WorkLimits.model_validate((control.limits or WorkLimits()).model_dump() | changes)
    except ValidationError as error:
        fault = error.errors()[0]
        raise LocalError(f"{fault['loc'][0]}: {str(fault['msg']).removeprefix('Value error, ')}") from None
    if not limits.when_in_use and not SEATS.is_dir():
        say("this machine shows no seat of systemd-logind: no use of its keyboard and mouse is seen")
    changed = control.model_copy(update={"limits": limits})
    _tell(folder, changed, f"its next start keeps to {_shown(changed)}")


def _order(folder: Path | None, wanted: Wanted, stopped: str) -> None:
    from prime_node.worker.control import Control, Wanted, read_control

    for each in _running(folder):
        _check(each)
        if wanted is Wanted.FINISH and not is_in_use(each):
            raise LocalError(f"no worker runs in {each}: there is nothing to finish")
        try:
            control = read_control(each)
        except LocalError as error:  # damaged: this command writes it again
            say(f"{error}; limits set there are lost")
            control = Control()
        _tell(each, control.model_copy(update={"wanted": wanted}), stopped)


def _running(folder: Path | None) -> list[Path]:
    """Return the folder that is named, or those of all workers that run. Raises LocalError if there is none."""
    folders = [folder] if folder is not None else [one for one in worker_folders() if is_in_use(one)]
    if not folders:
        raise LocalError("no worker runs here; name a worker's folder, or see `prime-node status`")
    return folders


def _page_address(folder: Path) -> str:
    """Return an address that opens the page of the worker once. Raises LocalError."""
    from prime_node.cli.wire_node import PAGE_FILE, read_address

    _check(folder)
    if not is_in_use(folder):
        raise LocalError(f"no worker runs in {folder}: there is no page to open")
    try:
        return read_address(folder)
    except FileNotFoundError:
        raise LocalError(
            f"the worker in {folder} serves no page: it has just started, or worker.page.enabled is off, or its log says why"
        ) from None
    except (OSError, ValueError) as error:
        raise LocalError(f"page {folder / PAGE_FILE}: {error}") from None


def _opened_in_browser(address: str) -> bool:
    """Open an address in a browser with windows. Return False if this session has none."""
    try:
        browser = webbrowser.get()
        return type(browser) is not webbrowser.GenericBrowser and browser.open(address)  # that one is for terminals
    except webbrowser.Error:
        return False


def _tell(folder: Path, control: Control, stopped: str) -> None:
    """Write the file and show what the worker now does, or `stopped` if no worker runs."""
    from prime_node.worker.control import write_control

    ordered = control.model_copy(update={"at_ms": max(time.time_ns() // 1_000_000, control.at_ms + 1)})
    write_control(folder, ordered)
    if not is_in_use(folder):
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
    set_ones = control.limits.model_dump(mode="json", exclude_defaults=True)
    return ", ".join(f"{name}={str(value).lower()}" for name, value in set_ones.items()) or "no limits"


def _check(folder: Path) -> None:
    if not (folder / "status.json").is_file():
        raise LocalError(
            f"no worker has run in {folder}; `prime-node status` shows the folders of this machine's workers"
        )
