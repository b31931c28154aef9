"""Bundles of one policy that wait for the validator share a forward pass, and get the verdicts that they would get alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.node.table_engine import table_weights
from tests.node.validator_world import (
    OTHER_POLICY,
    MemoryCheckQueue,
    TableScorer,
    generate,
    make_bundle,
    make_lease,
    make_validator,
)

from prime_node.ports.engine import EngineDied, ScoreRequest
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.judge import OpenedBundle, open_bundle
from prime_node.validator.loop import run_validator
from prime_node.validator.validator import BundleAudit, batches
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.replies import CheckTask, NotYet
from prime_protocol.requests import CheckRequest
from prime_protocol.verdict import RejectReason
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

PER_BUNDLE = make_lease().num_rollouts


class CountingScorer(TableScorer):
    """Scorer that notes the number of bundles of each forward pass. `most`: with more, its processes end."""

    def __init__(self, most: int = 99) -> None:
        super().__init__()
        self.passes: list[int] = []
        self._most = most

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        self.passes.append(len(requests) // PER_BUNDLE)
        if self.passes[-1] > self._most:
            raise EngineDied("its processes ended")
        return await super().prefill(requests, sampling)


class WholeQueue(MemoryCheckQueue):
    """Queue that notes when the validator has all bundles."""

    def __init__(self, tasks: list[tuple[Lease, bytes]], stop: asyncio.Event) -> None:
        super().__init__(tasks, stop)
        self.fetched = asyncio.Event()

    async def check(self, request: CheckRequest) -> CheckTask | NotYet:
        if not self.tasks:
            self.fetched.set()
        return await super().check(request)


async def verdicts(scorer: TableScorer, policies: Sequence[int], *, forged: int, batch_tokens: int = 4096) -> list[str]:
    """Judge a bundle of each policy, where all but the first wait; return the verdicts in the order of the bundles."""
    stop = asyncio.Event()
    parcels = []
    for number, version in enumerate(policies):
        lease = make_lease(version)
        weights = OTHER_POLICY if number == forged else table_weights(version)
        parcels.append((lease, make_bundle(lease, await generate(lease, weights), created_at_ms=number)))
    queue = WholeQueue(parcels, stop)

    async def policy(version: int) -> Weights:
        await queue.fetched.wait()
        return table_weights(version)

    validator = make_validator(queue, scorer)
    validator.policy = policy
    validator.config = ValidatorConfig(prefetch=8, batch_tokens=batch_tokens)
    await run_validator(validator, stop)
    results = [queue.results[bundle] for bundle in queue.bundles]
    assert all(len(one.rewards) == PER_BUNDLE for one in results if one.verdict.accepted)
    return [one.verdict.reason or "accepted" for one in results]


async def test_bundles_that_wait_for_one_policy_share_a_forward_pass() -> None:
    scorer, alone = CountingScorer(), CountingScorer()
    found = await verdicts(scorer, [0, 0, 1, 0, 0], forged=3)
    assert scorer.passes == [1, 3, 1]
    assert scorer.loaded == [0, 1]
    assert found == await verdicts(alone, [0, 0, 1, 0, 0], forged=3, batch_tokens=1)
    assert alone.passes == [1] * 5
    assert [one == "accepted" for one in found] == [True, True, True, False, True]
    assert found[3] in {RejectReason.SEED_MISMATCH, RejectReason.LOGPROB_MISMATCH}


async def test_bundles_whose_shared_pass_fails_are_judged_one_by_one() -> None:
    scorer = CountingScorer(most=1)
    assert set(await verdicts(scorer, [0] * 4, forged=-1)) == {"accepted"}
    assert scorer.passes == [1, 3, 1, 1, 1]


async def make_audit(version: int, *, temperature: float = 1.0) -> BundleAudit:
    lease = make_lease(version)
    lease = lease.model_copy(update={"sampling": lease.sampling.model_copy(update={"temperature": temperature})})
    parcel = make_bundle(lease, await generate(lease, table_weights(version)))
    opened = open_bundle(parcel, lease, make_validator(MemoryCheckQueue([], asyncio.Event()), TableScorer()).run)
    assert isinstance(opened, OpenedBundle)
    return BundleAudit(CheckTask(bundle="0" * 64, lease=lease, deadline_ms=0), opened)


@pytest.mark.parametrize(("tokens_max", "sizes"), [(10**6, [3, 1, 1]), (1, [1, 1, 1, 1, 1])])
async def test_a_batch_has_one_policy_one_sampling_and_a_bounded_number_of_tokens(
    tokens_max: int, sizes: list[int]
) -> None:
    audits = [await make_audit(0), await make_audit(1), await make_audit(0, temperature=0.5)]
    audits += [await make_audit(0), await make_audit(0)]
    found = batches(audits, tokens_max=tokens_max)
    assert [len(batch) for batch in found] == sizes
    assert sorted(map(id, audits)) == sorted(id(audit) for batch in found for audit in batch)
