"""A policy some optimizer steps from another: the product's trainer on samples that the benchmark has anyway.

The reward of a completion is its number of distinct tokens. Each step trains on LEASES_PER_STEP leases. What a distance of
twenty steps looks like does not depend on its direction: the benchmark judges by the model itself, and takes the trained policy
for the older one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.shares import Packing
from prime_node.broadcast.audit.safetensors_file import write_safetensors
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.ports.train_samples import TrainSample
from prime_protocol.assignment import Lease
from prime_protocol.rollout import Rollouts
from prime_protocol.weights import Weights

STEPS, LEASES_PER_STEP = 20, 2


def train_apart(model: Path, weights: Weights, work: Sequence[tuple[Lease, Rollouts]], *, lr: float) -> Weights:
    """Return the policy STEPS optimizer steps after `weights`, as it is published. The optimizer is configs/smollm2.toml's."""
    backend = TorchBackend(model, weights, packing=Packing.SEQUENCES, row_tokens=160, micro_batch_tokens=640, threads=1)
    backend.new_optimizer(OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0))
    for step in range(STEPS):
        part = work[step * LEASES_PER_STEP : (step + 1) * LEASES_PER_STEP]
        assert len(part) == LEASES_PER_STEP, "there are too few leases to train on"
        samples = [sample for lease, rollouts in part for sample in _samples(lease, rollouts)]
        stats = backend.train_step(samples, find_loss("aipo"), lr=lr)
        print(f"step {step + 1} of {STEPS}: |log ratio| {stats.log_ratio_abs:.3g} nats", flush=True)
    return backend.snapshot()


def keep(weights: Weights, path: Path) -> None:
    """Write weights to a file, completely or not at all."""
    partial = path.with_suffix(".part")
    write_safetensors(partial, weights)
    partial.rename(path)


def _samples(lease: Lease, rollouts: Rollouts) -> Iterator[TrainSample]:
    [group] = lease.groups
    completions = rollouts.completions()
    rewards = np.array([len(set(one.token_ids)) for one in completions], np.float64)
    for one, advantage in zip(completions, (rewards - rewards.mean()).tolist(), strict=True):
        yield TrainSample(group.prompt_token_ids, one.token_ids, one.logprobs, advantage)
