"""From a lease to its bundle: validate the lease, generate for it while newer policies arrive, and sign what answers it.

Concurrency: the engine generates, for several leases side by side if it can. If the run's schedule swaps policies during
generation, a second task of each lease waits for the follower's next policy; the first one to have it passes it to the
engine for all. Whichever task finishes first wakes `generate`; cancelling ends both.

With multi-turn environments every rollout of the lease is an episode of its own; concurrent requests to the model are batched
(envs/episodes.py). An environment is third-party code. An exception ends its episode, and the tokens sampled before it
count, because a validator's environment may raise at the same place. If it continues there instead, the bundle is
rejected as incomplete, which is no strike. If its process exits, all its episodes fail; each is then played again alone,
so that no lease is handed from worker to worker forever.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prime_node.envs.episodes import BatchingQueue, EpisodeRecorder, again_alone, bounds_of
from prime_node.patience import cancel_all
from prime_node.ports.engine import Engine, EngineMismatch, GenerateRequest, swapping_engine
from prime_node.ports.environment import TurnEnvironment
from prime_node.worker.loaded_policy import LoadedPolicy
from prime_protocol.assignment import GroupAssignment, Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.parcel import pack_parcel
from prime_protocol.requests import LeaseRequest
from prime_protocol.rollout import Completion, EngineInfo, RolloutHeader, Rollouts, pack_body, rollouts_for
from prime_protocol.run_spec import PinnedRun, RunSpec
from prime_protocol.schedule import SwapPolicy
from prime_protocol.turns import Turn, rollouts_of_turns
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)


Sample = Callable[[list[GenerateRequest]], Awaitable[list[Completion]]]
"""Function that returns an engine's completions of a batch."""


class NothingSampled(Exception):
    """An environment ended an episode before it asked the model for anything."""


async def play_lease(
    lease: Lease,
    spec: RunSpec,
    environments: Mapping[str, TurnEnvironment],
    sample: Sample,
) -> list[list[Turn]]:
    """Return the turns of each rollout, in the lease's order of groups and seeds.

    Raises NothingSampled, and whatever `sample` raises.
    """
    queue, alone = BatchingQueue(sample), asyncio.Lock()
    bounds = bounds_of(spec)
    played = await queue.serving(
        asyncio.gather(
            *(
                _turns(
                    group,
                    environments.get(group.problem.environment),
                    partial(EpisodeRecorder, seed, bounds[group.problem.environment], queue.ask),
                    alone,
                )
                for group in lease.groups
                for seed in group.seeds
            )
        )
    )
    if not all(played):
        raise NothingSampled
    return played


async def _turns(
    group: GroupAssignment,
    environment: TurnEnvironment | None,
    begin: Callable[[], EpisodeRecorder],
    alone: asyncio.Lock,
) -> list[Turn]:
    """Return the turns of one rollout. Its seeds make a second run equal to the first."""
    recorder, problem = begin(), group.problem
    if environment is None:  # single-turn
        await recorder(group.prompt_token_ids)
        return recorder.turns

    async def play() -> float:
        nonlocal recorder
        recorder = begin()
        return await environment.play(problem.index, group.prompt_token_ids, recorder)

    try:
        await again_alone(play, alone)
    except Exception:
        log.warning("environment %s, problem %d: an episode failed", problem.environment, problem.index, exc_info=True)
    return recorder.turns


GROUP_BYTES_MAX, TOKEN_BYTES_MAX = 2**12, 12
"""Bytes of a lease's group of one completion, or of what precedes the groups; and of a token of its prompt."""

Play = Callable[[Lease, Sample], Awaitable[list[list[Turn]]]]
"""Function like `play_lease`, bound to the run's environments."""


def open_lease(envelope: Envelope, asked: LeaseRequest, *, run: PinnedRun, worker: str) -> Lease:
    """Return the lease if it answers our request. Raises RemoteError.

    (1) A coordinator of the run signed it; (2) it is of this run and for this worker; (3) it names the policy that this
    worker reported, and a step that the policy may serve; (4) it requests no more than was offered and than the run
    allows; (5) prompts are within the limits and the vocabulary, and of environments of the run.
    """
    payload = run.keys.verify(envelope, PayloadType.LEASE, Role.COORDINATOR)  # (1)
    group_bytes_max = GROUP_BYTES_MAX + TOKEN_BYTES_MAX * run.spec.limits.prompt_tokens_max
    if len(payload) > GROUP_BYTES_MAX + asked.rollouts_max * group_bytes_max:  # parsed, it takes many times its bytes
        raise LimitExceeded("rollouts_max", len(payload), GROUP_BYTES_MAX + asked.rollouts_max * group_bytes_max)
    lease = parse_json(payload, Lease)
    if lease.run != run.digest or lease.worker != worker:  # (2)
        raise RemoteError(ErrorCode.LEASE_FOREIGN, f"lease {lease.lease_id[:12]} is for another worker or run")
    names_ours = (lease.policy_version, lease.policy_digest) == (asked.policy_version, asked.policy_digest)
    if not names_ours or not run.spec.admission.admits_step(lease.step, lease.policy_version):  # (3)
        raise RemoteError(
            ErrorCode.MALFORMED,
            f"lease {lease.lease_id[:12]} asks for policy {lease.policy_version} at step {lease.step}",
        )
    if lease.num_rollouts > asked.rollouts_max:  # (4)
        raise LimitExceeded("rollouts_max", lease.num_rollouts, asked.rollouts_max)
    if lease.sampling != run.spec.sampling:
        raise RemoteError(ErrorCode.MALFORMED, f"lease {lease.lease_id[:12]} has other sampling settings than the run")
    names = {environment.name for environment in run.spec.environments}
    for group in lease.groups:  # (5)
        if group.problem.environment not in names:
            raise RemoteError(
                ErrorCode.MALFORMED,
                f"lease {lease.lease_id[:12]}: the run has no environment {group.problem.environment}",
            )
        if len(group.prompt_token_ids) > run.spec.limits.prompt_tokens_max:
            raise LimitExceeded("prompt_tokens_max", len(group.prompt_token_ids), run.spec.limits.prompt_tokens_max)
        if max(group.prompt_token_ids) >= run.spec.vocab_size:
            raise RemoteError(
                ErrorCode.MALFORMED, f"lease {lease.lease_id[:12]}: a prompt has tokens outside the vocabulary"
            )
    return lease


def requests_for(lease: Lease) -> list[GenerateRequest]:
    """Return the engine's requests, in the lease's order of groups and seeds."""
    return [GenerateRequest(group.prompt_token_ids, seed) for group in lease.groups for seed in group.seeds]


def bundle_for(
    lease: Lease,
    rollouts: Rollouts,
    *,
    key: SigningKey,
    engine: EngineInfo,
    created_at_ms: int,
    lease_digest: str,
) -> bytes:
    """Return the signed parcel that answers a lease. `lease_digest` is the digest of the lease's payload."""
    body, decompressed_bytes = pack_body(rollouts)
    header = RolloutHeader(
        body_digest=digest_of(body),
        body_bytes=len(body),
        run=lease.run,
        worker=lease.worker,
        lease_id=lease.lease_id,
        step=lease.step,
        policy_version=lease.policy_version,
        policy_digest=lease.policy_digest,
        num_rollouts=lease.num_rollouts,
        decompressed_bytes=decompressed_bytes,
        engine=engine,
        created_at_ms=created_at_ms,
        lease_digest=lease_digest,
    )
    return pack_parcel(header, body, PayloadType.ROLLOUT, key)


class NoNumber(EngineMismatch):
    """A logprob is no finite number: memory of this machine is at fault, or the policy overflows on this prompt everywhere."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Outcome of a lease."""

    rollouts: Rollouts | None
    """Rollouts; None if the lease is to be handed back."""
    failed: bool = False
    """Whether its problem may fail on other machines too: an environment asked for nothing, or a logprob is no number."""


async def generate(
    engine: Engine,
    lease: Lease,
    swap: SwapPolicy,
    *,
    loaded: LoadedPolicy,
    proofs: bool = False,
    wait_newer: Callable[[int], Coroutine[Any, Any, tuple[int, Weights]]],
    play: Play | None = None,
    timed: Callable[[int], AbstractContextManager[None]] = lambda version: nullcontext(),
    begun: Callable[[], None] = lambda: None,
    cancelled: asyncio.Event | None = None,
) -> Generated:
    """Generate the lease's rollouts with the policy that the engine holds. Leases that share an engine share `loaded`.

    `wait_newer` returns the next policy after a version, and its weights; `timed` wraps a swap to it. `proofs`: whether
    completions commit to their hidden states. `play`: makes the turns of each rollout from a function that samples a
    batch, if the run has multi-turn environments. `begun` is called when the engine has the first requests. `cancelled` ends
    the requests, except during a swap, which others need. An engine that cannot swap as the run requires drains: a
    completion may span policies, but need not.
    """
    swapping = swapping_engine(engine, swap)
    sampler = _Sampler(engine, lease, loaded, proofs, begun)
    generating = asyncio.create_task(_rollouts(sampler, lease, play))
    ended = asyncio.create_task((cancelled or asyncio.Event()).wait())
    newer: asyncio.Task[tuple[int, Weights]] | None = None
    try:
        while True:
            waiting: set[asyncio.Future[Any]] = {generating, ended}
            if swapping is not None or swap is SwapPolicy.ABORT_AND_REQUEUE:
                newer = asyncio.create_task(wait_newer(loaded.version))
                waiting.add(newer)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if generating.done():
                rollouts = generating.result()
                return Generated(rollouts, failed=rollouts is None)
            if newer is None or ended.done():
                return Generated(None)
            version, weights = newer.result()
            if swapping is None:
                log.info("policy %d is published: handing the lease back", version)
                return Generated(None)
            await loaded.swap_to(version, weights, engine=swapping, swap=swap, timed=timed)
    except EngineMismatch as error:
        log.error("the engine failed: %s; handing the lease back", error)
        loaded.version = -1
        return Generated(None, failed=isinstance(error, NoNumber))
    finally:
        await cancel_all(*(task for task in (generating, ended, newer) if task is not None))


@dataclass
class _Sampler:
    """Batches of one lease, sampled from the policy that the engine holds."""

    engine: Engine
    lease: Lease
    loaded: LoadedPolicy
    proofs: bool
    begun: Callable[[], None]

    async def sample(self, requests: list[GenerateRequest]) -> list[Completion]:
        async with self.loaded.border:
            begun_on = self.loaded.version
            if begun_on < 0:
                raise EngineMismatch("a swap to a newer policy has failed")
            asked = [replace(request, proofs=self.proofs) for request in requests]
            sampling = asyncio.ensure_future(self.engine.generate(asked, self.lease.sampling))
            await asyncio.sleep(0)
        self.begun()
        completions = await sampling
        if not all(math.isfinite(nats) for completion in completions for nats in completion.logprobs):
            raise NoNumber("a logprob is no finite number")  # a bundle with it would be a strike
        if begun_on == self.lease.policy_version:
            return completions
        return [each if each.spans else _spanning(each, begun_on) for each in completions]


async def _rollouts(sampler: _Sampler, lease: Lease, play: Play | None) -> Rollouts | None:
    if play is None:
        return rollouts_for(lease, await sampler.sample(requests_for(lease)))
    try:
        return rollouts_of_turns(lease, await play(lease, sampler.sample))
    except NothingSampled:
        log.warning("an environment requested no completion; handing the lease back")
        return None


def _spanning(completion: Completion, policy_version: int) -> Completion:
    return replace(completion, spans=((policy_version, len(completion.token_ids)),))
