"""The worker's loop: join, then lease, generate, sign, spool, upload; beside it, follow the policies.

Who waits for whom. `_lease_ahead` waits for a policy, for room (config.leases_ahead) and for the coordinator; it asks for nothing
while `trust` cannot say which policy is the newest; `_generate` waits for leases and gives room back; the spool's `flush` waits
for bundles and for the coordinator; the follower waits for new heads. A lease decides which policy the engine loads, so leases of
an older policy that wait in line are finished on that one. Nothing waits without an end: `quit` wakes everyone, and an absent
coordinator is asked again with growing pauses.

Only weights that the follower has verified are loaded, and an engine that then computes something else is not
used.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NoReturn, TypeVar

from prime_node import __version__
from prime_node.broadcast.follow.follower import Follower, Policy
from prime_node.broadcast.follow.trust import Trust
from prime_node.folder_lock import FolderLock
from prime_node.patience import causes_of, first_of, unless
from prime_node.ports.clock import Clock
from prime_node.ports.engine import Engine, EngineMismatch
from prime_node.ports.transport import Unreachable, WorkerPort
from prime_node.worker.config import WorkerConfig
from prime_node.worker.generating import generate
from prime_node.worker.leases import Pace, bundle_for, open_lease
from prime_node.worker.receipts import ReceiptBook
from prime_node.worker.session import Banned, Session
from prime_node.worker.spool import Spool
from prime_node.worker.status import Status, write_status
from prime_protocol.assignment import Lease
from prime_protocol.errors import LocalError, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.messages import (
    HeartbeatRequest,
    JoinRequest,
    LeaseRequest,
    NotYet,
    ReceiptList,
    ReceiptsRequest,
    ReturnLeaseRequest,
    UploadReply,
    WorkerState,
)
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

T = TypeVar("T")
LEASE_PAUSE_S, LEASE_PAUSE_S_MAX = 5.0, 30.0
"""After a question for a lease that went wrong; and the longest pause that a coordinator may ask for."""
HOLDING_MAX = 1_024
"""Leases that a request may name."""
LOADS_MAX = 2
"""Tries to make the engine compute what its weights say, before we give up on it."""


class Ending(StrEnum):
    """How a worker ended. The exit codes are part of the command line's documentation."""

    STOPPED = "stopped"
    """We were asked to stop, and did in order."""
    DRAINED = "drained"
    """The run is over, or the operator drains it."""
    BANNED = "banned"
    """The coordinator has banned this key."""

    @property
    def exit_code(self) -> int:
        return 4 if self is Ending.BANNED else 0


@dataclass
class Worker:
    """What the loop works with. `folder` is this worker's own, and of this run."""

    run: PinnedRun
    config: WorkerConfig
    key: SigningKey
    coordinator: WorkerPort
    engine: Engine
    follower: Follower
    trust: Trust
    """Made before the worker: what is in the folder may be signed by keys that only it knows."""
    folder: Path
    clock: Clock
    rng: random.Random = field(default_factory=random.Random)
    swarm: Callable[[], str] = lambda: ""
    """What the owner is told about the exchange with other workers."""
    say: Callable[[str], None] = log.info
    """Where the line for the owner goes."""
    in_hand: set[str] = field(default_factory=set)
    """Leases that wait, are being generated or are being written to the spool."""
    held: int = -1
    """The policy that the engine holds."""
    newest_held: int = -1
    """The newest policy that the engine has held."""
    usable_after_ms: int | None = None
    """From the publication of the held policy until the engine had it, where that says something about its way to us."""
    state: WorkerState = WorkerState.FETCHING
    waiting_for: str = ""
    rollouts_generated: int = 0
    leases_dropped: int = 0
    pace: Pace = field(default_factory=Pace)
    quit: asyncio.Event = field(default_factory=asyncio.Event)
    """Take no new work: we were asked to stop, or the coordinator drains us."""
    grace_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Leave now, whatever is unfinished."""

    def __post_init__(self) -> None:
        """Raises LocalError where the folder is unusable."""
        self.lock = FolderLock(self.folder)
        self.room = asyncio.Semaphore(self.config.leases_ahead + 1)
        self.spool = Spool(self.folder / "spool", bytes_max=self.config.spool_bytes_max, clock=self.clock, rng=self.rng)
        self.receipts = ReceiptBook(self.folder, run=self.run, worker=self.key.key_id)
        request = JoinRequest(
            name=self.config.name,
            software=f"prime-node {__version__}",
            engine=self.engine.info,
            rollouts_max=self.config.rollouts_max,
        )
        self.session = Session(self.run, self.coordinator, request, clock=self.clock, rng=self.rng)


async def run(worker: Worker, stop: asyncio.Event) -> Ending:
    """Until `stop` is set, the run is over or we are banned.

    Raises LocalError where this machine cannot go on, PeerError where the coordinator cannot be talked to.
    Cancelling it is safe at any moment: what is in the spool is uploaded next time.
    """
    outcome = "failed"
    try:
        ending = await _run(worker, stop)
        outcome = ending.value
        return ending
    except BaseExceptionGroup as group:  # the tasks' faults come together; a ban explains the others
        causes = causes_of(group)
        error = next((cause for cause in causes if isinstance(cause, Banned)), causes[0])
        if not isinstance(error, Banned):
            raise error from None
        log.error("banned from this run: %s. What is not uploaded stays in %s", error, worker.folder / "spool")
        worker.session.notice, outcome = str(error), Ending.BANNED.value
        return Ending.BANNED
    finally:
        write_status(worker.folder / "status.json", _status_of(worker, ended=outcome))
        worker.lock.release()


async def _run(worker: Worker, stop: asyncio.Event) -> Ending:
    session = worker.session
    async with asyncio.TaskGroup() as tasks:
        beside = [
            tasks.create_task(_set_after(worker.quit, stop.wait())),
            tasks.create_task(_set_after(worker.grace_over, _grace(worker))),
            tasks.create_task(_show_status(worker)),
        ]
        await unless(worker.quit.wait(), session.join())
        if not worker.quit.is_set():
            beside += [
                tasks.create_task(_set_after(worker.quit, session.draining.wait())),
                tasks.create_task(session.heartbeat(lambda: _heartbeat(worker))),
                tasks.create_task(worker.trust.follow()),
                tasks.create_task(worker.follower.follow()),
                tasks.create_task(worker.spool.flush(lambda parcel: _upload(worker, parcel))),
            ]
            fetching = tasks.create_task(_fetch_receipts(worker))
            leases: asyncio.Queue[Lease] = asyncio.Queue()
            leasing = tasks.create_task(_lease_ahead(worker, leases))
            await _generate(worker, leases)
            leasing.cancel()
            fetching.cancel()
            await _finish(worker, leases)
        for task in beside:
            task.cancel()
    return Ending.STOPPED if stop.is_set() else Ending.DRAINED


# Work


async def _lease_ahead(worker: Worker, leases: asyncio.Queue[Lease]) -> NoReturn:
    """Keep the line filled: one lease being generated, `leases_ahead` behind it."""
    while True:
        await worker.room.acquire()
        leases.put_nowait(await _next_lease(worker))


async def _next_lease(worker: Worker) -> Lease:
    """A lease for the newest policy that we hold, however long it takes."""
    while True:
        if fault := worker.trust.fault():
            worker.waiting_for = fault
            await worker.clock.sleep(LEASE_PAUSE_S)
            continue
        policy = worker.follower.latest() or await worker.follower.wait_newer(-1)
        asked = LeaseRequest(
            policy_version=policy.version,
            policy_digest=policy.signed.digest,
            rollouts_max=worker.pace.rollouts_max(worker.run, wanted=worker.config.rollouts_max),
            holding=_holding(worker),
            wait_s=worker.config.wait_seconds,
        )
        try:
            reply = await worker.session.ask(functools.partial(worker.coordinator.lease, asked))
            if not isinstance(reply, NotYet):
                opened = functools.partial(open_lease, reply, asked, run=worker.run, worker=worker.key.key_id)
                lease = await worker.trust.verified(opened)
                worker.in_hand.add(lease.lease_id)
                worker.waiting_for = ""
                return lease
            reason, pause_s = reply.reason, min(reply.retry_after_s, LEASE_PAUSE_S_MAX)
        except PeerError as error:
            reason, pause_s = f"no lease: {error}", LEASE_PAUSE_S
        worker.waiting_for = reason  # the status line shows it
        await worker.clock.sleep(pause_s)


def _holding(worker: Worker) -> tuple[str, ...] | None:
    """Every lease that we know of: one whose answer was lost on the way need not wait until it expires."""
    held = (*worker.in_hand, *worker.spool.lease_ids)
    return held if len(held) <= HOLDING_MAX else None


async def _generate(worker: Worker, leases: asyncio.Queue[Lease]) -> None:
    """Take leases in turn until `quit`."""
    while not worker.quit.is_set():
        worker.state = WorkerState.FETCHING if worker.follower.latest() is None else WorkerState.IDLE
        lease = await unless(worker.quit.wait(), leases.get())
        if lease is not None:
            await _fulfil(worker, lease)
            worker.room.release()


async def _fulfil(worker: Worker, lease: Lease) -> None:
    """One lease: load its policy, generate, sign, spool. Or give it back, where it cannot be done in time."""
    too_late = first_of(worker.quit.wait(), worker.clock.sleep(_seconds_left(worker, lease)))
    policy = await unless(too_late, worker.follower.policy(lease.policy_version))
    if policy is None:
        await _hand_back(worker, lease)
        return
    if not worker.pace.fits(lease.num_rollouts, seconds_left=_seconds_left(worker, lease)):
        worker.pace.doubt()
        await _hand_back(worker, lease)
        return
    swap = worker.run.spec.schedule.swap
    if worker.held != policy.version and not (swap.spans_policies and worker.held > policy.version):
        await _load(worker, policy)
    worker.state = WorkerState.GENERATING
    began_s = worker.clock.monotonic_s()
    work = generate(
        worker.engine,
        lease,
        swap,
        held=worker.held,
        wait_newer=functools.partial(_wait_newer, worker),
    )
    generated = await unless(worker.grace_over.wait(), work)
    worker.held = -1 if generated is None else generated.held
    completions = None if generated is None else generated.completions
    if completions is None:
        await _hand_back(worker, lease)
        return
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    worker.pace.measured(rollouts=lease.num_rollouts, tokens=num_tokens, seconds=worker.clock.monotonic_s() - began_s)
    worker.rollouts_generated += lease.num_rollouts
    if _seconds_left(worker, lease) <= 0:
        await _hand_back(worker, lease)
        return
    parcel = await asyncio.to_thread(
        bundle_for,
        lease,
        completions,
        key=worker.key,
        engine=worker.engine.info,
        created_at_ms=worker.clock.now_ms(),
    )
    await unless(worker.grace_over.wait(), worker.spool.put(parcel, lease.lease_id))
    worker.in_hand.discard(lease.lease_id)


async def _wait_newer(worker: Worker, policy_version: int) -> tuple[int, Weights]:
    policy = await worker.follower.wait_newer(policy_version)
    return policy.version, policy.weights


async def _load(worker: Worker, policy: Policy) -> None:
    """Swap the engine to verified weights. Raises LocalError where it does not compute what they say."""
    for attempt in range(1, LOADS_MAX + 1):
        worker.held = -1
        try:
            await worker.engine.load(policy.weights, policy_version=policy.version)
        except EngineMismatch as error:
            log.error("policy %d, load %d of %d: %s; nothing is uploaded", policy.version, attempt, LOADS_MAX, error)
        else:
            worker.held = policy.version
            _note_usable(worker, policy)
            return
    raise LocalError(
        f"the engine {worker.engine.info.name} {worker.engine.info.version} does not compute policy {policy.version} "
        f"after {LOADS_MAX} loads; try another one with --engine, and report this"
    )


def _note_usable(worker: Worker, policy: Policy) -> None:
    """How long after its publication the engine could use it. Nothing is said of the first one, nor of older ones."""
    worker.usable_after_ms = None
    if policy.version > worker.newest_held:
        if worker.newest_held >= 0:
            worker.usable_after_ms = max(0, worker.session.server_now_ms() - policy.signed.manifest.created_at_ms)
        worker.newest_held = policy.version


async def _hand_back(worker: Worker, lease: Lease) -> None:
    """Give a lease to others. One that has expired is theirs already: after a laptop's sleep that is
    nothing special."""
    worker.leases_dropped += 1
    worker.in_hand.discard(lease.lease_id)
    if _seconds_left(worker, lease) <= 0:
        log.info("lease %s has expired; dropped", lease.lease_id[:12])
        return
    log.info("lease %s cannot be finished in time; handing it back", lease.lease_id[:12])
    request = ReturnLeaseRequest(lease_id=lease.lease_id)
    try:
        await worker.session.attempt(lambda: worker.coordinator.return_lease(request))
    except (PeerError, Unreachable) as error:
        log.info("lease %s: %s; it will expire", lease.lease_id[:12], error)


async def _finish(worker: Worker, leases: asyncio.Queue[Lease]) -> None:
    """Hand back what was not begun, upload what is done, take the last receipts, say goodbye; all within the grace period."""
    worker.state = WorkerState.DRAINING
    while not leases.empty():
        await unless(worker.grace_over.wait(), _hand_back(worker, leases.get_nowait()))
    if worker.spool.num_bundles:
        log.info("uploading %d bundles before leaving", worker.spool.num_bundles)
    await unless(worker.grace_over.wait(), worker.spool.drained())
    if worker.spool.num_bundles:
        log.warning("%d bundles stay in the spool and are uploaded next time", worker.spool.num_bundles)
    await unless(worker.grace_over.wait(), _last_receipts(worker))
    await unless(worker.grace_over.wait(), worker.session.leave())


def _seconds_left(worker: Worker, lease: Lease) -> float:
    return (lease.expires_at_ms - worker.session.server_now_ms()) / 1_000


# Beside the work


async def _upload(worker: Worker, parcel: bytes) -> UploadReply:
    return await worker.session.attempt(lambda: worker.coordinator.upload(parcel))


async def _fetch_receipts(worker: Worker) -> NoReturn:
    while True:
        await worker.clock.sleep(worker.config.receipts_seconds)
        try:
            await _take_receipts(worker, worker.session.ask)
        except PeerError as error:
            log.warning("receipts: %s", error)


async def _last_receipts(worker: Worker) -> None:
    """What was judged since the last look: the end of a run comes sooner than the next one. Who is away is not waited for."""
    try:
        while await _take_receipts(worker, worker.session.attempt):
            continue
    except (PeerError, Unreachable) as error:
        log.info("receipts: %s; what is missing is fetched next time", error)


async def _take_receipts(
    worker: Worker, ask: Callable[[Callable[[], Awaitable[ReceiptList]]], Awaitable[ReceiptList]]
) -> bool:
    """The next receipts; whether there were any."""
    answer = await ask(functools.partial(worker.coordinator.receipts, ReceiptsRequest(after=worker.receipts.cursor)))
    await worker.trust.verified(functools.partial(worker.receipts.add, answer))
    return bool(answer.receipts)


async def _show_status(worker: Worker) -> NoReturn:
    while True:
        status = _status_of(worker)
        write_status(worker.folder / "status.json", status)
        worker.say(status.line())
        await worker.clock.sleep(worker.config.status_seconds)


def _heartbeat(worker: Worker) -> HeartbeatRequest:
    return HeartbeatRequest(
        state=worker.state,
        policy_version=worker.held,
        bundles_spooled=worker.spool.num_bundles,
        usable_after_ms=worker.usable_after_ms,
    )


def _status_of(worker: Worker, *, ended: str = "") -> Status:
    session, tally = worker.session, worker.receipts.tally()
    latest = worker.follower.latest()
    away_since_s = session.away_since_s
    return Status(
        worker=worker.key.key_id,
        state=worker.state,
        policy_version=worker.held,
        head=max(session.head, -1 if latest is None else latest.version),
        step=session.step,
        tokens_per_s=round(worker.pace.tokens_per_s, 1),
        rollouts_generated=worker.rollouts_generated,
        rollouts_accepted=tally.accepted,
        rollouts_pending=tally.pending,
        tokens_accepted=tally.tokens,
        refused=tally.refused,
        bundles_spooled=worker.spool.num_bundles,
        bundles_uploaded=worker.spool.num_uploaded,
        leases_dropped=worker.leases_dropped,
        coordinator_away_s=None if away_since_s is None else worker.clock.monotonic_s() - away_since_s,
        waiting_for=worker.waiting_for,
        notice=session.notice,
        swarm=worker.swarm(),
        ended=ended,
        at_ms=worker.clock.now_ms(),
    )


# Waiting


async def _grace(worker: Worker) -> None:
    await worker.quit.wait()
    await worker.clock.sleep(worker.config.grace_seconds)


async def _set_after(event: asyncio.Event, waiting: Awaitable[object]) -> None:
    await waiting
    event.set()
