"""Checks of the GPU path, one subcommand a step: imports, noise, attention, trainer, validator, vllm_v1, vllm_v2, or all.

Each step prints one line of JSON: {"step", "ok", "values", "missed"} or {"step", "skipped": "needs ..."}. The exit code is 1 if
a check is missed. A machine with a GPU needs torch, Triton, transformers and this checkout; a step says what else is missing.
`--dry-run` runs the same code in small shapes on the CPU, with Triton's interpreter, and asserts no times. `--json` prints the
checks alone, as benchmarks do; a skipped step is a missed check.

    python scripts/gpu_check.py all
    python scripts/gpu_check.py noise --dry-run
    python scripts/bench/results.py record -- python scripts/gpu_check.py all
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from checks import Check, Output

from gpu_engines import validator, vllm_v1, vllm_v2
from gpu_step import Skipped, Step, model_folder, need


def imports(step: Step) -> None:
    """Report versions and the device."""
    import torch

    step.values["python"] = platform.python_version()
    for name in ("torch", "triton", "transformers", "numpy", "vllm", "pydantic", "blake3", "zstandard", "cryptography"):
        try:
            step.values[name] = importlib.metadata.version(name)  # importing all of them takes a minute
        except importlib.metadata.PackageNotFoundError:
            step.values[name] = None

    if not step.dry:
        step.values["device"] = torch.cuda.get_device_name()
        step.values["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))


def noise(step: Step) -> None:
    """Compare hash, value and choice of the Triton kernel with the protocol's noise, and time it."""
    need("triton", "numpy", "prime_protocol.noise")
    import numpy as np
    import torch

    from prime_lab.noise_on_device import gumbels_in_triton, hashes_in_triton
    from prime_node.adapters.engines.torch_noise import noise_in_torch
    from prime_node.adapters.engines.triton_noise import add_noise_of_rows
    from prime_protocol import noise as protocol

    device = torch.device(step.device)
    rows, vocab_size = (8, 1_021) if step.dry else (64, 151_936)
    random = np.random.default_rng(0)
    seeds, positions = [int(n) for n in random.integers(0, 2**63 - 1, rows)], list(range(rows))
    words = hashes_in_triton(torch.tensor(seeds, device=device), torch.tensor(positions, device=device), vocab_size)
    expected = protocol.token_hashes(seeds, positions, vocab_size)
    step.at_most("hashes_wrong", float((words.cpu().numpy().view(np.uint32) != expected).sum()), 0)
    found = gumbels_in_triton(words).cpu().numpy()
    step.at_most("value_error", float(np.abs(found - protocol.gumbel_of_hashes(expected)).max()), 3e-6)
    added = torch.zeros(rows, vocab_size, device=device)
    add_noise_of_rows(added, range(rows), seeds, positions)
    step.at_most("added_error", float(np.abs(added.cpu().numpy() - found).max()), 3e-6)

    same, total = 0, 64 if step.dry else 10_000
    for first in range(0, total, rows):
        positions = list(range(first, first + rows))
        logits = torch.randn(rows, vocab_size, device=device) * 3
        exact = logits + noise_in_torch(seeds, positions, vocab_size, device)
        add_noise_of_rows(logits, range(rows), seeds, positions)
        same += int((exact.argmax(1) == logits.argmax(1)).sum())
    step.at_least("argmax_equal", same / (-(-total // rows) * rows), 0.9999)
    if not step.dry:
        logits = torch.randn(256, vocab_size, device=device)
        of_step = (logits, range(256), seeds * 4, positions * 4)
        step.at_most("ms_of_256_rows", 1e3 * step.seconds(lambda: add_noise_of_rows(*of_step), repeat=50), 0.5)
        step.values["ms_in_torch"] = 1e3 * step.seconds(lambda: noise_in_torch(*of_step[2:], vocab_size, device))
        step.at_most("kernel_ms", 1e3 * _kernel_seconds(step, logits, seeds * 4), 0.2)


def _kernel_seconds(step: Step, logits: Any, seeds: list[int]) -> float:
    """Return the kernel's time alone: the tables are on the device, and 20 launches are timed together."""
    import torch

    from prime_node.adapters.engines.triton_noise import add_noise_of_slots

    slots = torch.arange(len(seeds), device=logits.device)
    table = (slots, slots * 0, torch.tensor(seeds, device=logits.device), slots * 0)

    def launch() -> None:
        for _ in range(20):
            add_noise_of_slots(logits, *table)

    return step.seconds(launch) / 20


def attention(step: Step) -> None:
    """Compare attention kernels with fp32, say which take grouped heads, and time the blocks of chosen_logprobs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from prime_node.adapters.training import chosen_logprobs as chosen

    dtype, width = torch.bfloat16, 16 if step.dry else 2_048
    query = torch.randn(1, 16, width, 64, device=step.device, dtype=dtype)
    key, value = torch.randn(2, 1, 8, width, 64, device=step.device, dtype=dtype)
    mask = torch.ones(width, width, dtype=torch.bool, device=step.device).tril()
    wide = [tensor.repeat_interleave(2, dim=1) for tensor in (key, value)]
    exact = scaled_dot_product_attention(query.float(), wide[0].float(), wide[1].float(), attn_mask=mask)
    for kernel in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ):
        for name, tensors, options in (
            ("grouped_causal", (key, value), {"enable_gqa": True, "is_causal": True}),
            ("grouped_masked", (key, value), {"enable_gqa": True, "attn_mask": mask}),
            ("expanded_causal", wide, {"is_causal": True}),
            ("expanded_masked", wide, {"attn_mask": mask}),
        ):
            try:
                with sdpa_kernel(kernel):
                    found = scaled_dot_product_attention(query, *tensors, **options)
            except RuntimeError:
                step.values[f"{kernel.name.lower()}_{name}"] = "refused"
                continue
            step.at_most(f"{kernel.name.lower()}_{name}_error", float((found.float() - exact).abs().max()), 3e-2)

    rows, vocab_size, hidden_size = (64, 3_000, 32) if step.dry else (16_384, 151_936, 1_024)
    blocks = {"small": 2**14, "large": 2**17} if step.dry else {"small": 2**21, "large": 2**28}
    hidden = torch.randn(rows, hidden_size, device=step.device, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab_size, hidden_size, device=step.device, dtype=dtype) / hidden_size**0.5
    row, target = torch.arange(rows, device=step.device), torch.randint(vocab_size, (rows,), device=step.device)
    results, times, usual = {}, {}, dict(chosen.BLOCK_LOGITS)
    for name, size in blocks.items():
        chosen.BLOCK_LOGITS[step.device] = size

        def forward_and_back(name: str = name) -> None:
            hidden.grad = None
            results[name] = chosen.in_blocks(hidden, head, None, row, target, 1.0)[0]
            results[name].sum().backward()

        times[name] = step.seconds(forward_and_back, repeat=2)
    chosen.BLOCK_LOGITS.update(usual)
    step.at_most("blocks_error", float((results["small"] - results["large"]).detach().abs().max()), 1e-4)
    if not step.dry:
        step.values["seconds_large_blocks"] = times["large"]
        step.at_least("large_blocks_faster", times["small"] / times["large"], 5)


def trainer(step: Step) -> None:
    """Train a tied model for five steps in bf16, compare its logprobs with the CPU's in fp32, and time step and snapshot."""
    need("transformers", "prime_node.adapters.training.torch_backend")
    import random

    from prime_node.adapters.models.model_config import model_shape
    from prime_node.adapters.training.ranks import Ranks
    from prime_node.adapters.training.sharding import Placement
    from prime_node.adapters.training.torch_backend import TorchBackend
    from prime_node.algo.losses import find_loss
    from prime_node.algo.memory_plan import TrainerLoad, trainer_memory
    from prime_node.algo.shares import Packing
    from prime_node.ports.train_backend import OptimizerSettings
    from prime_node.ports.train_samples import TrainSample
    from prime_protocol.weights import num_bytes

    vocab_size, length, count = (264, 12, 6) if step.dry else (151_936, 512, 32)
    draw = random.Random(0)
    tokens = [tuple(draw.randrange(vocab_size) for _ in range(length)) for _ in range(count)]
    samples = [TrainSample(one[:4], one[4:], (-5.0,) * (length - 4), draw.gauss(0.0, 1.0)) for one in tokens]
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(step, Path(folder))
        planned_bytes = trainer_memory(model_shape(model), TrainerLoad(compute_dtype="bf16")).device
        settings: dict[str, Any] = {"packing": Packing("sequences"), "device": step.device}
        ranks, placement = Ranks.single(device=step.device), Placement(compute_dtype="bf16")
        backend = TorchBackend(model, seed=1, ranks=ranks, placement=placement, **settings)
        start = backend.snapshot()
        on_cpu = TorchBackend(model, start, packing=Packing("sequences"))
    few = samples[:2]
    pairs = zip(backend.logprobs(few), on_cpu.logprobs(few), strict=True)
    step.at_most(
        "logprob_error", max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True)), 0.02
    )
    del on_cpu
    backend.new_optimizer(OptimizerSettings())
    objective, results = find_loss("aipo", constant_length=length), []

    def one_step() -> None:
        results.append(backend.train_step(samples, objective, lr=1e-5))

    step_seconds = step.seconds(one_step, repeat=4)
    step.at_most("losses_not_finite", float(sum(not abs(one.loss) < float("inf") for one in results)), 0)
    copied: dict[str, Any] = {}
    snapshot_seconds = step.seconds(lambda: copied.update(backend.snapshot()), repeat=1)
    if not step.dry:
        step.at_most("step_seconds", step_seconds, 0.5)
        peak = max(one.work["device_memory_bytes_max"] for one in results)
        step.at_most("memory_gb", peak / 1e9, 40)
        step.at_most("memory_of_plan", peak / planned_bytes, 1)
        step.at_least("snapshot_gb_per_second", num_bytes(copied) / 1e9 / snapshot_seconds, 1)


STEPS = {step.__name__: step for step in (imports, noise, attention, trainer, validator, vllm_v1, vllm_v2)}


def run(name: str, *, dry: bool) -> list[Check]:
    """Run a step, print its line and return its checks."""
    step, started = Step(dry), time.perf_counter()
    line: dict[str, Any] = {"step": name}
    try:
        need("torch", "numpy")
        if not dry and not importlib.import_module("torch").cuda.is_available():
            raise Skipped("needs an NVIDIA GPU that torch can use; --dry-run runs on the CPU")
        STEPS[name](step)
    except Skipped as skipped:
        line["skipped"] = str(skipped)
        found = [Check(f"{name}: runs here", 0, ">= 1", ok=False)]
    else:
        missed = [f"{check.name} {check.value:.4g}, bar {check.bar}" for check in step.checks if not check.ok]
        line |= {"ok": not missed, "values": step.values, "missed": missed}
        found = [replace(check, name=f"{name}: {check.name}") for check in step.checks]
    print(json.dumps(line | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)
    return found


def main() -> int:
    """Run one step, or all. Return 1 if a check is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*STEPS, "all"])
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU; no times")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON alone")
    arguments = parser.parse_args()
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    output = Output(as_json=True) if arguments.json else None
    names = STEPS if arguments.step == "all" else [arguments.step]
    checks = [check for name in names for check in run(name, dry=arguments.dry_run)]
    if output is not None:
        return output.finish(checks)
    return int(any(not check.ok for check in checks if not check.name.endswith(": runs here")))


if __name__ == "__main__":
    sys.exit(main())
