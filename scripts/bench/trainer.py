"""Tokens per second of a training step: ours, TRL's GRPOTrainer, and plain PyTorch loops of the same model, batch and precision.

    .venv/bin/python scripts/bench/trainer.py [--quick] [--json]

All take their turns within TRL's own callback, on one thread, in fp32 (loss_steps.py, which has the model and the batch):

    TRL             its whole step, with a cached batch in place of generation
    plain, padded   the simplest loop
    plain, packed   a bare loop over sequences one after another, with our attention and no other part of ours
    ours, packed    the backend with trainer.packing = "sequences": the same packing as that bare loop
    ours            the backend with trees of shared prefixes, as it is by default

Lengths are ragged: 4 prompts of 16 to 47 tokens, 16 completions of lognormal lengths (median 81, sigma 0.7, 2 to 320). Tokens are
those of prompts and completions, without padding. The time for which publishing blocks a step is reported too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import loss_steps
import numpy as np
import torch
from checks import Output, at_least

from prime_node.adapters.engines.torch_weights import to_weights
from prime_node.adapters.training.packed_attention import NAME, SequenceLayout
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.packing import pack_sequences
from prime_node.algo.shares import Packing
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.ports.train_samples import TrainSample
from prime_protocol.manifest import BasePolicy


def samples_of(batch: loss_steps.Batch) -> list[TrainSample]:
    return [
        TrainSample(tuple(prompt), tuple(completion), (-5.0,) * len(completion), advantage)
        for prompt, completion, advantage in zip(batch.prompts, batch.completions, batch.advantages, strict=True)
    ]


def plain_packed(batch: loss_steps.Batch, folder: Path) -> Callable[[], None]:
    """Run a minimal step: tensors made once, one forward pass, autograd, clipping, AdamW."""
    model = loss_steps.make_model()
    model.set_attn_implementation(NAME)
    optimizer = torch.optim.AdamW(model.parameters(), lr=loss_steps.LR, weight_decay=0.0, fused=True)
    (packed,) = pack_sequences(samples_of(batch), micro_batch_tokens=2**20)
    layout = SequenceLayout.of(packed.lengths, device=torch.device("cpu"))
    tokens, positions, sources, targets = (
        torch.from_numpy(array) for array in (packed.token_ids, packed.positions, packed.sources_N, packed.targets_N)
    )
    lengths = np.array([len(batch.completions[index]) for index in packed.samples])
    advantages = torch.tensor(np.repeat([batch.advantages[index] for index in packed.samples], lengths)).float()

    def step() -> None:
        optimizer.zero_grad()
        hidden = model.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout
        ).last_hidden_state[0, sources]
        logprobs = model.lm_head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        torch.autograd.backward(-surrogate.sum() / len(targets))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_backend(folder: Path, packing: Packing) -> TorchBackend:
    model = loss_steps.make_model()
    model.config.save_pretrained(folder)
    weights = to_weights(model.named_parameters(), dtype="fp32")
    backend = TorchBackend(folder, weights, packing=packing, row_tokens=512)
    backend.new_optimizer(OptimizerSettings(weight_decay=0.0))
    return backend


def ours_packed(batch: loss_steps.Batch, folder: Path) -> Callable[[], None]:
    backend, objective, samples = our_backend(folder, Packing.SEQUENCES), find_loss("grpo"), samples_of(batch)

    def step() -> None:
        backend.train_step(samples, objective, lr=loss_steps.LR)

    return step


def publishing(batch: loss_steps.Batch, folder: Path, rounds: int) -> dict[str, float]:
    """Seconds: what a step waits for (the copy), and what happens behind it (the table and the delta)."""
    backend, objective, samples = our_backend(folder, Packing.TREE), find_loss("grpo"), samples_of(batch)
    seconds: dict[str, list[float]] = {"step": [], "copy": [], "table": [], "delta": []}
    old, base = backend.copy(), BasePolicy(policy_version=0, state_root="0" * 64)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        seconds[name].append(time.perf_counter() - began)
        return result

    for _ in range(rounds):
        timed("step", lambda: backend.train_step(samples, objective, lr=1e-6))
        new = timed("copy", backend.copy)
        timed("table", new.tensors)
        timed("delta", partial(new.encode, (base, old), keep=lambda entry, data: None))
        old = new
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    output = Output(as_json=arguments.json)
    size = loss_steps.QUICK if arguments.quick else loss_steps.FULL
    found = loss_steps.measure_steps(size, {"plain, packed": plain_packed, "ours, packed": ours_packed})
    folder = Path(tempfile.mkdtemp())
    waits = publishing(loss_steps.make_batch(), folder, 4 if arguments.quick else 8)
    seconds = {name: statistics.median(values) for name, values in found["seconds"].items()}
    # Turns are taken round by round, so ratios are of neighbours.
    equal = statistics.median(
        theirs / mine
        for theirs, mine in zip(found["seconds"]["plain, packed"], found["seconds"]["ours, packed"], strict=True)
    )
    checks = [
        at_least("tokens/s, ours / TRL's GRPOTrainer", seconds["TRL"] / seconds["ours"], 1.0),
        at_least("tokens/s, ours / plain loop at equal packing", equal, 0.95),
        at_least("tokens/s on ragged lengths, ours / plain padded loop", seconds["plain"] / seconds["ours"], 1.0),
        at_least("steps to one copy for the publisher", waits["step"] / waits["copy"], 10.0),
    ]
    for name, values in found["seconds"].items():
        spread = f"{found['tokens'] / max(values):.0f} to {found['tokens'] / min(values):.0f}"
        print(f"{name:14} {found['tokens'] / seconds[name]:8.0f} tokens/s ({spread}), {seconds[name]:.3f} s a step")
    print("publishing: " + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in waits.items()))
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
