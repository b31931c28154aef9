"""The real trainer of overlap.py: the product's torch backend with the demo's model, which gets one batch after another."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.ports.train_samples import TrainSample

COMPLETIONS = 4
PROMPT_TOKENS, COMPLETION_TOKENS = 24, 96


class RealTrainer:
    """Each call is one optimizer step over a batch's groups, whose lengths follow from their slots."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            for file, data in tiny_model_files(
                hidden_size=128, num_layers=2, num_heads=4, intermediate_size=384
            ).items():
                (Path(name) / file).write_bytes(data)
            self._backend = TorchBackend(Path(name), seed=1, threads=1)
        self._backend.new_optimizer(OptimizerSettings())
        self._loss = find_loss("grpo")

    def train(self, slots: tuple[int, ...]) -> float:
        """Seconds that it took."""
        samples = [sample for slot in slots for sample in _samples(slot)]
        began_s = time.perf_counter()
        stats = self._backend.train_step(samples, self._loss, lr=1e-5)
        assert stats.num_tokens == sum(len(sample.completion_token_ids) for sample in samples)
        return time.perf_counter() - began_s


def _samples(slot: int) -> list[TrainSample]:
    rng = random.Random(slot)
    prompt = tuple(rng.randrange(256) for _ in range(PROMPT_TOKENS))
    samples = []
    for index in range(COMPLETIONS):
        completion = tuple(rng.randrange(256) for _ in range(rng.randint(8, COMPLETION_TOKENS)))
        samples.append(TrainSample(prompt, completion, (-5.5,) * len(completion), 1.0 if index % 2 else -1.0))
    return samples
