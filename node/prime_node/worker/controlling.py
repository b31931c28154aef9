"""The worker's side of its contributor's control: pause, resume, finish.

Pausing cancels the leases in hand, so that they are handed back and the processor is free at once. The engine stays loaded,
and heartbeats, uploads and downloads of policies continue: the worker stays a member and resumes in a moment.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import NoReturn

from prime_node.worker.control import Control, Wanted, pause_reason, read_control, write_control
from prime_node.worker.reporting import status_of
from prime_node.worker.worker import Worker
from prime_protocol.errors import LocalError

log = logging.getLogger(__name__)

CONTROL_S = 0.25
"""Seconds between reads of the file."""


async def follow_control(worker: Worker) -> NoReturn:
    """Do what the contributor wants, forever. The status file shows it at once."""
    while True:
        if _take(worker):
            worker.show(status_of(worker))
        await worker.clock.sleep(CONTROL_S)


def _take(worker: Worker) -> bool:
    """Read the file and follow it. Return whether that changed anything."""
    activity = worker.activity
    try:
        control = read_control(worker.folder)
    except LocalError as error:
        control, reason = Control(at_ms=activity.control_at_ms), f"as {error}"  # perhaps a pause: compute nothing
    else:
        now = datetime.fromtimestamp(worker.clock.now_ms() / 1_000, UTC).astimezone()
        limits = control.limits or worker.config.limits
        reason = pause_reason(control, limits, now=now, around=worker.around)
        if limits != activity.limits:
            activity.limits = limits
            worker.obey(limits)
    if control.wanted is Wanted.FINISH:
        worker.finishing = True
        worker.quit.set()
    is_changed = (reason, control.at_ms) != (activity.paused, activity.control_at_ms)
    activity.paused, activity.control_at_ms, activity.wanted = reason, control.at_ms, control.wanted
    worker.permit.turn(on=not reason)
    if reason:
        activity.cancel(tuple(activity.in_hand))
    return is_changed


def forget_finish(worker: Worker) -> None:
    """Let the next start run again. A start is newer than an earlier wish to finish, and so is the end of the worker."""
    try:
        control = read_control(worker.folder)
        if control.wanted is Wanted.FINISH:
            write_control(worker.folder, control.model_copy(update={"wanted": Wanted.RUN}))
    except LocalError as error:
        log.warning("%s", error)
