"""The validator's loop.

Concurrency: `fetch` asks the coordinator for work by long poll and fills a bounded queue. `judge` empties the queue, one
forward pass after another; bundles that wait for one policy share a pass (`batches`). Rewards of proven bundles are computed in
parallel, each bundle's in a scoring worker of its own, and a bounded number of bundles waits for scoring workers. References for
unseeded rewards are sampled before that, in short turns between forward passes (references.py). The follower provides and has
verified the policy that a bundle needs.

`_name_bundles` sends the coordinator a list of the bundles in progress every few seconds. The coordinator gives bundles that are
not in it to another validator.

No wait is endless. An unanswered request is retried with growing pauses. An environment that does not answer fails. A
task whose deadline has passed is dropped, because the coordinator has given it to another validator.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from prime_node.patience import PAUSE_S_MIN, ask_until_answered, unless
from prime_node.ports.engine import EngineDied, EngineFault, EngineMismatch, GenerateRequest, SamplingScorer
from prime_node.ports.transport import Unreachable
from prime_node.traces import begin_span, of_lease, spanned
from prime_node.validator.judge import Judgement, OpenedBundle, open_bundle, prove_bundle, prove_bundles, reward_bundle
from prime_node.validator.references import ReferenceComparison
from prime_node.validator.scoring import NotWanted
from prime_node.validator.spans import policies_of
from prime_node.validator.validator import BundleAudit, Validator, batches, take_waiting
from prime_protocol.assignment import Sampling
from prime_protocol.errors import RemoteError
from prime_protocol.replies import CheckTask, NotYet
from prime_protocol.requests import BundleRequest, CheckRequest, CheckResultRequest, HoldingRequest
from prime_protocol.rollout import Completion
from prime_protocol.verdict import RejectReason, Verdict
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

T = TypeVar("T")

SAY_S = 10.0
"""Seconds between two log lines on verdicts."""
LOADS_MAX = 2
"""Attempts to load weights that the scorer then computes correctly, before giving up."""
HOLDING_S = 5.0
"""Seconds between two lists of the bundles in progress. The coordinator allows nine times as many (check_queue.py)."""
HOLDING_MAX = 1_024
"""Bundles in one list. The settings allow fewer here."""
LATE_S_MAX = 300.0
"""Seconds after its deadline in which a lost bundle's rewards are still computed: a validator alone gets it again."""
POLICY_S_MAX = 60.0
"""Time limit for fetching again the policy of a proven bundle."""


async def run_validator(validator: Validator, stop: asyncio.Event) -> None:
    """Verify bundles until `stop` is set, then finish those already fetched. Raises LocalError if this machine cannot."""
    if validator.config.unsafe_skip_proofs:
        log.warning("unsafe_skip_proofs: rollouts are not verified, so any worker can decide what the policy learns")
    tasks: asyncio.Queue[tuple[CheckTask, bytes] | None] = asyncio.Queue(validator.config.prefetch)
    async with asyncio.TaskGroup() as whole:
        naming = whole.create_task(_name_bundles(validator))
        async with asyncio.TaskGroup() as group:
            group.create_task(_fetch(validator, tasks, stop))
            group.create_task(_judge(validator, tasks, group))
        naming.cancel()


async def _name_bundles(validator: Validator) -> None:
    """Send the coordinator a list of the bundles in progress every few seconds, and record those that it has given away."""
    is_answered = True
    while True:
        if validator.deadlines_ms:
            request = HoldingRequest(session=validator.session, bundles=tuple(validator.deadlines_ms)[:HOLDING_MAX])
            try:
                reply = await validator.coordinator.holding(request)
            except (Unreachable, RemoteError) as error:
                if is_answered:
                    log.warning("the coordinator does not know which bundles are judged here: %s", error)
                is_answered = False
            else:
                validator.lost |= validator.deadlines_ms.keys() & set(reply.lost)
                is_answered = True
        await validator.clock.sleep(HOLDING_S)


async def _fetch(
    validator: Validator, tasks: asyncio.Queue[tuple[CheckTask, bytes] | None], stop: asyncio.Event
) -> None:
    while not stop.is_set():
        found = await unless(stop.wait(), _next_task(validator))
        if found is not None:
            await tasks.put(found)
    await tasks.put(None)


async def _next_task(validator: Validator) -> tuple[CheckTask, bytes] | None:
    request = CheckRequest(
        policy_versions=validator.policy_versions(),
        wait_s=validator.config.wait_seconds,
        asks_left=True,
        session=validator.session,
        names_bundles=True,
    )
    task = await _persist(validator, lambda: validator.coordinator.check(request), what="a bundle to judge")
    if task is None:
        return None
    if isinstance(task, NotYet):
        await validator.clock.sleep(task.retry_after_s)
        return None
    if task.left_ms is not None:  # the deadline by our own clock, which may differ by more than a check takes
        task = task.model_copy(update={"deadline_ms": validator.clock.now_ms() + task.left_ms})
    is_here = task.bundle in validator.deadlines_ms
    validator.deadlines_ms[task.bundle] = task.deadline_ms
    validator.lost.discard(task.bundle)
    validator.checking.setdefault(
        task.bundle, begin_span("check", of_lease(task.lease.lease_id), step=task.lease.step, bundle=task.bundle[:12])
    )
    if is_here:  # otherwise a hanging answer would take another scoring worker each time
        log.warning("bundle %s: its deadline passed while it is here; it is judged once", task.bundle[:12])
        return None
    bundle: bytes | None = None
    try:
        bundle = await _persist(
            validator,
            lambda: validator.coordinator.bundle(BundleRequest(bundle=task.bundle)),
            what=f"bundle {task.bundle[:12]}",
        )
    finally:  # it may be cancelled
        if bundle is None:
            validator.drop(task.bundle)
    return None if bundle is None else (task, bundle)


async def _judge(
    validator: Validator, tasks: asyncio.Queue[tuple[CheckTask, bytes] | None], group: asyncio.TaskGroup
) -> None:
    waiting = asyncio.Semaphore(validator.config.scorers + validator.config.prefetch)

    async def finish(task: CheckTask, opened: OpenedBundle, proven: Judgement | None) -> None:
        if proven is None or not proven.verdict.accepted:
            if proven is not None:
                await _answer(validator, task, proven)
            validator.drop(task.bundle)
        elif proven.comparison is None:
            await waiting.acquire()
            group.create_task(_reward(validator, task, opened, proven, waiting))
        else:
            validator.comparisons.begin(proven.comparison)
            group.create_task(_compare(validator, task, opened, proven, waiting))

    # A comparison of rewards is planned by the number of bundles that can be here at once.
    most = 1 if validator.run.spec.checks.compares_rewards else validator.config.prefetch + 1
    while items := await take_waiting(tasks, most=most):
        audits = []
        for task, parcel in items:
            task = task.model_copy(update={"deadline_ms": validator.deadlines_ms[task.bundle]})
            if _drop_if_late(validator, task):
                continue
            opened = open_bundle(parcel, task.lease, validator.run, newest_policy=task.newest_policy)
            if isinstance(opened, Judgement):
                await _answer(validator, task, opened)
                validator.drop(task.bundle)
            elif not task.audit:
                await finish(task, opened, Judgement(Verdict.accept()))
            elif validator.config.unsafe_skip_proofs:
                await finish(task, opened, Judgement(Verdict.accept(), logprobs_T=opened.rollouts.logprobs_T))
            else:
                audits.append(BundleAudit(task, opened))
        for batch in batches(audits, tokens_max=validator.config.batch_tokens):
            in_time = [audit for audit in batch if not _drop_if_late(validator, audit.task)]
            for audit, proven in zip(in_time, await _proven_batch(validator, in_time), strict=True):
                await finish(audit.task, audit.bundle, proven)


def _drop_if_late(validator: Validator, task: CheckTask) -> bool:
    """Drop a bundle that is another validator's by now, and return whether it was."""
    if validator.clock.now_ms() <= task.deadline_ms and task.bundle not in validator.lost:
        return False
    log.warning("bundle %s: its time passed before it was judged; another validator gets it", task.bundle[:12])
    validator.drop(task.bundle)
    return True


async def _proven_batch(validator: Validator, batch: Sequence[BundleAudit]) -> Sequence[Judgement | None]:
    """Verify bundles of one batch together; one by one, as `_proven` does, if that fails. Raises EngineFault."""
    if len(batch) > 1:
        (version,) = policies_of(batch[0].bundle.rollouts)
        left_s = min(_seconds_left(validator, audit.task) for audit in batch)
        try:
            weights = await asyncio.wait_for(validator.policy(version), left_s)
            async with validator.held.turn({version: weights}) as scorer:
                return await prove_bundles([audit.bundle for audit in batch], scorer, run=validator.run)
        except (EngineMismatch, RemoteError, TimeoutError) as error:
            log.warning("%d bundles at once: %r; they are judged one by one", len(batch), error)
    return [await _proven(validator, audit.task, audit.bundle) for audit in batch]


async def _proven(validator: Validator, task: CheckTask, bundle: OpenedBundle) -> Judgement | None:
    """Verify one bundle with the right policy.

    Returns None if the policy does not arrive in time, or the scorer's processes end: another validator gets the bundle. Raises
    EngineFault if the scorer does not compute what a policy's weights imply: its verdicts would be worthless.
    """
    versions = policies_of(bundle.rollouts)
    policies: dict[int, Weights] = {}
    try:
        for version in versions:
            policies[version] = await asyncio.wait_for(validator.policy(version), _seconds_left(validator, task))
    except TimeoutError:
        log.warning("bundle %s: policy %d did not arrive in time", task.bundle[:12], version)
        return None
    except RemoteError as error:  # published broken: no validator can verify it
        return Judgement(Verdict.refuse(RejectReason.UNVERIFIABLE, error.detail))
    for attempt in range(1, LOADS_MAX + 1):
        try:
            async with validator.held.turn(policies) as scorer:
                # Planned before the bundle's own forward pass, whose duration depends on the length of its completions.
                comparison = await _planned(validator, task, bundle, scorer) if len(policies) == 1 else None
                of_spans = policies if len(policies) > 1 else None
                proven = await prove_bundle(bundle, scorer, run=validator.run, policies=of_spans)
            return replace(proven, comparison=comparison)
        except EngineDied as error:  # perhaps because of this bundle: another validator gets it, at most a few times
            log.error("bundle %s: %s; another validator gets it", task.bundle[:12], error)
            return None
        except EngineMismatch as error:
            log.error(
                "bundle %s, load %d of %d: %s; the bundle is not judged", task.bundle[:12], attempt, LOADS_MAX, error
            )
    raise EngineFault(
        f"{validator.scorer.info.calibration_class} computes policy {max(versions)} wrongly on this machine after {LOADS_MAX} "
        "loads, so it judges nothing; test the machine's memory, try another validator.dtype, and report this"
    )


async def _planned(
    validator: Validator, task: CheckTask, bundle: OpenedBundle, scorer: SamplingScorer
) -> ReferenceComparison | None:
    if not (bundle.is_unseeded and validator.run.spec.checks.compares_rewards):
        return None
    return await validator.comparisons.plan(
        task.bundle,
        bundle.lease,
        spec=validator.run.spec,
        engine=scorer,
        clock=validator.clock,
        deadline_ms=task.deadline_ms,
        turns_max=validator.config.prefetch + 2,  # the most bundles that can be here at once
    )


async def _compare(
    validator: Validator, task: CheckTask, bundle: OpenedBundle, proven: Judgement, waiting: asyncio.Semaphore
) -> None:
    """Sample the references of a proven bundle, in turns between forward passes; then score it like the others."""
    assert proven.comparison is not None
    (version,) = policies_of(bundle.rollouts)

    async def generate(requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        weights = await asyncio.wait_for(validator.policy(version), POLICY_S_MAX)  # held, unless long ago
        async with validator.held.turn({version: weights}) as scorer:
            return await scorer.generate(requests, sampling)

    try:
        found = await validator.comparisons.sample(proven.comparison, bundle.lease.sampling, generate)
    except (EngineMismatch, RemoteError, TimeoutError) as error:  # the next forward pass reports what is wrong
        log.error(
            "bundle %s: policy %d is not available (%r); another validator gets it", task.bundle[:12], version, error
        )
        validator.drop(task.bundle)
        return
    await waiting.acquire()
    await _reward(validator, task, bundle, replace(proven, references=found), waiting)


async def _reward(
    validator: Validator, task: CheckTask, bundle: OpenedBundle, proven: Judgement, waiting: asyncio.Semaphore
) -> None:
    """Finish a proven bundle's verdict, in parallel to the next one's forward pass, and release its place."""
    try:
        async with validator.scoring_workers.worker() as environments:
            judgement = await reward_bundle(
                bundle,
                run=validator.run,
                environments=environments,
                tokenizer=validator.tokenizer,
                proven=proven,
                is_wanted=lambda: not _is_given_away(validator, task.bundle),
            )
        await _answer(validator, task, judgement)
    except NotWanted:
        log.warning("bundle %s: its rewards took so long that it is no longer judged here", task.bundle[:12])
    finally:
        validator.drop(task.bundle)
        waiting.release()


def _is_given_away(validator: Validator, bundle: str) -> bool:
    """Return whether a bundle has been lost for so long that it will not be handed out here again meanwhile."""
    late_ms = validator.clock.now_ms() - validator.deadlines_ms[bundle]
    return bundle in validator.lost and late_ms > LATE_S_MAX * 1_000


def _seconds_left(validator: Validator, task: CheckTask) -> float:
    return (task.deadline_ms - validator.clock.now_ms()) / 1_000


async def _answer(validator: Validator, task: CheckTask, judgement: Judgement) -> None:
    validator.verdicts[judgement.verdict.reason or "accepted"] += 1
    if not judgement.verdict.accepted:
        verdict, named = judgement.verdict, f"{task.bundle[:12]} of {task.lease.worker}"
        measured = ", ".join(f"{name} {value:.3g}" for name, value in judgement.measured.items())
        log.info(
            "bundle %s rejected: %s: %s; %s", named, verdict.reason, verdict.detail, measured or "nothing measured"
        )
    _say(validator)
    logprobs = None
    if judgement.verdict.accepted and judgement.logprobs_T is not None and _is_trained_on(validator, task):
        put = functools.partial(validator.coordinator.put_logprobs, task.bundle, judgement.logprobs_T)
        logprobs = await _persist(validator, put, what=f"logprobs of {task.bundle[:12]}")
    result = CheckResultRequest(
        bundle=task.bundle,
        verdict=judgement.verdict,
        num_tokens=judgement.num_tokens,
        rewards=judgement.rewards,
        measured={
            name: value for name, value in judgement.measured.items() if math.isfinite(value)
        },  # JSON has no other values
        versions=judgement.versions,
        unscored=judgement.unscored,
        evidence=judgement.evidence,
        fingerprints=judgement.fingerprints,
        logprobs=logprobs,
    )
    send = functools.partial(validator.coordinator.check_result, result)
    outcome = str(judgement.verdict.reason or "accepted")
    with spanned("answer", of_lease(task.lease.lease_id), bundle=task.bundle[:12], outcome=outcome):
        await _persist(validator, send, what=f"verdict on {task.bundle[:12]}")


def _is_trained_on(validator: Validator, task: CheckTask) -> bool:
    """Return whether the trainer needs this validator's logprobs; never for an evaluation."""
    return validator.run.spec.checks.logprobs_judged and not task.lease.is_evaluation


def _say(validator: Validator) -> None:
    """Log the counts of verdicts, at most every SAY_S seconds."""
    now_s = validator.clock.monotonic_s()
    if now_s - validator.said_s >= SAY_S:
        validator.said_s = now_s
        log.info("bundles judged: %s", ", ".join(f"{n:,} {what}" for what, n in sorted(validator.verdicts.items())))


async def _persist(validator: Validator, call: Callable[[], Awaitable[T]], *, what: str) -> T | None:
    """Return the answer, however long it takes; None if the coordinator refuses."""
    try:
        return await ask_until_answered(call, what=what, clock=validator.clock)
    except RemoteError as error:
        log.warning("%s: refused: %s", what, error)
        await validator.clock.sleep(PAUSE_S_MIN)
        return None
