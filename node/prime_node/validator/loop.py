"""The validator's loop.

Who waits for whom: `fetch` asks the coordinator for work (long poll, so the coordinator's news wakes it) and fills a bounded
queue; `judge` empties it. The policy that a bundle needs comes from the follower, which has verified it. Nothing waits
without a deadline: a request that gets no answer is tried again with growing pauses, and a task whose deadline has passed
is dropped, because the coordinator has given it to somebody else.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from prime_node.patience import PAUSE_S_MIN, ask_until_answered, unless
from prime_node.ports.clock import Clock
from prime_node.ports.engine import Scorer
from prime_node.ports.environment import Environment, Tokenizer
from prime_node.ports.transport import ValidatorPort
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.judge import Judgement, OpenedBundle, judge_bundle, open_bundle, reward_bundle
from prime_node.validator.spans import policies_of
from prime_protocol.errors import PeerError
from prime_protocol.messages import BundleRequest, CheckRequest, CheckResultRequest, CheckTask, NotYet
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason, Verdict
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Validator:
    """What the loop works with. `policy` gives verified weights of a version, waiting for them if need be."""

    run: PinnedRun
    config: ValidatorConfig
    coordinator: ValidatorPort
    scorer: Scorer
    environments: Mapping[str, Environment]
    tokenizer: Tokenizer
    policy: Callable[[int], Awaitable[Weights]]
    policy_versions: Callable[[], tuple[int, ...]]
    clock: Clock
    verdicts: Counter[str] = field(default_factory=Counter)
    """How many bundles were accepted, and refused by reason."""
    loaded: int = -1
    """The policy that the scorer holds."""


async def run(validator: Validator, stop: asyncio.Event) -> None:
    """Judge bundles until `stop` is set; what has been fetched is judged first."""
    if validator.config.unsafe_skip_proofs:
        log.warning("unsafe_skip_proofs: no rollout is proven; whoever joins decides what is learned")
    tasks: asyncio.Queue[tuple[CheckTask, bytes] | None] = asyncio.Queue(validator.config.prefetch)
    async with asyncio.TaskGroup() as group:
        group.create_task(_fetch(validator, tasks, stop))
        group.create_task(_judge(validator, tasks))


async def _fetch(
    validator: Validator, tasks: asyncio.Queue[tuple[CheckTask, bytes] | None], stop: asyncio.Event
) -> None:
    while not stop.is_set():
        found = await unless(stop.wait(), _next_task(validator))
        if found is not None:
            await tasks.put(found)
    await tasks.put(None)


async def _next_task(validator: Validator) -> tuple[CheckTask, bytes] | None:
    request = CheckRequest(policy_versions=validator.policy_versions(), wait_s=validator.config.wait_seconds)
    task = await _persist(validator, lambda: validator.coordinator.check(request), what="a bundle to judge")
    if task is None:
        return None
    if isinstance(task, NotYet):
        await validator.clock.sleep(task.retry_after_s)
        return None
    bundle = await _persist(
        validator,
        lambda: validator.coordinator.bundle(BundleRequest(bundle=task.bundle)),
        what=f"bundle {task.bundle[:12]}",
    )
    return None if bundle is None else (task, bundle)


async def _judge(validator: Validator, tasks: asyncio.Queue[tuple[CheckTask, bytes] | None]) -> None:
    while (item := await tasks.get()) is not None:
        task, parcel = item
        if validator.clock.now_ms() > task.deadline_ms:
            log.warning(
                "bundle %s: its deadline passed before it was judged; another validator has it", task.bundle[:12]
            )
            continue
        judgement = await judge_task(validator, task, parcel)
        if judgement is None:
            continue
        validator.verdicts[judgement.verdict.reason or "accepted"] += 1
        if not judgement.verdict.accepted:
            log.info("bundle %s of %s refused: %s", task.bundle[:12], task.lease.worker, judgement.verdict)
        result = CheckResultRequest(
            bundle=task.bundle,
            verdict=judgement.verdict,
            num_tokens=judgement.num_tokens,
            rewards=judgement.rewards,
            measured={
                name: value for name, value in judgement.measured.items() if math.isfinite(value)
            },  # JSON has no others
            versions=judgement.versions,
            unscored=judgement.unscored,
            evidence=judgement.evidence,
            fingerprints=judgement.fingerprints,
        )
        send = functools.partial(validator.coordinator.check_result, result)
        await _persist(validator, send, what=f"verdict on {task.bundle[:12]}")


async def judge_task(validator: Validator, task: CheckTask, parcel: bytes) -> Judgement | None:
    """One bundle, with the right policy loaded. None where the policy cannot be had in time: the deadline hands it on."""
    opened = open_bundle(parcel, task.lease, validator.run, newest_policy=task.newest_policy)
    if not isinstance(opened, OpenedBundle):
        return opened
    if validator.config.unsafe_skip_proofs or not task.audit:
        return await reward_bundle(
            opened, run=validator.run, environments=validator.environments, tokenizer=validator.tokenizer
        )
    versions = policies_of(opened.rollouts)
    policies: dict[int, Weights] = {}
    if versions != [validator.loaded]:
        try:
            for version in versions:
                seconds_left = (task.deadline_ms - validator.clock.now_ms()) / 1_000
                policies[version] = await asyncio.wait_for(validator.policy(version), seconds_left)
        except TimeoutError:
            log.warning("bundle %s: policy %d did not arrive in time", task.bundle[:12], version)
            return None
        except PeerError as error:  # published broken: no validator can judge it
            return Judgement(Verdict.refuse(RejectReason.UNVERIFIABLE, error.detail))
    if len(versions) == 1 and policies:
        await validator.scorer.load(policies[versions[0]], policy_version=versions[0])
    validator.loaded = versions[0] if len(versions) == 1 else -1
    return await judge_bundle(
        opened,
        validator.scorer,
        run=validator.run,
        environments=validator.environments,
        tokenizer=validator.tokenizer,
        policies=policies if len(versions) > 1 else None,
    )


async def _persist(validator: Validator, call: Callable[[], Awaitable[T]], *, what: str) -> T | None:
    """The answer, however long it takes; None where the coordinator refuses, which it does for a reason of its own."""
    try:
        return await ask_until_answered(call, what=what, clock=validator.clock)
    except PeerError as error:
        log.warning("%s: refused: %s", what, error)
        await validator.clock.sleep(PAUSE_S_MIN)
        return None
