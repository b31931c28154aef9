"""Does it learn? Engine, environment, losses and train backend in one process, without the wire: spell_backward, k = 2.

    python scripts/bench/learning_smoke.py --seed 7 --steps 400

Prints the curve (held-out accuracy, greedy and sampled, that no stopping rule has seen) and the time of each part per step.
Sampling is done on the published bf16 weights of the policy k steps back, by the engine that workers use.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from prime_node.adapters.hf_tokenizer import HfTokenizer
from prime_node.adapters.reasoning_gym_env import ReasoningGymSource
from prime_node.adapters.tiny_model import model_files
from prime_node.adapters.torch_backend import TorchBackend
from prime_node.adapters.transformers_engine import TransformersEngine
from prime_node.algo.losses import find_loss
from prime_node.algo.schedule import LinearSchedule
from prime_node.envs.registry import build_environment, from_source
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.train_backend import Group, OptimizerSettings
from prime_node.trainer.batch import prepare
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.evaluate import Evaluator, held_out
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.recipe import Recipe
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import FinishReason
from prime_protocol.run_spec import EnvironmentSpec
from prime_protocol.weights import Weights

TASK: dict[str, str | int | float | bool] = {"task": "spell_backward", "min_word_len": 3, "max_word_len": 6}
GROUPS, ROLLOUTS, ASYNC_LEVEL = 48, 8, 2


class Smoke:
    """The parts, and a stopwatch."""

    def __init__(self, folder: Path, seed: int) -> None:
        for name, data in model_files().items():
            (folder / name).write_bytes(data)
        spec = EnvironmentSpec(name="spell", id="reasoning_gym", seed=seed, options=TASK)
        self.environment = build_environment(spec, {"reasoning_gym": from_source(ReasoningGymSource)})
        self.tokenizer = HfTokenizer(folder)
        self.sampling = Sampling(completion_tokens_max=8, stop_token_ids=(self.tokenizer.stop_token_id,))
        self.engine = TransformersEngine(folder, threads=1)
        self.backend = TorchBackend(folder, seed=seed, threads=1)
        self.seed = seed
        environments = {"spell": self.environment}
        questions = held_out(environments, self.tokenizer, evaluation=1024, stopping=256)
        self.evaluator = Evaluator(self.engine, self.tokenizer, questions, self.sampling, seed=1)
        self.lessons = Lessons(environments, {"spell": 1.0}, self.tokenizer, seed=seed, problems=8_192, batch_size=64)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    async def teach(self) -> int:
        """Supervised steps until a fifth of the sampled answers is right."""
        self.backend.new_optimizer(OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.01))
        loss, schedule = find_loss("sft"), LinearSchedule(2e-3, 30, 1, 1.0)
        for step in range(1_000):
            if step and step % 5 == 0 and await self.evaluator.stopping_accuracy(self.backend.snapshot(), step) >= 0.2:
                return step
            self.backend.train_step(self.lessons.batch(step), loss, lr=schedule.at(step))
        sys.exit("the supervised phase never reached its target")

    async def rollouts(self, step: int, policy: int, weights: Weights) -> list[Group]:
        """One step's groups, scored."""
        began = time.perf_counter()
        await self.engine.load(weights, policy_version=policy)
        slots = range(step * GROUPS, (step + 1) * GROUPS)
        prompts = [tuple(self.tokenizer.encode_prompt(self.environment.prompt(slot))) for slot in slots]
        requests = [
            GenerateRequest(prompt, seed=(self.seed << 40) + slot * ROLLOUTS + number)
            for slot, prompt in zip(slots, prompts, strict=True)
            for number in range(ROLLOUTS)
        ]
        completions = await self.engine.generate(requests, self.sampling)
        self.seconds["generate"] += time.perf_counter() - began
        groups = []
        for index, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
            mine = tuple(completions[index * ROLLOUTS : (index + 1) * ROLLOUTS])
            rewards = tuple(
                self.environment.score(
                    slot, self.tokenizer.decode(list(c.token_ids)), finished=c.finish is FinishReason.STOP
                )
                for c in mine
            )
            groups.append(Group(slot, prompt, mine, rewards, (policy,) * ROLLOUTS, "here"))
        return groups

    async def reinforce(self, steps: int) -> None:
        self.backend.new_optimizer(OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0))
        config = TrainerConfig.load(
            {
                "trainer": {
                    "loss": {"type": "aipo", "delta": 4.0},
                    "optimizer": {"lr": 4e-4, "warmup_steps": 5},
                    "lr_final_share": 0.1,
                    "lr_damping_nats": 0.07,
                }
            }
        )
        recipe = Recipe.of(
            config,
            max_steps=steps,
            completion_tokens_max=self.sampling.completion_tokens_max,
            vocab_size=self.tokenizer.vocab_size,
        )
        multiplier = 1.0
        policies: deque[Weights] = deque([self.backend.snapshot()], maxlen=ASYNC_LEVEL + 1)
        await self._report(0, policies[-1], "")
        for step in range(steps):
            policy = max(0, step - ASYNC_LEVEL)
            prepared = prepare(await self.rollouts(step, policy, policies[0]), recipe, step=step)
            began = time.perf_counter()
            stats = self.backend.train_step(prepared.samples, recipe.loss, lr=recipe.schedule.at(step) * multiplier)
            self.seconds["train"] += time.perf_counter() - began
            began = time.perf_counter()
            policies.append(self.backend.snapshot())
            self.seconds["snapshot"] += time.perf_counter() - began
            multiplier = recipe.next_multiplier(multiplier, stats.log_ratio_abs)
            if (step + 1) % 50 == 0:
                parts = ", ".join(f"{name} {1e3 * s / (step + 1):.0f} ms" for name, s in self.seconds.items())
                reward = prepared.metrics["reward_mean"]
                await self._report(step + 1, policies[-1], f"reward {reward:.3f}, per step: {parts}")

    async def _report(self, step: int, weights: Weights, note: str) -> None:
        marks = await self.evaluator.evaluate(weights, step)
        print(
            f"step {step:4d}  greedy {marks['eval_greedy']:.3f}  sampled {marks['eval_sampled']:.3f}  {note}",
            flush=True,
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        smoke = Smoke(Path(folder), arguments.seed)
        began = time.perf_counter()
        taught = await smoke.teach()
        print(f"supervised: {taught} steps, {time.perf_counter() - began:.1f} s", flush=True)
        await smoke.reinforce(arguments.steps)
        print(f"in all {time.perf_counter() - began:.1f} s")
        await smoke.engine.close()


if __name__ == "__main__":
    asyncio.run(main())
