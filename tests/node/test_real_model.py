"""SmolLM2-135M-Instruct from its public package (`scripts/models.py`): a run of it, a step of the trainer, sensible English."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.node.replay_world import changed, replayable_run, replayed, trained

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.model_folder import require_plain
from prime_node.adapters.models.pretrained_model import pretrained_weights
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.shares import Packing
from prime_node.broadcast.audit.safetensors_file import write_safetensors
from prime_node.cli.new import make_run
from prime_node.cli.options import Options
from prime_node.cli.run_dir import RunDir
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.train_samples import TrainSample
from prime_node.replay.finding import ReplayOutcome
from prime_protocol.assignment import Sampling
from prime_protocol.weights import num_bytes, root_of

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
QUESTIONS = ["What is the capital of France?", "What is 17 + 25? Reply with the number only.", "Name a colour."]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Return the model's folder. It is downloaded and built once, and cached for the user."""
    command = [sys.executable, str(ROOT / "scripts" / "models.py"), "smollm2"]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return Path(built.stdout.strip())


def plain_logprobs(folder: Path, samples: list[TrainSample]) -> list[list[float]]:
    """Return transformers' own fp32 logprobs of the completions."""
    transformers = pytest.importorskip("transformers")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[-len(sample.completion_token_ids) :, 0]
        found.append(chosen.tolist())
    return found


def test_prompts_are_tokenized_as_by_transformers(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    require_plain(smollm2)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(smollm2)
    ours = HfTokenizer(smollm2)
    for text in [*QUESTIONS, "two  spaces\n\nand lines\t;", "für 東京 🙂", "x" * 300, "1234567890 + 3.14 = ?"]:
        chat = [{"role": "user", "content": text}]
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.encode_prompt(text) == expected
    assert ours.decode([ours.stop_token_id]) == ""


def test_new_makes_a_run_of_it(smollm2: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f"""[run]
calibration = "none"
model = {{ kind = "pretrained", name_or_path = "{smollm2}" }}
environments = [{{ name = "sums", id = "reasoning_gym", options = {{ task = "chain_sum" }} }}]

[trainer]
initial_weights = "{smollm2}"
""")
    run = make_run(RunDir(tmp_path / "run"), Options(config, []), config_file=config)
    assert run.spec.vocab_size == 49_152
    assert run.spec.sampling.stop_token_ids == (2,)
    assert {file.name for file in run.spec.model_files} > {"config.json", "tokenizer.json", "chat_template.jinja"}


async def test_it_answers_in_english_and_the_trainer_agrees_with_it_before_and_after_a_step(
    smollm2: Path, tmp_path: Path
) -> None:
    """The bar is 1e-4 nats between the trainer and an fp32 engine that has the published weights."""
    weights = pretrained_weights(str(smollm2))
    tokenizer = HfTokenizer(smollm2)
    stop = (tokenizer.stop_token_id,)
    engine = TransformersEngine(smollm2, threads=1)
    await engine.load(weights, policy_version=0)
    requests = [GenerateRequest(tuple(tokenizer.encode_prompt(text)), seed=3) for text in QUESTIONS]
    greedy = Sampling(temperature=0.0, completion_tokens_max=16, stop_token_ids=stop)
    (answer,) = await engine.generate(requests[:1], greedy)
    assert "Paris" in tokenizer.decode(list(answer.token_ids))
    sampled = await engine.generate(requests, Sampling(completion_tokens_max=12, stop_token_ids=stop))
    await engine.close()
    samples = [
        TrainSample(request.prompt_token_ids, completion.token_ids, completion.logprobs, advantage)
        for request, completion, advantage in zip(requests, sampled, (1.0, -0.5, 0.5), strict=True)
    ]

    backend = TorchBackend(smollm2, weights, packing=Packing.SEQUENCES, threads=1)
    assert root_of(backend.snapshot()) == root_of(weights)
    for sample, found in zip(samples, backend.logprobs(samples), strict=True):
        np.testing.assert_allclose(found, sample.inference_logprobs, atol=1e-4)
    stats = backend.train_step(samples, find_loss("aipo"), lr=1e-5)
    assert stats.log_ratio_abs < 1e-4
    published = backend.snapshot()
    changed = sum(int((published[name].data != weights[name].data).sum()) for name in weights)
    assert 0.001 < changed / (num_bytes(weights) / 2) < 0.5

    exported = tmp_path / "exported"
    shutil.copytree(smollm2, exported, ignore=shutil.ignore_patterns("*.safetensors"))
    write_safetensors(exported / "model.safetensors", published)
    for found, expected in zip(backend.logprobs(samples), plain_logprobs(exported, samples), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


async def test_three_steps_of_it_are_exact_when_they_are_executed_again(smollm2: Path, tmp_path: Path) -> None:
    config = changed(
        initial_weights=str(smollm2), sft={"steps_max": 0}, evaluate_every=0, checkpoint_every=100, row_tokens=64
    )
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    files = {name: (smollm2 / name).read_bytes() for name in names}
    run = replayable_run(config, state_every=4, max_steps=3, files=files)  # one state, of policy 0: 1.6 GB
    published = await trained(tmp_path, run, config, model=smollm2)
    assert len(set(published.roots)) == 4
    report = await replayed(published, tmp_path, range(3), model=smollm2)
    assert [one.outcome for one in report.steps] == [ReplayOutcome.EXACT] * 3, report
