"""Faults that only vLLM can have: tied heads, unseeded sampling, processes that outlive their owner. Each test starts its own."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.conformance.engine_world import (
    FLIPS_SHARE_MAX,
    LOGPROB_ERROR_MAX,
    PROOF_ERROR_MAX,
    SAMPLING,
    deaf_vllm,
    descendants,
    distances,
    judged,
    logprobs_of,
    peaked_weights,
    requests,
    to_score,
)
from tests.node.windowed_world import model_of_run, plain_logprobs, save_pretrained

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.ports.engine import GenerateRequest
from prime_protocol.assignment import Sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # They occur when vLLM is imported and when its engine starts; we can fix neither.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.vllm
async def test_a_call_ends_with_the_error_of_what_watches_its_engine() -> None:
    from prime_node.adapters.engines.engine_watch import EngineWatch

    def is_dead() -> bool:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(20.0):
            await EngineWatch(is_dead).call(asyncio.Event().wait())


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_vllm_swaps_a_model_with_a_tied_head_and_shared_keys(folder: Path, tmp_path: Path) -> None:
    # As in Qwen3-0.6B. Upstream silently leaves a tied head on the old weights on a CPU.
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"tie_word_embeddings": True, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    both = [peaked_weights(tmp_path, seed) for seed in (3, 4)]
    assert "lm_head.weight" not in both[0]
    engine, scorer = deaf_vllm(tmp_path), TransformersEngine(tmp_path)
    for version, weights in enumerate(both):
        await engine.load(weights, policy_version=version)
        completions = await engine.generate(requests(), SAMPLING)
        prefill = await judged(scorer, weights, requests(), completions)
        assert (prefill.margins_T > 0).mean() <= FLIPS_SHARE_MAX
        assert np.abs(prefill.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX
    await engine.close()
    await scorer.close()


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_vllm_computes_a_model_with_sliding_windows_as_the_validator_does(tmp_path: Path) -> None:
    # As in Gemma 3. vLLM's attention on a CPU has no heads of 16, and it probes with longer sequences than transformers.
    window, prompt = 96, (5, 77, 130, 9)
    pretrained = save_pretrained(tmp_path / "pretrained", sliding_window=window, head_dim=32, query_pre_attn_scalar=32)
    made = model_of_run(pretrained, tmp_path / "model")
    engine, scorer, weights = deaf_vllm(made, context_tokens_max=window), TransformersEngine(made), folder_weights(made)
    await engine.load(weights, policy_version=0)
    sampling = Sampling(completion_tokens_max=window - len(prompt), stop_token_ids=(263,))
    asked = [GenerateRequest(prompt, seed=seed) for seed in range(8)]
    completions = await engine.generate(asked, sampling)
    prefill = await judged(scorer, weights, asked, completions, sampling)
    assert max(len(one.token_ids) for one in completions) == window - len(prompt), "up to the end of the window"
    assert (prefill.margins_T > 0).mean() <= FLIPS_SHARE_MAX
    assert np.abs(prefill.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX
    of_first = plain_logprobs(pretrained, (*prompt, *completions[0].token_ids), len(prompt))
    assert list(completions[0].logprobs) == pytest.approx(of_first, abs=LOGPROB_ERROR_MAX)
    await engine.close()
    await scorer.close()


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_an_unseeded_vllm_samples_by_itself_at_the_runs_temperature_and_with_its_filters(
    folder: Path,
) -> None:
    from prime_node.adapters.engines.vllm_engine import VllmEngine

    policy, scorer = peaked_weights(folder, 1), TransformersEngine(folder)
    engine = VllmEngine(folder, context_tokens_max=128, seeded=False)
    assert not engine.info.seeded
    await engine.load(policy, policy_version=0)
    await scorer.load(policy, policy_version=0)
    for sampling in (SAMPLING, SAMPLING.model_copy(update={"temperature": 0.7, "top_k": 5})):
        asked = [replace(request, proofs=True) for request in requests()]
        completions = await engine.generate(asked, sampling)
        to_judge = [replace(request, seed=None) for request in to_score(asked, completions)]
        found, at_one = [await scorer.prefill(to_judge, how) for how in (sampling, SAMPLING)]
        assert found.margins_T.max() < 0.05, "no token outside the filters"
        assert np.abs(found.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX
        assert distances(found, completions).max() < PROOF_ERROR_MAX
        deviations = []
        for each in (found, at_one):
            assert each.expected_T is not None
            assert each.variance_T is not None
            deviations.append(abs((each.logprobs_T - each.expected_T).sum()) / np.sqrt(each.variance_T.sum()))
        assert deviations[0] < 4
        assert (deviations[1] > 6) == (sampling != SAMPLING), "at another temperature they would be implausible"
    await engine.close()
    await scorer.close()


START_AND_WAIT = """
import asyncio, pathlib, sys
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.adapters.engines.vllm_engine import VllmEngine

async def main():
    folder = pathlib.Path(sys.argv[1])
    engine = VllmEngine(folder, context_tokens_max=128)
    await engine.load(initial_weights(folder, 0), policy_version=0)
    print("loaded", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_vllm_ends_with_the_process_that_started_it(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "start_and_wait.py"
    program.write_text(START_AND_WAIT)
    owner = await asyncio.create_subprocess_exec(
        sys.executable, str(program), str(folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert owner.stdout is not None
    while (line := await owner.stdout.readline()) != b"loaded\n":
        assert line, "it ended before it had loaded"
    started = [os.pidfd_open(pid) for pid in descendants(owner.pid)]
    assert started
    os.kill(owner.pid, signal.SIGKILL)
    await owner.wait()
    for ended in started:
        readable, _, _ = await asyncio.to_thread(select.select, [ended], [], [], 30)
        os.close(ended)
        assert readable, "a process of the engine is still running"
