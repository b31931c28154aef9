"""The worker's loop: join, then lease, generate, sign, spool and upload, while following the policies.

Concurrency. The worker joins first. `follow_control` reads what the contributor wants; a pause hands the leases back, and
nothing is leased until it ends. `load_first` waits for the engine to be built, for a policy, and for the engine to hold it:
nothing is leased before. `lease_ahead` waits for room (config.leases_ahead) and for the coordinator; it requests nothing while
`trust` cannot establish the newest policy. `_generate` waits for leases, starts a task for each as soon as the engine takes
it, and gives room back. These tasks wait for the engine and for the spool, each until its own bundle is spooled. The spool's
`flush` waits for bundles and for the coordinator; the follower waits for new heads. No wait is endless: `quit` wakes everyone,
and an unreachable coordinator is retried with growing pauses.

Pausing cancels the leases in hand, so that they are handed back and the processor is free at once. The engine stays loaded,
and heartbeats, uploads and downloads of policies continue: the worker stays a member and resumes in a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import NoReturn

from prime_node.patience import causes_of, in_a_hurry, unless
from prime_node.worker.control import Control, Wanted, pause_reason, read_control, write_control
from prime_node.worker.lease_work import begin, fulfil, hand_back, lease_ahead, load_first, wait_for_room
from prime_node.worker.reporting import (
    farewell,
    fetch_receipts,
    follow_standing,
    heartbeat_request,
    last_receipts,
    show_status,
    status_of,
)
from prime_node.worker.session import KeyBanned
from prime_node.worker.status import write_status
from prime_node.worker.worker import Ending, Worker
from prime_protocol.assignment import Lease
from prime_protocol.errors import LocalError
from prime_protocol.replies import UploadReply
from prime_protocol.requests import WorkerState
from prime_protocol.visible import number_of

log = logging.getLogger(__name__)

LAST_RECEIPTS_S_MAX = 10.0
"""Time for which a banned worker tries to fetch its last verdicts; the coordinator may be unreachable."""
LEAVE_S_MAX = 2.0
"""Time for which a worker at fault tries to leave the run."""
HURRY_S = 0.5
"""Grace period after Ctrl-C: leases are handed back rather than finished."""


async def run_worker(worker: Worker, stop: asyncio.Event) -> Ending:
    """Run until `stop` is set, the run is over or the worker is banned.

    Raises LocalError if this machine cannot continue, RemoteError if the coordinator cannot be used. Cancelling it is safe
    at any moment: bundles in the spool are uploaded next time.
    """
    outcome = "failed"
    forget_finish(worker)
    try:
        ending = await _run(worker, stop)
        forget_finish(worker)
        worker.session.notice, outcome = "", ending.value  # the last notice says why there was no lease
        worker.say(farewell(worker, ending))
        return ending
    except BaseExceptionGroup as group:  # the tasks' faults come together; a ban explains the others
        causes = causes_of(group)
        error = next((cause for cause in causes if isinstance(cause, KeyBanned)), causes[0])
        if not isinstance(error, KeyBanned):
            if isinstance(error, LocalError) and worker.session.joined:
                await unless(worker.clock.sleep(LEAVE_S_MAX), worker.session.leave())
            raise error from None
        log.error(
            "banned from this run: %s. Bundles that are not uploaded stay in %s. If the ban is wrong, send the run's "
            "operator your key, %s",
            error,
            worker.folder / "spool",
            worker.key.key_id,
        )
        await unless(worker.clock.sleep(LAST_RECEIPTS_S_MAX), last_receipts(worker))  # they give the reason
        worker.session.notice, outcome = str(error), Ending.BANNED.value
        return Ending.BANNED
    finally:
        status = status_of(worker, ended=outcome)
        worker.recent.note(status)
        worker.recent.write()
        write_status(worker.folder / "status.json", status)
        worker.lock.release()


async def _run(worker: Worker, stop: asyncio.Event) -> Ending:
    session = worker.session
    async with asyncio.TaskGroup() as tasks:
        beside = [
            tasks.create_task(_set_after(worker.quit, stop.wait())),
            tasks.create_task(_set_after(worker.grace_over, _grace(worker, stop))),
            tasks.create_task(show_status(worker)),
            tasks.create_task(follow_control(worker)),
        ]
        await unless(worker.quit.wait(), session.join())
        if not worker.quit.is_set():
            beside += [
                tasks.create_task(_set_after(worker.quit, session.draining.wait())),
                tasks.create_task(session.heartbeat(lambda: heartbeat_request(worker), cancel=worker.activity.cancel)),
                tasks.create_task(worker.trust.follow()),
                tasks.create_task(worker.follower.follow()),
                tasks.create_task(follow_standing(worker)),
                tasks.create_task(worker.spool.flush(lambda parcel: _upload(worker, parcel))),
            ]
            fetching = tasks.create_task(fetch_receipts(worker))
            await unless(worker.quit.wait(), worker.permit.on())
            await load_first(worker)
            await _generate(worker)
            fetching.cancel()
            await _finish(worker)
        for task in beside:
            task.cancel()
    return Ending.STOPPED if stop.is_set() or worker.finishing else Ending.DRAINED


async def _generate(worker: Worker) -> None:
    """Begin leases in their order until `quit`, as many at once as the engine takes. Return when all of them have ended.

    Leases that were not begun are handed back meanwhile.
    """
    leases: asyncio.Queue[Lease] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        leasing = tasks.create_task(lease_ahead(worker, leases))
        if worker.loaded.unused.is_set():
            worker.activity.state = WorkerState.FETCHING if worker.follower.latest() is None else WorkerState.IDLE
        while not worker.quit.is_set():
            lease, is_room_given = await unless(worker.quit.wait(), leases.get()), False
            if lease is not None and await begin(worker, lease):
                begun = asyncio.Event()
                tasks.create_task(fulfil(worker, lease, begun))
                if is_room_given := worker.fetches_ahead:
                    worker.room.release()
                await unless(worker.quit.wait(), wait_for_room(worker, begun))
            if not is_room_given:
                worker.room.release()
        leasing.cancel()
        worker.activity.state = WorkerState.DRAINING
        while not leases.empty():
            tasks.create_task(unless(worker.grace_over.wait(), hand_back(worker, leases.get_nowait())))


async def _finish(worker: Worker) -> None:
    """Finish in order, within the grace period: upload what is done, fetch the last receipts and leave."""
    if worker.spool.num_bundles:
        log.info("uploading %s before the end", number_of(worker.spool.num_bundles, "bundle"))
    await unless(worker.grace_over.wait(), worker.spool.drained())
    if worker.spool.num_bundles:
        log.warning("kept on this disk for the next start to upload: %s", number_of(worker.spool.num_bundles, "bundle"))
    await unless(worker.grace_over.wait(), last_receipts(worker))
    await unless(worker.grace_over.wait(), worker.session.leave())


async def _upload(worker: Worker, parcel: bytes) -> UploadReply:
    return await worker.session.attempt(lambda: worker.coordinator.upload(parcel))


async def _grace(worker: Worker, stop: asyncio.Event) -> None:
    await worker.quit.wait()
    if worker.finishing:
        await stop.wait()
    seconds = worker.config.grace_seconds
    await worker.clock.sleep(min(seconds, HURRY_S) if in_a_hurry(stop) else seconds)


async def _set_after(event: asyncio.Event, waiting: Awaitable[object]) -> None:
    await waiting
    event.set()


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
