"""The probe of a vLLM engine: a few tokens that it samples after each load, and their distance from a plain forward pass.

Letters: T tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from prime_node.adapters.engines.token_scores import reference_scores
from prime_node.adapters.models.causal_model import CausalModel
from prime_node.ports.engine import GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.calibration import evidence_of, shown_alone
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.rollout import Completion, EngineInfo
from prime_protocol.verify import normed
from prime_protocol.weights import Weights

PROBE_ERROR_MEAN_MAX = {"fp32": 2e-3, "bf16": 0.25, "bf16-fp32head": 0.25}
"""Limit on the probe's mean error in nats. Honest bf16 is 0.003 for a small model, 0.06 for one of 135 M parameters; other
weights are nats away."""
PROBE_JUDGE = "transformers/fp32/cpu"
"""Engine class of the forward pass."""
PROBE_PROMPTS, PROBE_TOKENS = 8, 8
"""Size of the probe: for batches below five vLLM uses other kernels than for those of workers."""
COMPARED_LATER = 2
"""Completions of the probe that are compared after a swap, others at each. Those of the first load are all compared. The forward
pass takes seconds of a processor, and a swap that fails shows in any of them."""
PROBE_TOKENS_SAMPLING = Sampling(completion_tokens_max=PROBE_TOKENS, stop_token_ids=())

Errors = npt.NDArray[np.float32]


def prompts_of_probe(vocab_size: int) -> list[GenerateRequest]:
    """Return fixed prompts of different lengths, with fixed seeds."""
    ids = [(7 * i * i + 13 * i + 5) % vocab_size for i in range(64)]
    return [GenerateRequest(tuple(ids[: 8 + 5 * n]), seed=n) for n in range(PROBE_PROMPTS)]


def compared_after(loads: int) -> slice:
    """Return which completions of the probe are compared with a forward pass after `loads` earlier loads."""
    first = (loads - 1) * COMPARED_LATER % PROBE_PROMPTS
    return slice(first, first + COMPARED_LATER) if loads else slice(None)


@torch.inference_mode()
def errors_of_probe(
    model: CausalModel, weights: Weights, requests: Sequence[GenerateRequest], found: Sequence[Completion]
) -> tuple[Errors, Errors]:
    """Return |error| [T] in nats of the logprobs against a plain forward pass of the weights, and the same over its spread."""
    pairs = [
        (request.prompt_token_ids, completion.token_ids) for request, completion in zip(requests, found, strict=True)
    ]
    expected_T, spread_T = reference_scores(model, weights, pairs)
    claimed_T = np.array([nats for completion in found for nats in completion.logprobs], np.float32)
    errors_T = np.abs(expected_T.numpy() - claimed_T)
    return errors_T, normed(errors_T, spread_T.numpy())


def is_honest_noise(errors_T: Errors, normed_T: Errors, engine: EngineInfo, checks: CheckPolicy | None) -> bool:
    """Return whether an engine that computes the right policy may have such errors.

    The mean is bounded. If the run's calibration knows the engine, the errors must be no more than it expects: they are
    judged as a bundle is.
    """
    if not float(errors_T.mean()) <= PROBE_ERROR_MEAN_MAX[engine.dtype]:  # also for NaN
        return False
    if checks is None or checks.calibration is None:
        return True
    values = {"logprob": errors_T, "norm": normed_T, "square": np.square(normed_T)}
    evidence = evidence_of(values, checks.calibration, worker=engine.calibration_class, validator=PROBE_JUDGE)
    return shown_alone(evidence, evidence_max=checks.evidence_max) is None
