"""The work on leases: request ahead, load, generate, sign and spool, or hand back.

A lease decides which policy the engine loads. If the engine batches calls, the next lease begins as soon as it has room, and
each lease's bundle is spooled once it is finished. Leases of another policy begin once the others are finished, or at once if
the run lets completions span policies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import NoReturn

from prime_node.broadcast.follow.follower import Policy
from prime_node.patience import first_of, unless
from prime_node.ports.engine import BatchingEngine, EngineFault, EngineMismatch, swapping_engine
from prime_node.ports.transport import Unreachable
from prime_node.traces import of_lease, spanned
from prime_node.worker.generating import Play, bundle_for, generate, open_lease, play_lease
from prime_node.worker.pace import rehearse
from prime_node.worker.reporting import status_of
from prime_node.worker.worker import HOLDING_MAX, LeaseInHand, Worker
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import NotYet
from prime_protocol.requests import LeaseRequest, ReturnLeaseRequest, WorkerState
from prime_protocol.schedule import SwapPolicy
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

LEASE_PAUSE_S, LEASE_PAUSE_S_MIN, LEASE_PAUSE_S_MAX = 5.0, 0.1, 30.0
"""Seconds to wait after a failed request for a lease; and the shortest and longest pause that a coordinator may ask for."""
REHEARSAL_S_MAX = 10.0
"""Time limit of the rehearsal. Reaching it shows that the machine is slow, and gives a bound on its speed."""
LOADS_MAX = 2
"""Maximum number of attempts to load a policy so that the engine computes it correctly."""


async def load_first(worker: Worker) -> None:
    """Build the engine and load a policy before requesting work: that takes long enough for a lease to become stale.

    The engine is built during the download. Raises LocalError if it cannot be. Then rehearse, so that the first lease already
    fits this machine and the coordinator knows how long to wait for it.
    """
    worker.activity.waiting_for = "the engine is being loaded"
    worker.show(status_of(worker))  # at once: the line before says that it is not admitted
    worker.say("joined; the engine is loading")
    found = await unless(worker.quit.wait(), _equip_and_fetch(worker))
    if found is None:
        return
    policy, download_bytes_per_s = found
    worker.activity.waiting_for = f"the engine loads policy {policy.version}"
    if await unless(worker.quit.wait(), _load(worker, policy)):
        too_long = first_of(worker.quit.wait(), worker.clock.sleep(REHEARSAL_S_MAX))
        worker.activity.waiting_for = "the engine measures its speed"
        await rehearse(worker.engine, worker.run.spec, worker.activity.pace, clock=worker.clock, too_long=too_long)
        worker.activity.speed = worker.activity.pace.claim(download_bytes_per_s=download_bytes_per_s)
    worker.activity.waiting_for = ""


async def _equip_and_fetch(worker: Worker) -> tuple[Policy, float]:
    """Build the engine, and meanwhile wait for a policy. Return the policy and the download's bytes a second."""

    async def fetch() -> tuple[Policy, float]:
        began_s = worker.clock.monotonic_s()
        policy = await worker.follower.wait_newer(-1)
        download_bytes = sum(worker.follower.received.values())
        return policy, download_bytes / max(worker.clock.monotonic_s() - began_s, 1e-3)

    async with asyncio.TaskGroup() as tasks:
        fetching = tasks.create_task(fetch())
        worker.activity.waiting_for = "the engine is being loaded"
        worker.equipment = await worker.equip()
        worker.obey(worker.activity.limits or worker.config.limits)
        worker.activity.waiting_for = ""
        await worker.session.describe(worker.engine.info)
    return fetching.result()


async def lease_ahead(worker: Worker, leases: asyncio.Queue[Lease]) -> NoReturn:
    """Request a lease for each that there is room for, in the engine or ahead of it, within the run's limit of open leases."""
    while True:
        await worker.room.acquire()
        await worker.open_leases.acquire()
        leases.put_nowait(await _next_lease(worker))


async def _next_lease(worker: Worker) -> Lease:
    """Return a lease for the newest held policy, however long it takes."""
    while True:
        await worker.permit.on()
        if fault := worker.trust.fault():
            worker.activity.waiting_for = fault
            await worker.clock.sleep(LEASE_PAUSE_S)
            continue
        policy = worker.follower.latest() or await worker.follower.wait_newer(-1)
        asked = LeaseRequest(
            policy_version=policy.version,
            policy_digest=policy.signed.digest,
            rollouts_max=worker.activity.pace.rollouts_max(
                worker.run,
                wanted=worker.config.rollouts_max,
                leases_ahead=1 if worker.config.leases_ahead is None else worker.config.leases_ahead,
            ),
            holding=_holding(worker),
            speed=None if worker.activity.rollouts_generated else worker.activity.speed,
            wait_s=worker.config.wait_seconds,
            session=worker.session.name,
        )
        asked_s = worker.clock.monotonic_s()
        try:
            reply = await worker.session.ask(functools.partial(worker.coordinator.lease, asked))
            if not isinstance(reply, NotYet):
                opened = functools.partial(open_lease, reply, asked, run=worker.run, worker=worker.key.key_id)
                lease = await worker.trust.verified(opened)
                _require_new(worker, lease)
                worker.activity.in_hand[lease.lease_id] = LeaseInHand(reply.digest)
                if worker.activity.paused:  # meanwhile: it is handed back in its turn
                    worker.activity.cancel((lease.lease_id,))
                worker.receipts.note_lease(lease, reply)
                worker.activity.pace.asked(worker.clock.monotonic_s() - asked_s)
                worker.activity.waiting_for = ""
                return lease
            reason, pause_s = reply.reason, min(max(reply.retry_after_s, LEASE_PAUSE_S_MIN), LEASE_PAUSE_S_MAX)
        except RemoteError as error:
            reason, pause_s = f"no lease: {error}", LEASE_PAUSE_S
            if error.code is ErrorCode.EXPIRED:  # perhaps this machine's clock was set since the clocks were compared
                with contextlib.suppress(RemoteError, Unreachable):
                    await worker.session.compare_clocks()
        worker.activity.waiting_for = reason  # for the status line
        await worker.clock.sleep(pause_s)


def _require_new(worker: Worker, lease: Lease) -> None:
    """Raise RemoteError if the worker has or had a lease of this id: two bundles for one id would convict it of equivocation.

    Raise it for one that is over too: a coordinator could send them without end, and each is dropped at once.
    """
    name = lease.lease_id
    if worker.seconds_left(lease) <= 0:
        raise RemoteError(ErrorCode.EXPIRED, f"lease {name[:12]} is over already")
    if name in worker.activity.in_hand or name in worker.spool.lease_ids or worker.receipts.is_answered(name):
        raise RemoteError(ErrorCode.MALFORMED, f"lease {name[:12]} was granted before")


def _holding(worker: Worker) -> tuple[str, ...] | None:
    """Return every known lease, so that one whose answer was lost need not wait until it expires."""
    held = (*worker.activity.in_hand, *worker.spool.lease_ids)
    return held if len(held) <= HOLDING_MAX else None


async def begin(worker: Worker, lease: Lease) -> bool:
    """Let the engine hold the lease's policy, and return True.

    Hand the lease back if that cannot be done in time, or if the coordinator can no longer use it.
    """
    cancelled = worker.activity.in_hand[lease.lease_id].cancelled
    too_late = first_of(worker.quit.wait(), cancelled.wait(), worker.clock.sleep(worker.seconds_left(lease)))
    policy = await unless(too_late, worker.follower.policy(lease.policy_version))
    if policy is None or cancelled.is_set():
        await hand_back(worker, lease)
        return False
    if not worker.activity.pace.fits(lease.num_rollouts, seconds_left=worker.seconds_left(lease)):
        worker.activity.pace.doubt()
        await hand_back(worker, lease)
        return False
    if not await unless(worker.quit.wait(), _enter(worker, lease, policy)):
        await hand_back(worker, lease)
        return False
    if worker.seconds_left(lease) <= 0 or cancelled.is_set():
        worker.loaded.leave(lease.lease_id)
        await hand_back(worker, lease)
        return False
    return True


def _swap_of(worker: Worker, lease: Lease) -> SwapPolicy:
    """Return how a lease treats new policies. An evaluation is of one policy, so its completions never span two."""
    return SwapPolicy.DRAIN if lease.is_evaluation else worker.run.spec.schedule.swap


async def _enter(worker: Worker, lease: Lease, policy: Policy) -> bool:
    """Let a lease use the engine once that holds its policy, or a newer one if completions may span policies. Return True.

    Swap while other leases generate if the run and the engine allow that, else load once they are finished. Return False if the
    lease is cancelled first.
    """
    loaded, of_run = worker.loaded, worker.run.spec.schedule.swap
    engine = swapping_engine(worker.engine, of_run)
    spans, cancelled = _swap_of(worker, lease).spans_policies, worker.activity.in_hand[lease.lease_id].cancelled
    while not cancelled.is_set():
        async with loaded.border:  # no swap is in progress
            if loaded.version == policy.version or (spans and loaded.version > policy.version):
                loaded.enter(lease.lease_id, to_the_end=lease.is_evaluation)
                return True
        if loaded.unused.is_set():
            await _load(worker, policy)
        elif engine is not None and 0 <= loaded.version < policy.version:
            timed = functools.partial(_swap_timed, worker)
            with contextlib.suppress(EngineMismatch):  # the leases in generation are handed back; then it is loaded
                await loaded.swap_to(policy.version, policy.weights, engine=engine, swap=of_run, timed=timed)
        else:
            await first_of(loaded.unused.wait(), cancelled.wait())
    return False


async def wait_for_room(worker: Worker, begun: asyncio.Event) -> None:
    """Wait until the engine takes another lease: it has the last one's requests, and room for more."""
    if isinstance(worker.engine, BatchingEngine) and worker.engine.batches:
        await begun.wait()
        await worker.engine.wait_for_room()
    else:
        await worker.loaded.unused.wait()


async def fulfil(worker: Worker, lease: Lease, begun: asyncio.Event) -> None:
    """Generate, sign and spool one lease, whose policy the engine holds.

    Hand it back if that fails or takes too long, or if the coordinator can no longer use it.

    Sets `begun` when the engine has the first requests, or never will.
    """
    worker.activity.state = WorkerState.GENERATING
    in_hand, began_s = worker.activity.in_hand[lease.lease_id], worker.clock.monotonic_s()
    work = generate(
        worker.engine,
        lease,
        _swap_of(worker, lease),
        loaded=worker.loaded,
        proofs=worker.run.spec.checks.proofs,
        wait_newer=functools.partial(_wait_newer, worker),
        play=_play(worker),
        timed=functools.partial(_swap_timed, worker),
        begun=begun.set,
        cancelled=in_hand.cancelled,
    )
    slots = {"first_slot": lease.groups[0].slot, "num_groups": len(lease.groups)}
    try:
        of = of_lease(lease.lease_id)
        with (
            worker.timed("generate", step=lease.step, policy_version=lease.policy_version, **slots),
            spanned(
                "generate", of, step=lease.step, policy_version=lease.policy_version, num_rollouts=lease.num_rollouts
            ),
        ):
            generated = await unless(worker.grace_over.wait(), work)
    finally:
        worker.loaded.leave(lease.lease_id)
        begun.set()
        if worker.loaded.unused.is_set() and not worker.quit.is_set():
            worker.activity.state = WorkerState.IDLE
    if generated is None or generated.rollouts is None:
        await hand_back(worker, lease, failed=generated is not None and generated.failed)
        return
    _measure(worker, lease, generated.rollouts.num_tokens, began_s)
    if worker.seconds_left(lease) <= 0:
        await hand_back(worker, lease)
        return
    parcel = await asyncio.to_thread(
        bundle_for,
        lease,
        generated.rollouts,
        key=worker.key,
        engine=worker.engine.info,
        created_at_ms=worker.clock.now_ms(),
        lease_digest=in_hand.digest,
    )
    await worker.receipts.note_bundle(await asyncio.to_thread(digest_of, parcel), lease.lease_id)
    await unless(worker.grace_over.wait(), worker.spool.put(parcel, lease.lease_id))
    _close(worker, lease)


def _measure(worker: Worker, lease: Lease, num_tokens: int, began_s: float) -> None:
    """Record the pace of a lease that has just been generated."""
    activity, now_s = worker.activity, worker.clock.monotonic_s()
    activity.pace.measured(
        rollouts=lease.num_rollouts,
        tokens=num_tokens,
        seconds=now_s - began_s,
        engine_s=now_s - max(began_s, activity.finished_s),
    )
    activity.finished_s = now_s
    activity.rollouts_generated += lease.num_rollouts
    activity.tokens_generated += num_tokens


def _close(worker: Worker, lease: Lease) -> None:
    worker.activity.in_hand.pop(lease.lease_id, None)
    worker.open_leases.release()


def _play(worker: Worker) -> Play | None:
    """Return the function that plays multi-turn rollouts; None if the run has none."""
    if not worker.environments:
        return None
    return lambda lease, sample: play_lease(lease, worker.run.spec, worker.environments, sample)


async def _wait_newer(worker: Worker, policy_version: int) -> tuple[int, Weights]:
    policy = await worker.follower.wait_newer(policy_version)
    return policy.version, policy.weights


async def _load(worker: Worker, policy: Policy) -> bool:
    """Swap the engine to verified weights and return True.

    Raises EngineFault if the engine does not compute what the weights imply.
    """
    for attempt in range(1, LOADS_MAX + 1):
        worker.loaded.version = -1
        try:
            with _swapping(worker, policy.version, policy):
                await worker.engine.load(policy.weights, policy_version=policy.version)
        except EngineMismatch as error:
            log.error(
                "policy %d, load %d of %d: %s; the bundle is not uploaded", policy.version, attempt, LOADS_MAX, error
            )
        else:
            return True
    raise EngineFault(
        f"engine {worker.engine.info.name} {worker.engine.info.version} does not compute policy {policy.version} "
        f"correctly after {LOADS_MAX} loads; choose another one with --engine, and report this"
    )


def _swap_timed(worker: Worker, policy_version: int) -> contextlib.AbstractContextManager[None]:
    return _swapping(worker, policy_version, worker.follower.latest())


@contextlib.contextmanager
def _swapping(worker: Worker, policy_version: int, policy: Policy | None) -> Iterator[None]:
    """Record a swap for the next heartbeat, except one to the first policy or to an older one."""
    began_s = worker.clock.monotonic_s()
    with worker.timed("swap", policy_version=policy_version):
        yield
    usable_after_ms = None
    if policy is not None and policy.version == policy_version:
        usable_after_ms = max(0, worker.session.server_now_ms() - policy.signed.manifest.created_at_ms)
    swap_ms = round(1_000 * (worker.clock.monotonic_s() - began_s))
    worker.loaded.swapped(policy_version, usable_after_ms=usable_after_ms, swap_ms=swap_ms)


async def hand_back(worker: Worker, lease: Lease, *, failed: bool = False) -> None:
    """Return a lease to the coordinator.

    An expired lease needs no message: others have it already, as is normal after a laptop's sleep.
    """
    in_hand = worker.activity.in_hand[lease.lease_id]
    worker.activity.leases_dropped += 1
    _close(worker, lease)
    if worker.seconds_left(lease) <= 0:
        log.info("lease %s has expired; dropped", lease.lease_id[:12])
        return
    in_time = "the worker leaves" if worker.quit.is_set() else "it cannot be finished in time"
    why = "its problem fails here" if failed else in_time
    if in_hand.cancelled.is_set():
        why = f"paused {worker.activity.paused}" if worker.activity.paused else "the run can no longer use it"
    log.info("lease %s: %s; handing it back", lease.lease_id[:12], why)
    request = ReturnLeaseRequest(lease_id=lease.lease_id, failed=failed, session=worker.session.name)
    try:
        await worker.session.attempt(lambda: worker.coordinator.return_lease(request))
    except (RemoteError, Unreachable) as error:
        log.info("lease %s: %s; it will expire", lease.lease_id[:12], error)
