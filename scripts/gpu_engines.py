"""The steps of gpu_check.py for engines: the validator's, and vLLM's two model runners."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from gpu_step import Skipped, Step, model_folder, need


def validator(step: Step) -> None:
    """Score completions in bf16 on the device, and compare a few with the CPU in fp32."""
    need("transformers", "prime_node.adapters.engines.transformers_engine")
    import asyncio

    import numpy as np

    from prime_node.adapters.engines.transformers_engine import TransformersEngine
    from prime_node.adapters.models.tiny_model import initial_weights
    from prime_node.ports.engine import ScoreRequest
    from prime_protocol.assignment import Sampling

    vocab_size, length, count = (264, 16, 8) if step.dry else (151_936, 1_024, 256)
    random = np.random.default_rng(0)
    asked = [
        ScoreRequest((1, 2, 3), tuple(random.integers(0, vocab_size, length).tolist()), seed=n) for n in range(count)
    ]
    sampling = Sampling(temperature=1.0, completion_tokens_max=length, stop_token_ids=(0,))

    async def compare() -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = model_folder(step, Path(folder))
            engines = [TransformersEngine(model, dtype="bf16", device=step.device), TransformersEngine(model)]
            weights = initial_weights(model, 0)
        for engine in engines:
            await engine.load(weights, policy_version=0)
        few = asked[: 4 if step.dry else 2]
        device, exact = [await engine.prefill(few, sampling) for engine in engines]
        step.values["logprob_error_mean"] = float(np.abs(device.logprobs_T - exact.logprobs_T).mean())
        step.at_most("logprob_error_max", float(np.abs(device.logprobs_T - exact.logprobs_T).max()), 0.25)
        step.values["margin_error_mean"] = float(np.abs(device.margins_T - exact.margins_T).mean())
        await engines[0].prefill(few, sampling)
        started = time.perf_counter()
        await engines[0].prefill(asked, sampling)
        rate = count * length / (time.perf_counter() - started)
        if not step.dry:
            step.at_least("tokens_per_second", rate, 20_000)
        for engine in engines:
            await engine.close()

    asyncio.run(compare())


def vllm_v1(step: Step) -> None:
    """Sample with vLLM's model runner V1."""
    _sample(step, "v1")


def vllm_v2(step: Step) -> None:
    """Sample with vLLM's model runner V2."""
    _sample(step, "v2")


def _sample(step: Step, runner: str) -> None:
    """Sample with proofs, and compare tokens and logprobs with a forward pass."""
    if step.dry and runner == "v2":
        raise Skipped("needs a GPU; tests/conformance/test_vllm_v2.py runs V2 on a CPU")
    need("transformers", "prime_node.adapters.engines.vllm_engine")
    import asyncio

    import numpy as np

    from prime_node.adapters.engines.transformers_engine import TransformersEngine
    from prime_node.adapters.engines.vllm_engine import VllmEngine
    from prime_node.adapters.models.tiny_model import initial_weights
    from prime_node.ports.engine import GenerateRequest, ScoreRequest
    from prime_protocol.assignment import Sampling

    count, length = (8, 16) if step.dry else (256, 128)
    asked = [GenerateRequest(tuple(range(n + 1, n + 21)), seed=n, proofs=True) for n in range(count)]
    sampling = Sampling(temperature=1.0, completion_tokens_max=length, stop_token_ids=(0,))

    async def compare() -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = model_folder(step, Path(folder))
            weights = initial_weights(model, 0)
            engine = VllmEngine(model, context_tokens_max=256, model_runner=runner, dtype="bf16")
            started = time.perf_counter()
            await engine.load(weights, policy_version=0)
            step.values["start_seconds"] = time.perf_counter() - started
            await engine.generate(asked, sampling)
            started = time.perf_counter()
            completions = await engine.generate(asked, sampling)
            tokens = sum(len(one.token_ids) for one in completions)
            if not step.dry:
                step.values["tokens_per_second"] = tokens / (time.perf_counter() - started)
            await engine.close()
            scorer = TransformersEngine(model, dtype="bf16", device=step.device)
            await scorer.load(weights, policy_version=0)
            done = zip(asked, completions, strict=True)
            to_score = [ScoreRequest(a.prompt_token_ids, one.token_ids, a.seed, hidden=True) for a, one in done]
            found = await scorer.prefill(to_score, sampling)
            claimed = np.array([nats for one in completions for nats in one.logprobs])
            step.at_most("logprob_error_mean", float(np.abs(found.logprobs_T - claimed).mean()), 0.02)
            step.at_most("flips", float((found.margins_T > 0).mean()), 0.02)
            await scorer.close()

    asyncio.run(compare())
