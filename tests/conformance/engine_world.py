"""Shared parts of the engine tests: a small model with peaked policies, engines that can ignore weights, and a judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.ports.engine import GenerateRequest, ScoreRequest
from prime_protocol.assignment import Sampling
from prime_protocol.proof import PROOF_BYTES, compare_proofs
from prime_protocol.rollout import Completion
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights, WeightTensor

if TYPE_CHECKING:
    from prime_node.adapters.engines.vllm_engine import VllmEngine

FLIPS_SHARE_MAX = 0.005
"""Share of honest tokens that two engines may choose differently, both with fp32 arithmetic."""
LOGPROB_ERROR_MAX = 1e-3
"""Nats, for any single token, both with fp32 arithmetic."""
PROOF_ERROR_MAX = 0.5
"""Steps of bf16, for any single proof, both with fp32 arithmetic."""
STOP = 256
CONTEXT = 2_048
"""Tokens of a vLLM engine's context."""
SAMPLING = Sampling(temperature=1.0, completion_tokens_max=12, stop_token_ids=(STOP, *range(40)))


def peaked_weights(folder: Path, seed: int) -> Weights:
    """Return random weights under which a model is sure of some tokens and uses its context, like a trained one."""
    factors = {"lm_head.weight": 12.0, "model.embed_tokens.weight": 8.0}
    return {
        name: tensor if "norm" in name else scaled(tensor, factors.get(name, 4.0))
        for name, tensor in initial_weights(folder, seed).items()
    }


def scaled(tensor: WeightTensor, factor: float) -> WeightTensor:
    values = (tensor.data.astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
    return WeightTensor("bf16", tensor.shape, (values.view(np.uint32) >> 16).astype(np.uint16))


class DeafTransformers(TransformersEngine):
    """Engine that can ignore new weights, as engines have silently done."""

    deaf = False

    def copy_weights(self, weights: Weights) -> None:
        if not self.deaf:
            super().copy_weights(weights)


def deaf_vllm(folder: Path, context_tokens_max: int = CONTEXT, *, tensor_parallel: int = 1) -> VllmEngine:
    from prime_node.adapters.engines.vllm_engine import VllmEngine

    class DeafVllm(VllmEngine):
        deaf = False

        async def replace_weights(self, weights: Weights) -> None:
            if not self.deaf:
                await super().replace_weights(weights)

        async def lengths(self) -> list[int]:
            """Return the number of tokens sampled so far for each completion that vLLM works on or has just aborted."""
            found, *_ = await self._llm.collective_rpc("prime_lengths")
            return [*found.values()]

    return DeafVllm(folder, context_tokens_max=context_tokens_max, tensor_parallel=tensor_parallel)


Engine = DeafTransformers  # type for the tests: the port, and the switch


def write_model(folder: Path) -> Path:
    return write_tiny_model(folder, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128)


def requests(count: int = 96, *, first_seed: int = 1_000) -> list[GenerateRequest]:
    """Return requests in groups of eight; prompts have a common prefix and differ in length."""
    prompts = [tuple(range(60, 80)) + tuple(range(100 + group, 100 + 2 * group + 1)) for group in range(12)]
    return [GenerateRequest(prompts[n // 8 % 12], seed=first_seed + n) for n in range(count)]


async def judged(
    scorer: TransformersEngine,
    weights: Weights,
    asked: Sequence[GenerateRequest],
    completions: Sequence[Completion],
    sampling: Sampling = SAMPLING,
) -> Prefill:
    await scorer.load(weights, policy_version=0)
    return await scorer.prefill(to_score(asked, completions), sampling)


def to_score(asked: Sequence[GenerateRequest], completions: Sequence[Completion]) -> list[ScoreRequest]:
    return [
        ScoreRequest(request.prompt_token_ids, completion.token_ids, request.seed, hidden=request.proofs)
        for request, completion in zip(asked, completions, strict=True)
    ]


def logprobs_of(completions: Sequence[Completion]) -> list[float]:
    return [nats for completion in completions for nats in completion.logprobs]


def distances(found: Prefill, completions: Sequence[Completion]) -> np.ndarray:
    """Return the distances of each completion's proofs from the scorer's hidden states."""
    assert found.hidden_TD is not None
    proofs = np.frombuffer(b"".join(completion.proofs for completion in completions), np.uint8).reshape(-1, PROOF_BYTES)
    return compare_proofs(proofs, found.hidden_TD, [len(c.token_ids) for c in completions]).distance_mean_C


def descendants(pid: int) -> list[int]:
    """Return the process ids of a process's children, of theirs, and so on."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(other for child in children for other in descendants(child))]
