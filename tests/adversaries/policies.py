"""A small model that was really trained, policy after policy, and everything that is made of it. Made once a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.tiny_model_world import write_tiny_model

from prime_lab.adversaries.engine import Logits
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.causal_model import CausalModel
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.broadcast.audit.safetensors_file import read_weights, write_safetensors
from prime_node.cli.wire_environments import build_environments
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import Environment
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.ports.train_samples import Group
from prime_node.trainer.batch import prepare
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.recipe import Recipe
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import FinishReason
from prime_protocol.run_spec import EnvironmentSpec
from prime_protocol.weights import Weights

ENVIRONMENT = EnvironmentSpec(
    name="spell",
    id="reasoning_gym",
    seed=7,
    options={"task": "spell_backward", "min_word_len": 3, "max_word_len": 6},
)
COMPLETION_TOKENS = 8
LR = 4e-4
"""The demo's."""
DONE = "done.safetensors"
"""Written last."""
Shape = dict[str, int]


@dataclass(frozen=True)
class Policies:
    """Ten and more policies of one run, one training step apart, and a smaller model that learned the same task."""

    folder: Path
    small_folder: Path
    chain: tuple[Weights, ...]
    base: Weights
    """The model before any of them."""
    small: Weights
    environment: Environment
    tokenizer: HfTokenizer

    @property
    def sampling(self) -> Sampling:
        return Sampling(completion_tokens_max=COMPLETION_TOKENS, stop_token_ids=(self.tokenizer.stop_token_id,))


async def make_policies(
    folder: Path,
    *,
    shape: Shape,
    small_shape: Shape,
    taught_steps: int,
    small_steps: int,
    rl_steps: int,
    groups: int = 12,
) -> Policies:
    """Train both models by supervised steps, then the larger one by reinforcement, one policy per step."""
    place, small_place = (_write(folder / name, each) for name, each in (("model", shape), ("small", small_shape)))
    environment = build_environments([ENVIRONMENT], place)["spell"]
    tokenizer = HfTokenizer(place)
    lessons = Lessons({"spell": environment}, {"spell": 1.0}, tokenizer, seed=7, problems=8_192, batch_size=64)
    small = _taught(small_place, lessons, small_steps)
    backend = _taught(place, lessons, taught_steps)
    made = Policies(place, small_place, (), backend.snapshot(), small.snapshot(), environment, tokenizer)
    backend.new_optimizer(OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0))
    config = TrainerConfig.load({"trainer": {"loss": {"type": "aipo"}, "optimizer": {"lr": LR, "warmup_steps": 5}}})
    recipe = Recipe.of(config, max_steps=400, completion_tokens_max=COMPLETION_TOKENS, vocab_size=tokenizer.vocab_size)
    engine, chain = TransformersEngine(place, threads=1), [backend.snapshot()]
    for step in range(rl_steps):
        await engine.load(chain[-1], policy_version=step)
        found = await _groups(engine, made, range(step * groups, (step + 1) * groups))
        backend.train_step(prepare(found, recipe, step=step).samples, recipe.loss, lr=LR)
        chain.append(backend.snapshot())
    await engine.close()
    return Policies(place, small_place, tuple(chain), made.base, made.small, environment, tokenizer)


async def kept_policies(folder: Path, **how: Any) -> Policies:
    """make_policies, or what it made in this folder before."""
    kept = _read(folder)
    if kept is not None:
        return kept
    made = await make_policies(folder, **how)
    for name, weights in {"base": made.base, "small": made.small, **_numbered(made.chain)}.items():
        write_safetensors(folder / f"{name}.safetensors", weights)
    write_safetensors(folder / DONE, {})
    return made


def _read(folder: Path) -> Policies | None:
    if not (folder / DONE).exists():
        return None
    held = {path.stem: read_weights(path) for path in folder.glob("*.safetensors")}
    chain = tuple(held[name] for name in sorted(held) if name.startswith("policy"))
    place = folder / "model"
    environment, tokenizer = build_environments([ENVIRONMENT], place)["spell"], HfTokenizer(place)
    return Policies(place, folder / "small", chain, held["base"], held["small"], environment, tokenizer)


def _numbered(chain: Sequence[Weights]) -> dict[str, Weights]:
    return {f"policy-{number:03}": weights for number, weights in enumerate(chain)}


def logits_of(folder: Path, weights: Weights) -> Logits:
    """Return the function that gives a model's logits."""
    model = CausalModel(folder, dtype="fp32", device="cpu")
    model.load(weights)

    def logits(sequences: Sequence[tuple[int, ...]]) -> npt.NDArray[np.float32]:
        distinct = list(dict.fromkeys(sequences))
        found_PV = model.logits(model.begin(distinct, spare=0)[1]).numpy()
        place = {sequence: row for row, sequence in enumerate(distinct)}
        rows_BV: npt.NDArray[np.float32] = found_PV[[place[sequence] for sequence in sequences]]
        return rows_BV

    return logits


def _write(folder: Path, shape: Shape) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_tiny_model(folder, **shape)


def _taught(folder: Path, lessons: Lessons, steps: int) -> TorchBackend:
    backend = TorchBackend(folder, seed=7, threads=1)
    backend.new_optimizer(OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.01))
    for step in range(steps):
        backend.train_step(lessons.batch(step), find_loss("sft"), lr=2e-3 * min(1.0, (step + 1) / 30))
    return backend


async def _groups(engine: TransformersEngine, policies: Policies, slots: range) -> list[Group]:
    prompts = [tuple(policies.tokenizer.encode_prompt(policies.environment.prompt(slot))) for slot in slots]
    requests = [
        GenerateRequest(prompt, slot * 8 + n) for slot, prompt in zip(slots, prompts, strict=True) for n in range(8)
    ]
    completions = await engine.generate(requests, policies.sampling)
    groups = []
    for place, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
        mine = tuple(completions[8 * place : 8 * place + 8])
        rewards = tuple(
            policies.environment.score(
                slot, policies.tokenizer.decode(list(one.token_ids)), finished=one.finish is FinishReason.STOP
            )
            for one in mine
        )
        groups.append(Group(slot, prompt, mine, rewards, (0,) * 8, "here"))
    return groups
