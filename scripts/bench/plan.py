"""Time and memory of a training step for 8B, 32B and 70B models on 8 to 256 GPUs, from lab/prime_lab/planner.py's formula.

    .venv/bin/python scripts/bench/plan.py [--quick] [--json]

The benchmark measures the parts of the formula that this machine can measure: the FLOPs of a forward and backward pass as torch
counts them, the bytes that each rank holds between two steps, and the time of a step from this machine's own speed of matrix
products.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from checks import Check, Output
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tensors_world import held_bytes

from prime_lab.planner import SHAPES, Load, Shape, model_flops, plan, state_bytes
from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.shares import Packing
from prime_node.ports.train_samples import TrainSample

HIDDEN, LAYERS, HEADS, INTERMEDIATE = 512, 4, 8, 1_536
SEQUENCES, LENGTH = 4, 256
GPUS = (8, 16, 32, 64, 128, 256)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    arguments = parser.parse_args()
    output = Output(as_json=arguments.json)
    torch.set_num_threads(1)
    table = {f"{name} on {gpus}": _row(name, gpus) for name in SHAPES for gpus in GPUS}
    checks, others = measure(repeats=3 if arguments.quick else 7)
    print("a step of 512 sequences of 8,192 tokens, activations computed again, H100 in nodes of 8, 400 Gbit/s a GPU")
    columns = ("step s", "compute", "traffic", "waiting", "copy ms", "GB a GPU", "MFU")
    print(f"{'':12}" + "".join(f"{column:>10}" for column in columns))
    for name, row in table.items():
        fits = "" if row["memory_gb"] < 80 else "  does not fit"
        values = (*(row[key] for key in ("step_s", "compute_s", "traffic_s", "wait_s")), 1e3 * row["copy_s"])
        print(f"{name:12}" + "".join(f"{value:10.2f}" for value in (*values, row["memory_gb"], row["mfu"])) + fits)
    for what, value in others.items():
        print(f"{what}: {value:.3f}")
    return output.finish(checks)


def _row(name: str, gpus: int) -> dict[str, float]:
    found = plan(SHAPES[name], gpus)
    return {
        "step_s": found.step_s,
        "compute_s": found.compute_s,
        "traffic_s": found.traffic_s,
        "wait_s": found.wait_s,
        "copy_s": found.copy_s,
        "memory_gb": found.memory_bytes / 1e9,
        "mfu": model_flops(SHAPES[name], Load()) / (found.step_s * gpus * 989e12),
    }


def measure(*, repeats: int) -> tuple[list[Check], dict[str, float]]:
    """Return what this machine can check of the formula, as measured / predicted, and figures without a bar."""
    folder = Path(tempfile.mkdtemp())
    for name, data in tiny_model_files(
        hidden_size=HIDDEN, num_layers=LAYERS, num_heads=HEADS, intermediate_size=INTERMEDIATE
    ).items():
        (folder / name).write_bytes(data)
    ranks, before = Ranks.single(device="cpu"), held_bytes()
    backend = TorchBackend(folder, ranks=ranks, packing=Packing.SEQUENCES, threads=1)
    generator = torch.Generator().manual_seed(0)
    samples = [
        TrainSample(
            tuple(torch.randint(0, 256, (2,), generator=generator).tolist()),
            tuple(torch.randint(0, 256, (LENGTH - 1,), generator=generator).tolist()),
            (-5.0,) * (LENGTH - 1),
            1.0,
        )
        for _ in range(SEQUENCES)
    ]
    parameters = backend.published_bytes / 2
    embedded = 264.0 * HIDDEN  # the embedding's rows are read, not multiplied
    shape = Shape(parameters - embedded, LAYERS, HIDDEN, 264)
    load = Load(tokens=SEQUENCES * LENGTH, sequence_tokens=LENGTH, pass_tokens=SEQUENCES * LENGTH, recompute=False)
    loss = find_loss("aipo")
    with FlopCounterMode(display=False) as counter:
        backend.train_step(samples, loss, lr=1e-5)
    flops = model_flops(shape, load)
    speed = _matmul_flops(repeats)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        stats = backend.train_step(samples, loss, lr=1e-5)
        seconds.append(time.perf_counter() - began)
    held = held_bytes() - before
    passes_s = stats.work["passes_seconds"]
    step_s = statistics.median(seconds)
    checks = [
        _check("FLOPs of a step, counted by torch / 6 P T + 6 L h s T", counter.get_total_flops() / flops, 0.9, 1.1),
        _check(
            "bytes held between steps / 20 P (gradients are freed, so 16 P)",
            held / state_bytes(parameters, 1),
            0.79,
            1.01,
        ),
        _check("seconds of a step / FLOPs at this machine's matmul speed", step_s / (flops / speed), 0.9, 2.5),
    ]
    return checks, {"share of the step in passes": passes_s / step_s, "matmul GFLOP/s, one thread, fp32": speed / 1e9}


def _matmul_flops(repeats: int) -> float:
    """Return the FLOPs per second of the model's largest matrix product."""
    left, right = torch.randn(SEQUENCES * LENGTH, HIDDEN), torch.randn(HIDDEN, INTERMEDIATE)
    seconds = []
    for _ in range(5 * repeats):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2.0 * SEQUENCES * LENGTH * HIDDEN * INTERMEDIATE / statistics.median(seconds)


def _check(name: str, value: float, low: float, high: float) -> Check:
    return Check(name, value, f"{low} to {high}", low <= value <= high)


if __name__ == "__main__":
    raise SystemExit(main())
