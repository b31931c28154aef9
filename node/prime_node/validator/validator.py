"""The state of a validator's loop (loop.py): its scorer with the current policy, and the batches of bundles that wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from prime_node.ports.clock import Clock
from prime_node.ports.engine import EngineMismatch, SamplingScorer
from prime_node.ports.environment import Tokenizer
from prime_node.ports.traces import OpenSpan
from prime_node.ports.transport import ValidatorPort
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.judge import OpenedBundle
from prime_node.validator.references import Comparisons
from prime_node.validator.scoring_workers import ScoringWorkers
from prime_node.validator.spans import policies_of
from prime_protocol.assignment import Sampling
from prime_protocol.replies import CheckTask
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights

T = TypeVar("T")


class BundleAudit(NamedTuple):
    """A bundle to verify by a forward pass."""

    task: CheckTask
    bundle: OpenedBundle


class BatchKey(NamedTuple):
    """What bundles of one call have in common."""

    policies: tuple[int, ...]
    """Policies that sampled them. A bundle of several policies is verified alone."""
    sampling: Sampling
    is_unseeded: bool
    has_proofs: bool


def batches(audits: Iterable[BundleAudit], *, tokens_max: int) -> list[list[BundleAudit]]:
    """Divide bundles into batches of one key and at most `tokens_max` completion tokens. A larger bundle is alone."""
    found: list[list[BundleAudit]] = []
    open_batches: dict[BatchKey, list[BundleAudit]] = {}
    for audit in audits:
        key = _key(audit.bundle)
        batch = open_batches.get(key)
        num_tokens = sum(one.bundle.rollouts.num_tokens for one in [*(batch or ()), audit])
        if batch is None or num_tokens > tokens_max or len(key.policies) > 1:
            batch = open_batches[key] = []
            found.append(batch)
        batch.append(audit)
    return found


async def take_waiting(queue: asyncio.Queue[T | None], *, most: int) -> list[T]:
    """Remove and return what waits in a queue, 1 to `most` items. None is the end: the list is empty then."""
    found: list[T] = []
    while not found or (len(found) < most and not queue.empty()):
        item = await queue.get()
        if item is None:
            if found:
                queue.put_nowait(None)  # for the next call
            break
        found.append(item)
    return found


def _key(bundle: OpenedBundle) -> BatchKey:
    policies = tuple(policies_of(bundle.rollouts))
    return BatchKey(policies, bundle.lease.sampling, bundle.is_unseeded, bundle.rollouts.proofs_CB is not None)


class HeldScorer:
    """A scorer that loads a policy only if it differs from the current one, for one pass or piece of references at a time.

    Concurrency: callers get the scorer in the order of their requests. While they hold it, they wait for nothing else.
    """

    def __init__(self, scorer: SamplingScorer) -> None:
        self.version = -1
        """Policy that it holds; -1 if it must be loaded again."""
        self._scorer = scorer
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, policies: Mapping[int, Weights]) -> AsyncIterator[SamplingScorer]:
        """Hold the scorer exclusively, with the policy loaded.

        With several policies none is preloaded: each forwards its own part later. Raises EngineMismatch.
        """
        async with self._turn:
            try:
                await self._hold(policies)
                yield self._scorer
            except EngineMismatch:
                self.version = -1
                raise

    async def _hold(self, policies: Mapping[int, Weights]) -> None:
        if len(policies) == 1 and self.version in policies:
            return
        self.version = -1
        if len(policies) == 1:
            ((version, weights),) = policies.items()
            await self._scorer.load(weights, policy_version=version)
            self.version = version


@dataclass
class Validator:
    """State of the loop. `policy` returns the verified weights of a version, waiting for them if necessary."""

    run: PinnedRun
    config: ValidatorConfig
    coordinator: ValidatorPort
    scorer: SamplingScorer
    scoring_workers: ScoringWorkers
    tokenizer: Tokenizer
    policy: Callable[[int], Awaitable[Weights]]
    policy_versions: Callable[[], tuple[int, ...]]
    clock: Clock
    verdicts: Counter[str] = field(default_factory=Counter)
    """Number of bundles accepted, and rejected by reason."""
    comparisons: Comparisons = field(default_factory=Comparisons)
    """Comparisons of unseeded bundles' rewards with references sampled here."""
    deadlines_ms: dict[str, int] = field(default_factory=dict)
    """Bundles in progress, from the task to the answer -> the deadline, by our own clock."""
    lost: set[str] = field(default_factory=set)
    """Those of them that another validator has, or that have a verdict."""
    checking: dict[str, OpenSpan] = field(default_factory=dict)
    """Their spans, for traces."""
    said_s: float = -math.inf
    """Time of the last log line."""
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    """Random id of this process."""

    def __post_init__(self) -> None:
        self.held = HeldScorer(self.scorer)

    def drop(self, bundle: str) -> None:
        """Record that a bundle is no longer here."""
        self.deadlines_ms.pop(bundle, None)
        if (checking := self.checking.pop(bundle, None)) is not None:
            checking.end()
        self.lost.discard(bundle)
