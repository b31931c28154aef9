"""The work on leases: request ahead, load, generate, sign and spool, or hand back.

A lease decides which policy the engine loads, so queued leases of an older policy are finished with that policy. The
engine loads only weights that the follower has verified. If it then computes something else, it is not used.
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
from prime_node.ports.engine import EngineMismatch
from prime_node.ports.transport import Unreachable
from prime_node.worker.episodes import play_lease
from prime_node.worker.generating import Play, bundle_for, generate, open_lease
from prime_node.worker.rehearsal import rehearse
from prime_node.worker.worker import Worker
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.replies import NotYet
from prime_protocol.requests import LeaseRequest, ReturnLeaseRequest, WorkerState
from prime_protocol.schedule import SwapPolicy
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

LEASE_PAUSE_S, LEASE_PAUSE_S_MAX = 5.0, 30.0
"""Seconds to wait after a failed request for a lease; and the longest pause that a coordinator may ask for."""
HOLDING_MAX = 1_024
"""Maximum number of leases that a request may name."""
REHEARSAL_S_MAX = 10.0
"""Time limit of the rehearsal. Reaching it shows that the machine is slow, and gives a bound on its speed."""
LOADS_MAX = 2
"""Maximum number of attempts to load a policy so that the engine computes it correctly."""


async def load_first(worker: Worker) -> None:
    """Load a policy before requesting work: starting an engine takes long enough for a lease to become stale.

    Then rehearse, so that the first lease already fits this machine and the coordinator knows how long to wait for it.
    """
    began_s = worker.clock.monotonic_s()
    policy = await unless(worker.quit.wait(), worker.follower.wait_newer(-1))
    if policy is None:
        return
    download_bytes = sum(worker.follower.received.values())
    download_bytes_per_s = download_bytes / max(worker.clock.monotonic_s() - began_s, 1e-3)
    worker.activity.waiting_for = f"the engine to load policy {policy.version}"
    if await unless(worker.quit.wait(), _load(worker, policy)):
        too_long = first_of(worker.quit.wait(), worker.clock.sleep(REHEARSAL_S_MAX))
        worker.activity.waiting_for = "a rehearsal"
        await rehearse(worker.engine, worker.run.spec, worker.activity.pace, clock=worker.clock, too_long=too_long)
        worker.activity.speed = worker.activity.pace.claim(download_bytes_per_s=download_bytes_per_s)
    worker.activity.waiting_for = ""


async def lease_ahead(worker: Worker, leases: asyncio.Queue[Lease]) -> NoReturn:
    """Keep the queue filled: one lease in generation, `leases_ahead` behind it."""
    while True:
        await worker.room.acquire()
        leases.put_nowait(await _next_lease(worker))


async def _next_lease(worker: Worker) -> Lease:
    """Return a lease for the newest held policy, however long it takes."""
    while True:
        if fault := worker.trust.fault():
            worker.activity.waiting_for = fault
            await worker.clock.sleep(LEASE_PAUSE_S)
            continue
        policy = worker.follower.latest() or await worker.follower.wait_newer(-1)
        asked = LeaseRequest(
            policy_version=policy.version,
            policy_digest=policy.signed.digest,
            rollouts_max=worker.activity.pace.rollouts_max(
                worker.run, wanted=worker.config.rollouts_max, leases_ahead=worker.config.leases_ahead
            ),
            holding=_holding(worker),
            speed=None if worker.activity.rollouts_generated else worker.activity.speed,
            wait_s=worker.config.wait_seconds,
            session=worker.session.name,
        )
        try:
            reply = await worker.session.ask(functools.partial(worker.coordinator.lease, asked))
            if not isinstance(reply, NotYet):
                opened = functools.partial(open_lease, reply, asked, run=worker.run, worker=worker.key.key_id)
                lease = await worker.trust.verified(opened)
                worker.activity.in_hand.add(lease.lease_id)
                worker.receipts.note_lease(lease, reply)
                worker.activity.waiting_for = ""
                return lease
            reason, pause_s = reply.reason, min(reply.retry_after_s, LEASE_PAUSE_S_MAX)
        except RemoteError as error:
            reason, pause_s = f"no lease: {error}", LEASE_PAUSE_S
        worker.activity.waiting_for = reason  # for the status line
        await worker.clock.sleep(pause_s)


def _holding(worker: Worker) -> tuple[str, ...] | None:
    """Return every known lease, so that one whose answer was lost need not wait until it expires."""
    held = (*worker.activity.in_hand, *worker.spool.lease_ids)
    return held if len(held) <= HOLDING_MAX else None


async def fulfil(worker: Worker, lease: Lease) -> None:
    """Fulfil one lease: load its policy, generate, sign and spool. Hand it back if it cannot be done in time."""
    too_late = first_of(worker.quit.wait(), worker.clock.sleep(worker.seconds_left(lease)))
    policy = await unless(too_late, worker.follower.policy(lease.policy_version))
    if policy is None:
        await hand_back(worker, lease)
        return
    if not worker.activity.pace.fits(lease.num_rollouts, seconds_left=worker.seconds_left(lease)):
        worker.activity.pace.doubt()
        await hand_back(worker, lease)
        return
    # An evaluation is of one policy, so its completions never span two.
    swap = SwapPolicy.DRAIN if lease.is_evaluation else worker.run.spec.schedule.swap
    if worker.loaded.version != policy.version and not (swap.spans_policies and worker.loaded.version > policy.version):
        await _load(worker, policy)
    worker.activity.state = WorkerState.GENERATING
    began_s = worker.clock.monotonic_s()
    work = generate(
        worker.engine,
        lease,
        swap,
        held=worker.loaded.version,
        proofs=worker.run.spec.checks.proofs,
        wait_newer=functools.partial(_wait_newer, worker),
        play=_play(worker),
        timed=lambda version: _swapping(worker, version, worker.follower.latest()),
    )
    slots = {"first_slot": lease.groups[0].slot, "num_groups": len(lease.groups)}
    with worker.timed("generate", step=lease.step, policy_version=lease.policy_version, **slots):
        generated = await unless(worker.grace_over.wait(), work)
    worker.loaded.version = -1 if generated is None else generated.held
    if generated is None or generated.rollouts is None:
        await hand_back(worker, lease, failed=generated is not None and generated.failed)
        return
    rollouts = generated.rollouts
    num_tokens = rollouts.num_tokens
    worker.activity.pace.measured(
        rollouts=lease.num_rollouts, tokens=num_tokens, seconds=worker.clock.monotonic_s() - began_s
    )
    worker.activity.rollouts_generated += lease.num_rollouts
    if worker.seconds_left(lease) <= 0:
        await hand_back(worker, lease)
        return
    parcel = await asyncio.to_thread(
        bundle_for,
        lease,
        rollouts,
        key=worker.key,
        engine=worker.engine.info,
        created_at_ms=worker.clock.now_ms(),
    )
    worker.receipts.note_bundle(await asyncio.to_thread(digest_of, parcel), lease.lease_id)
    await unless(worker.grace_over.wait(), worker.spool.put(parcel, lease.lease_id))
    worker.activity.in_hand.discard(lease.lease_id)


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

    Raises LocalError if the engine does not compute what the weights imply.
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
    raise LocalError(
        f"engine {worker.engine.info.name} {worker.engine.info.version} does not compute policy {policy.version} "
        f"correctly after {LOADS_MAX} loads; choose another one with --engine, and report this"
    )


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
    worker.activity.leases_dropped += 1
    worker.activity.in_hand.discard(lease.lease_id)
    if worker.seconds_left(lease) <= 0:
        log.info("lease %s has expired; dropped", lease.lease_id[:12])
        return
    why = "its environment failed" if failed else "it cannot be finished in time"
    log.info("lease %s: %s; handing it back", lease.lease_id[:12], why)
    request = ReturnLeaseRequest(lease_id=lease.lease_id, failed=failed, session=worker.session.name)
    try:
        await worker.session.attempt(lambda: worker.coordinator.return_lease(request))
    except (RemoteError, Unreachable) as error:
        log.info("lease %s: %s; it will expire", lease.lease_id[:12], error)
