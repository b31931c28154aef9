"""A program that runs vLLM's V2 model runner on a CPU, with its kernels and ours in Triton's interpreter.

vLLM offers V2 on a CPU to builds of Triton that have a CPU backend. Here an entry takes the place of that backend, and the
interpreter runs the kernels: slow, but each line of them. It prints one JSON object; test_vllm_v2.py reads it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def interpret_triton() -> None:
    """Make vLLM believe that Triton compiles for this CPU. Call it before vLLM is imported."""
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }  # the engine's process inherits this
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False), compiler=None)


async def measure(folder: Path) -> dict[str, Any]:
    """Sample with V2 under several samplings and a swap, and judge with a forward pass."""
    from tests.conformance.engine_world import (
        SAMPLING,
        distances,
        judged,
        logprobs_of,
        peaked_weights,
        requests,
        to_score,
    )

    from prime_node.adapters.engines.transformers_engine import TransformersEngine
    from prime_node.adapters.engines.vllm_engine import VllmEngine
    from prime_node.validator.spans import prefill_spans
    from prime_protocol.schedule import SwapPolicy

    policies = [peaked_weights(folder, seed) for seed in (1, 2)]
    engine, scorer = VllmEngine(folder, context_tokens_max=128, model_runner="v2"), TransformersEngine(folder)
    found: dict[str, Any] = {}
    asked = [replace(request, proofs=True) for request in requests(6)]
    await engine.load(policies[0], policy_version=0)
    for name, sampling in {
        "plain": SAMPLING.model_copy(update={"stop_token_ids": (256,), "completion_tokens_max": 34}),
        "filters": SAMPLING.model_copy(update={"temperature": 0.7, "top_p": 0.9, "top_k": 20}),
    }.items():
        completions = await engine.generate(asked, sampling)
        prefill = await judged(scorer, policies[0], asked, completions, sampling)
        print(f"{name} is sampled", file=sys.stderr, flush=True)
        found[name] = {
            "tokens": len(prefill.logprobs_T),
            "flips": int((prefill.margins_T > 0).sum()),
            "logprob_error": float(np.abs(prefill.logprobs_T - logprobs_of(completions)).max()),
            "proof_distance": float(distances(prefill, completions).max()),
        }
    own = {"temperature": 0.7, "stop_token_ids": (256,), "completion_tokens_max": 24}
    sampling = SAMPLING.model_copy(update=own)
    under_way = asyncio.create_task(engine.generate(asked, sampling))
    await asyncio.sleep(1.0)
    await engine.update(policies[1], policy_version=1, swap=SwapPolicy.KEEP_KV)
    completions = await under_way
    spans = [each.spans or ((1, len(each.token_ids)),) for each in completions]
    named, scored = dict(enumerate(policies)), to_score(asked, completions)
    mixed = await prefill_spans(scorer, scored, spans, sampling, named, swap=SwapPolicy.KEEP_KV)
    found["swap"] = {
        "cut": sum(len(each) == 2 for each in spans),
        "tokens": len(mixed.logprobs_T),
        "flips": int((mixed.margins_T > 0).sum()),
        "logprob_error": float(np.abs(mixed.logprobs_T - logprobs_of(completions)).max()),
        "proof_distance": float(distances(mixed, completions).max()),
    }
    await engine.close()
    await scorer.close()
    return found


if __name__ in ("__main__", "__mp_main__"):  # the engine's process imports this module by the second name
    interpret_triton()
if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(Path(sys.argv[1])))))
