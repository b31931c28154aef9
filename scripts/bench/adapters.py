"""Bytes of one published delta: of all weights, of merged adapters, and of adapters alone as floats and as integers.

    python scripts/bench/adapters.py --quick          the demo's model with random weights, a minute
    python scripts/bench/adapters.py                  SmolLM2-135M, 10 minutes on two idle cores

Each training makes some steps on the same batches of sums: a right and a wrong answer to each prompt, with advantages 1 and -1.
The last delta is the figure. Merged adapters are the merged weights of the training with float factors.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from checks import Output, at_most

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.lora import LoraSettings
from prime_node.adapters.models.pretrained_model import pretrained_weights
from prime_node.adapters.models.tiny_model import initial_weights, tiny_model_files
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.shares import Packing
from prime_node.broadcast.audit.safetensors_file import write_safetensors
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.ports.train_samples import TrainSample
from prime_protocol.adapters import PREFIX, SUFFIX_A, SUFFIX_B, WEIGHT, AdapterSpec, factors_in_fp32, merged, unit_for
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.manifest import BasePolicy
from prime_protocol.weights import Weights, floats, root_of

sys.path.insert(0, str(Path(__file__).parents[1]))
import models

RANK, ALPHA = 16, 32


@dataclass(frozen=True)
class Size:
    """Delta of one training."""

    name: str
    num_bytes: int
    parameters: int
    changed: float
    """Share of elements that differ from the policy before."""


def size_of(name: str, old: Weights, new: Weights) -> Size:
    made = encode_checkpoint(new, (BasePolicy(policy_version=0, state_root=root_of(old)), old))
    differ = sum(int(np.count_nonzero(tensor.data != old[key].data)) for key, tensor in new.items())
    count = sum(tensor.data.size for tensor in new.values())
    return Size(name, made.encoding.sent_bytes, count, differ / count)


def batches(encode: Callable[[str], list[int]], prompts: int, *, seed: int = 0) -> Iterator[list[TrainSample]]:
    """Yield batches of sums with a right and a wrong answer each."""
    rng = random.Random(seed)
    while True:
        batch = []
        for _ in range(prompts):
            a, b = rng.randrange(10, 100), rng.randrange(10, 100)
            prompt = tuple(encode(f"What is {a} + {b}? Reply with the number only."))
            for answer, advantage in ((a + b, 1.0), (a + b + rng.randrange(1, 20), -1.0)):
                ids = tuple(encode(f" {answer}"))
                batch.append(TrainSample(prompt, ids, (0.0,) * len(ids), advantage))
        yield batch


def trained(
    folder: Path,
    weights: Weights,
    encode: Callable[[str], list[int]],
    size: tuple[int, int],
    *,
    lr: float,
    lora: LoraSettings | None,
) -> tuple[Weights, Weights]:
    """Return the last two policies of a training with `size` steps and prompts."""
    steps, prompts = size
    backend = TorchBackend(folder, weights, lora=lora, packing=Packing.SEQUENCES, micro_batch_tokens=512)
    backend.new_optimizer(OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0))
    loss, before = find_loss("aipo"), backend.snapshot()
    for _, batch in zip(range(steps), batches(encode, prompts), strict=False):
        before = backend.snapshot()
        logprobs = backend.logprobs(batch)
        on_policy = [replace(one, inference_logprobs=tuple(nats)) for one, nats in zip(batch, logprobs, strict=True)]
        backend.train_step(on_policy, loss, lr=lr)
    return before, backend.snapshot()


def published(base: Weights, factors: Weights, spec: AdapterSpec) -> float:
    """Return the share of the adapters' movement that the merged and rounded weights have, as a projection."""
    exact = factors if spec.unit_log2 is None else factors_in_fp32(factors, spec)
    moved = along = 0.0
    for name, tensor in merged(base, factors, spec).items():
        if tensor is not base[name]:
            layer = name.removesuffix(WEIGHT)
            A, B = (floats(exact[PREFIX + layer + suffix]) for suffix in (SUFFIX_A, SUFFIX_B))
            wanted = np.float32(spec.alpha / spec.rank) * (B @ A)
            moved += float(np.vdot(wanted, wanted))
            along += float(np.vdot(wanted, floats(tensor) - floats(base[name])))
    return along / moved


def measured(folder: Path, options: argparse.Namespace) -> Iterator[Size]:
    weights, encode = pretrained_weights(str(folder)), HfTokenizer(folder).encode_prompt
    size = (options.steps, options.prompts)
    for unit_log2 in (None, unit_for(RANK, ALPHA)):
        lora = LoraSettings(rank=RANK, alpha=ALPHA, alone=True, unit_log2=unit_log2)
        spec = AdapterSpec(base="base", base_root=root_of(weights), rank=RANK, alpha=ALPHA, unit_log2=unit_log2)
        old, new = trained(folder, weights, encode, size, lr=options.adapter_lr, lora=lora)
        yield size_of(f"adapters as {'floats' if unit_log2 is None else 'integers'}", old, new)
        for suffix in (SUFFIX_A, SUFFIX_B):
            old_one, new_one = ({k: v for k, v in each.items() if k.endswith(suffix)} for each in (old, new))
            yield size_of(f"  {suffix}", old_one, new_one)
        begin_s = time.process_time()
        whole = merged(weights, new, spec)
        print(f"merged in {time.process_time() - begin_s:.2f} s of processor time", flush=True)
        yield size_of("  merged", merged(weights, old, spec), whole)
        print(f"the merged weights have {published(weights, new, spec):.2f} of the adapters' movement", flush=True)
    yield size_of("all weights", *trained(folder, weights, encode, size, lr=options.lr, lora=None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="print only the checks")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate of all weights")
    parser.add_argument("--adapter-lr", type=float, default=1e-4)
    options = parser.parse_args()
    output = Output(as_json=options.json)
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.quick:
            for name, data in tiny_model_files().items():
                (folder / name).write_bytes(data)
            write_safetensors(folder / "model.safetensors", initial_weights(folder, seed=4))
        else:
            folder = models.folder_of("smollm2")
        for size in measured(folder, options):
            sizes.setdefault(size.name, size.num_bytes)
            print(
                f"{size.name:24} {size.num_bytes:>10,} bytes {size.parameters:>12,} parameters "
                f"{8 * size.num_bytes / size.parameters:6.3f} bits each, {100 * size.changed:5.1f} % changed",
                flush=True,
            )
    integers = sizes["adapters as integers"]
    checks = [
        at_most("integers / floats", integers / sizes["adapters as floats"], 0.3),
        at_most("integers / merged", integers / sizes["  merged"], 0.5),
        at_most("integers / all weights", integers / sizes["all weights"], 0.6),
    ]
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
