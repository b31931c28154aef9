"""vLLM on two ranks, which divide the layers and the vocabulary: on a CPU two processes with shared memory between them.

Together they choose the tokens, claim the logprobs and commit to the hidden states of one rank, but for the order of fp32 sums.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from tests.conformance.engine_world import (
    FLIPS_SHARE_MAX,
    LOGPROB_ERROR_MAX,
    PROOF_ERROR_MAX,
    SAMPLING,
    Engine,
    deaf_vllm,
    distances,
    judged,
    logprobs_of,
    requests,
)

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_protocol.weights import Weights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    # They occur when vLLM is imported and when its engine starts; we can fix neither.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(folder: Path) -> AsyncIterator[Engine]:
    made = deaf_vllm(folder, tensor_parallel=2)
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(folder: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folder)
    yield made
    await made.close()


async def test_two_ranks_sample_and_prove_what_one_rank_does(
    ranks: Engine, scorer: TransformersEngine, folder: Path, policies: list[Weights]
) -> None:
    asked = [replace(request, proofs=True) for request in requests()]
    one_rank = deaf_vllm(folder)
    for version, weights in enumerate(policies):
        await ranks.load(weights, policy_version=version)
        await one_rank.load(weights, policy_version=version)
        two, one = [await engine.generate(asked, SAMPLING) for engine in (ranks, one_rank)]
        pairs = [pair for pair in zip(two, one, strict=True) if pair[0].token_ids == pair[1].token_ids]
        assert len(pairs) >= (1 - FLIPS_SHARE_MAX * SAMPLING.completion_tokens_max) * len(asked)
        mine, theirs = ([nats for each in side for nats in each.logprobs] for side in zip(*pairs, strict=True))
        assert np.abs(np.subtract(mine, theirs)).max() <= LOGPROB_ERROR_MAX
        found = await judged(scorer, weights, asked, two)
        assert (found.margins_T > 0).mean() <= FLIPS_SHARE_MAX
        assert np.abs(found.logprobs_T - logprobs_of(two)).max() <= LOGPROB_ERROR_MAX
        assert distances(found, two).max() < PROOF_ERROR_MAX
    await one_rank.close()
