"""Shared parts of the validator's tests: a scorer and an environment over the table model, leases, bundles and a validator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from tests.builder import build_header, build_lease
from tests.node.table_engine import STOP_TOKEN, VOCAB_SIZE, TableEngine, logits_of, table_weights
from tests.node.worker_world import WORKER, MemorySource, make_run
from tests.time_world import VirtualClock

from prime_node.ports.engine import GenerateRequest, Scorer, ScoreRequest, Spans
from prime_node.ports.environment import Environment, HeldOutProblem, Tokenizer
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.judge import Judgement, OpenedBundle, prove_bundle, reward_bundle
from prime_node.validator.scoring_workers import ScoringWorkers
from prime_node.validator.validator import Validator
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.noise import gumbel_noise
from prime_protocol.parcel import pack_parcel
from prime_protocol.replies import CheckTask, HoldingReply, NotYet
from prime_protocol.requests import BundleRequest, CheckRequest, CheckResultRequest, HoldingRequest
from prime_protocol.rollout import Rollouts, pack_body, rollouts_for
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

RUN = make_run(rollouts_per_group=16)
POLICY, OTHER_POLICY = table_weights(0), table_weights(1)


class TableScorer(TableEngine):
    """Implements ports.engine.SamplingScorer for the table model."""

    def __init__(self) -> None:
        super().__init__()
        self._logits = logits_of(table_weights(99))

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        whole = [((0, len(request.completion_token_ids)),) for request in requests]
        return self._prefill(requests, whole, sampling, {0: self._logits})

    async def prefill_mixed(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        policies: Mapping[int, Weights],
    ) -> Prefill:
        """The table keeps no keys and values: each token is its own policy's."""
        tables = {version: logits_of(weights) for version, weights in policies.items()}
        await self.load(policies[max(policies)], policy_version=max(policies))
        return self._prefill(requests, spans, sampling, tables)

    def _prefill(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        tables: Mapping[int, npt.NDArray[np.float32]],
    ) -> Prefill:
        logprobs, margins, means, variances = [], [], [], []
        for request, of_request in zip(requests, spans, strict=True):
            last = request.prompt_token_ids[-1]
            versions = [version for version, count in of_request for _ in range(count)]
            for position, token in enumerate(request.completion_token_ids):
                logits = tables[versions[position]][last] / sampling.temperature
                nats = logits - np.log(np.exp(logits).sum())
                noise = 0 if request.seed is None else gumbel_noise([request.seed], [position], VOCAB_SIZE)[0]
                logprobs.append(nats[token])
                margins.append(0.0 if request.seed is None else (logits + noise).max() - (logits + noise)[token])
                means.append(float((np.exp(nats) * nats).sum()))
                variances.append(float((np.exp(nats) * nats**2).sum()) - means[-1] ** 2)
                last = token
        found = Prefill(np.array(logprobs, np.float32), np.array(margins, np.float32))
        if requests[0].seed is not None:
            return found
        return replace(found, expected_T=np.array(means, np.float32), variance_T=np.array(variances, np.float32))


class LengthEnvironment:
    """Implements ports.environment.Environment: longer answers are better."""

    def prompt(self, index: int) -> str:
        return chr(ord("a") + index)

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        return min(1.0, len(completion) / 8)

    def answer(self, index: int) -> str:
        return "x"

    def held_out(self, count: int) -> list[HeldOutProblem]:
        return []


class LeasedPrompts(LengthEnvironment):
    """The same environment for a lease with prompts of its own."""

    def __init__(self, lease: Lease) -> None:
        self._prompts = {group.problem.index: group.prompt_token_ids for group in lease.groups}

    def prompt(self, index: int) -> str:
        return "".join(chr(ord("a") + token) for token in self._prompts[index])


class LetterTokenizer:
    """Implements ports.environment.Tokenizer: one letter a token."""

    vocab_size = VOCAB_SIZE
    stop_token_id = STOP_TOKEN

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids if token != STOP_TOKEN)


def make_lease(policy_version: int = 0) -> Lease:
    groups = tuple(
        GroupAssignment(
            slot=slot,
            problem=Problem(environment="toy", index=slot),
            prompt_token_ids=(slot,),
            seeds=tuple(range(100 * slot, 100 * slot + 16)),
        )
        for slot in range(2)
    )
    return build_lease(
        RUN,
        WORKER,
        groups,
        step=policy_version,
        policy_version=policy_version,
        policy_digest=digest_of(b"manifest"),
    )


async def generate(lease: Lease, weights: Weights = POLICY, *, sampling: Sampling | None = None) -> Rollouts:
    engine = TableEngine()
    await engine.load(weights, policy_version=lease.policy_version)
    requests = [GenerateRequest(group.prompt_token_ids, seed) for group in lease.groups for seed in group.seeds]
    return rollouts_for(lease, await engine.generate(requests, sampling or lease.sampling))


def make_bundle(lease: Lease, rollouts: Rollouts, *, key: SigningKey = WORKER, **changes: object) -> bytes:
    body, decompressed_bytes = pack_body(rollouts)
    fields = {"worker": key.key_id, "num_rollouts": len(rollouts), "engine": TableEngine().info} | changes
    return pack_parcel(build_header(lease, body, decompressed_bytes, **fields), body, PayloadType.ROLLOUT, key)


class MemoryCheckQueue(MemorySource):
    """Implements ports.transport.ValidatorPort over a list of tasks."""

    def __init__(self, tasks: list[tuple[Lease, bytes]], stop: asyncio.Event) -> None:
        super().__init__(RUN)
        self.bundles = {digest_of(parcel): parcel for _, parcel in tasks}
        self.results: dict[str, CheckResultRequest] = {}
        self.failures: list[Exception] = []
        self.named: list[tuple[str, ...]] = []
        """Bundles that each HoldingRequest named."""
        self.lost: set[str] = set()
        """Bundles that another validator has."""
        self.handed: dict[str, Lease] = {}
        """Bundles that were given to this validator."""
        self.deadline_ms = 10**12
        self.left_ms: int | None = None
        self.tasks = [(lease, digest_of(parcel)) for lease, parcel in tasks]
        self.on_result: Callable[[CheckResultRequest], None] = lambda _: None
        self._stop = stop

    async def check(self, request: CheckRequest) -> CheckTask | NotYet:
        self._fail()
        if not self.tasks:
            if len(self.results) == len(self.bundles) or self.deadline_ms == 0:
                self._stop.set()
            return NotYet(reason="nothing to check", retry_after_s=0.1)
        lease, bundle = self.tasks.pop(0)
        self.handed[bundle] = lease
        left_ms = self.left_ms if request.asks_left else None
        return CheckTask(bundle=bundle, lease=lease, deadline_ms=self.deadline_ms, left_ms=left_ms)

    async def holding(self, request: HoldingRequest) -> HoldingReply:
        self.named.append(request.bundles)
        return HoldingReply(lost=tuple(one for one in request.bundles if not self._is_held(one)))

    async def bundle(self, request: BundleRequest) -> bytes:
        self._fail()
        if request.bundle not in self.bundles:
            raise RemoteError(ErrorCode.NOT_FOUND, "no such bundle; it may have been deleted")
        return self.bundles[request.bundle]

    async def put_logprobs(self, bundle: str, logprobs_T: npt.NDArray[np.float32]) -> str:
        self._require_held(bundle)
        raise AssertionError("this run's trainer uses the claimed logprobs")

    async def check_result(self, request: CheckResultRequest) -> None:
        self._fail()
        reason = request.verdict.reason
        if reason is not None and not reason.is_for_validators:
            raise RemoteError(ErrorCode.WRONG_TYPE, "only the coordinator can find it")
        if request.bundle in self.results:
            return
        self._require_held(request.bundle)
        if len(request.rewards) != (self.handed[request.bundle].num_rollouts if reason is None else 0):
            raise RemoteError(ErrorCode.WRONG_TYPE, "another number of rewards")
        self.results[request.bundle] = request
        self.on_result(request)

    def _is_held(self, bundle: str) -> bool:
        return bundle in self.handed and bundle not in self.results and bundle not in self.lost

    def _require_held(self, bundle: str) -> None:
        if not self._is_held(bundle):
            raise RemoteError(ErrorCode.NOT_FOUND, "the bundle is not assigned to this validator")

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


def make_validator(
    queue: MemoryCheckQueue, scorer: TableScorer, environment: Callable[[], Environment] = LengthEnvironment
) -> Validator:
    async def policy(version: int) -> Weights:
        return table_weights(version)

    return Validator(
        run=RUN,
        config=ValidatorConfig(),
        coordinator=queue,
        scorer=scorer,
        scoring_workers=ScoringWorkers(lambda: {"toy": environment()}, workers_max=2),
        tokenizer=LetterTokenizer(),
        policy=policy,
        policy_versions=lambda: (),
        clock=VirtualClock(),
    )


async def judge_bundle(
    bundle: OpenedBundle,
    scorer: Scorer,
    *,
    run: PinnedRun,
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    policies: Mapping[int, Weights] | None = None,
) -> Judgement:
    """Run checks (4) to (7), as run_validator does in several tasks.

    `scorer` holds the policy that sampled the bundle. `policies` holds the policies that did, if there are several.
    """
    proven = await prove_bundle(bundle, scorer, run=run, policies=policies)
    if not proven.verdict.accepted:
        return proven
    return await reward_bundle(bundle, run=run, environments=environments, tokenizer=tokenizer, proven=proven)
