"""Size, speed and memory of the checkpoint codec and of other codecs, in one run.

    python scripts/bench/codec.py --quick                      synthetic checkpoints, under a minute
    python scripts/bench/checkpoints.py --out DIR              real ones, half an hour, once
    python scripts/bench/codec.py --checkpoints DIR            the recorded figures

Every codec is timed in turn inside each round, in processor time, so that a busy machine slows all of them alike; the table
shows medians and, after the sign, half the spread between the quartiles. Decoding means decoding and applying: in place to a copy
of the base, and into separate memory, as a worker does because it keeps the policy that it samples from. Before any
timing, each codec's result is compared with the new weights bit by bit. All tensors of a checkpoint are in one allocation, so
that these small ones are in huge pages, like those of a real model.

The same rounds measure the machine's own limits: the time to read each cache line of the base once, and the gain of a second
thread for copying memory, for hashing, for counting in registers, and for two processes that share nothing. `--json` prints only
the checks, for other tools. The exit code is 1 if a check missed its bar (stretch aims aside).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checks import Check, Output, at_least, at_most

sys.path.insert(0, str(Path(__file__).parent))

from baselines import MEMCPY, PULSE, XOR, ZIPNN, Codec, Weights, run
from bounds import delta_bounds, full_bound
from checkpoints import RATES, load, synthetic_pair
from codec_scaling import copy_of, read_once, repeated, scaling

from prime_protocol.checkpoint import RUN_CHUNKS
from prime_protocol.codec import Target, api, decode_chunks, encode_tensors, mode_of, warm_up

DENSE_RATE = 1e-4
QUICK_RATES = (1e-6, 3e-6, 1e-4)


@dataclass(frozen=True)
class Figure:
    """One codec on one pair of checkpoints, on one thread; speeds in GB/s of raw weights."""

    codec: str
    num_bytes: int
    encode: float
    encode_spread: float
    decode: float
    decode_spread: float
    beside: float
    """Decoding into other memory."""
    beside_spread: float


def ours(name: str, *, full: bool = False, portable: bool = False) -> Codec:
    """Our codec as deltas, as anchors, or as deltas on a machine without numba."""

    def encode(base: Weights, new: Weights, pool: Executor | None) -> list[Any]:
        with without_kernels(portable):
            tensors = ((new[key].reshape(-1), None if full else base[key].reshape(-1), "bf16") for key in new)
            return [(tensor, chunk) for tensor, chunk in encode_tensors(tensors, pool=pool)]

    def decode(blobs: list[Any], base: Weights, out: Weights, pool: Executor | None) -> None:
        flat = [tensor.reshape(-1) for tensor in out.values()]
        old = flat if out is base else [tensor.reshape(-1) for tensor in base.values()]
        targets = [Target(new, None if full else before, dtype="bf16") for new, before in zip(flat, old, strict=True)]

        def apply(batch: list[Any]) -> None:
            decode_chunks((chunk.data, chunk.start, chunk.count, targets[tensor]) for tensor, chunk in batch)

        with without_kernels(portable):
            run(pool, apply, [blobs[i : i + RUN_CHUNKS] for i in range(0, len(blobs), RUN_CHUNKS)])

    return Codec(name, encode, decode)


@contextlib.contextmanager
def without_kernels(wanted: bool) -> Iterator[None]:
    """Inside, the codec behaves as where numba is missing (if `wanted`)."""
    kept = api.KERNEL_ELEMENTS
    if wanted:
        api.KERNEL_ELEMENTS = 1 << 62
    yield
    api.KERNEL_ELEMENTS = kept


def total_bytes(blobs: list[Any]) -> int:
    return sum(
        blob.nbytes if isinstance(blob, np.ndarray) else len(blob[1].data if isinstance(blob, tuple) else blob)
        for blob in blobs
    )


def raw_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def measure(codecs: list[Codec], base: Weights, new: Weights, rounds: int) -> tuple[list[Figure], float]:
    """Time all codecs in turn on one thread, `rounds` times, after one round that checks them; and the GB/s of `read_once`."""
    times: dict[str, tuple[list[float], list[float], list[float]]] = {codec.name: ([], [], []) for codec in codecs}
    sizes, reads, beside = {}, [], copy_of(base)
    base = copy_of(base)
    for turn in range(rounds + 1):
        for codec in codecs:
            weights = copy_of(base)
            marks = [time.process_time()]
            blobs = codec.encode(base, new, None)
            marks.append(time.process_time())
            codec.decode(blobs, weights, weights, None)
            marks.append(time.process_time())
            codec.decode(blobs, base, beside, None)
            marks.append(time.process_time())
            if turn == 0:
                sizes[codec.name] = total_bytes(blobs)
                for name, tensor in new.items():
                    assert np.array_equal(weights[name], tensor), f"{codec.name} changed {name}"
                    assert np.array_equal(beside[name], tensor), f"{codec.name} changed {name} beside its base"
                continue
            for taken, begin, end in zip(times[codec.name], marks[:-1], marks[1:], strict=True):
                taken.append(end - begin)
        begin_s = time.process_time()
        read_once(weights)
        reads.append(time.process_time() - begin_s)
    gigabytes = raw_bytes(new) / 1e9
    figures = [
        Figure(name, sizes[name], *(number for taken in columns for number in speed(taken, gigabytes)))
        for name, columns in times.items()
    ]
    return figures, gigabytes / statistics.median(reads[1:])


def speed(seconds: list[float], gigabytes: float) -> tuple[float, float]:
    """Median GB/s and half the distance between the quartiles."""
    rates = sorted(gigabytes / s for s in seconds)
    quartiles = statistics.quantiles(rates, n=4) if len(rates) > 1 else [rates[0]] * 3
    return statistics.median(rates), (quartiles[2] - quartiles[0]) / 2


def bench_deltas(
    name: str, base: Weights, new: Weights, rate: float, rounds: int, patience_s: float | None, out: Report
) -> None:
    """Measure deltas.

    Without `patience_s`, speeds that are close have no bar: two threads against one, PULSE, dense deltas. These need large
    checkpoints and quiet rounds.
    """
    bounds = delta_bounds(base, new)
    elements = bounds["elements"]
    density = bounds["changes"] / elements
    codecs = [MEMCPY, ours("ours"), XOR, PULSE, ours("ours, no numba", portable=True)]
    figures, reading = measure(codecs, base, new, rounds)
    single = {f.codec: f for f in figures}
    modes = Counter(mode_of(c.data).name for _, c in ours("").encode(base, new, None))
    out.section(
        f"delta, {name}: {100 * density:.2f} % changed, {100 * bounds['units'] / bounds['changes']:.0f} % of them by one unit; "
        f"B0 {bounds['b0'] / elements:.4f}, B1 {bounds['b1'] / elements:.4f} bits per parameter; "
        + ", ".join(f"{count} {mode}" for mode, count in sorted(modes.items()))
    )
    out.table(figures, elements)
    out.line(f"\nReading each cache line of the base once: {reading:.2f} GB/s")
    mine, bits = single["ours"], 8 * single["ours"].num_bytes
    if density < 0.2:
        out.check(f"{name}: size / B0", bits / bounds["b0"], "<=", 0.78)
        out.check(f"{name}: size / PULSE", mine.num_bytes / single["pulse"].num_bytes, "<=", 0.30)
        out.check(f"{name}: size / XOR+zstd-1", mine.num_bytes / single["xor+zstd-1"].num_bytes, "<=", 0.36)
    out.check(f"{name}: size / B1", bits / bounds["b1"], "<=", 1.07)
    if density <= 0.025:
        for other in ("xor+zstd-1",) if patience_s is None else ("xor+zstd-1", "pulse"):
            out.check(f"{name}: decode beside the base / {other}", mine.beside / single[other].beside, ">=", 1.0)
            out.check(f"{name}: decode in place / {other}", mine.decode / single[other].decode, ">=", 1.0)
            out.check(f"{name}: encode / {other}", mine.encode / single[other].encode, ">=", 1.0)
        out.check(f"{name}: decode in place / memcpy (stretch)", mine.decode / single["memcpy"].decode, ">=", 0.4)
        if patience_s is not None:
            gains = scaling(ours("ours"), repeated(base, elements), repeated(new, elements), rounds, patience_s)
            out.line(
                "\nTwo threads against one: " + ", ".join(f"{key} {value:.2f}x" for key, value in gains.of.items())
            )
            out.line(
                f"(the {gains.counted} quietest of {gains.tried} rounds: others took at most {gains.others:.2f} of a processor)"
            )
            for direction in ("encode", "decode", "decode in place"):
                out.check(f"{name}: two threads, {direction}", gains.of[direction], ">=", 1.6)
    elif rate == DENSE_RATE and patience_s is not None:
        out.check(f"{name}: decode / xor+zstd-1", mine.decode / single["xor+zstd-1"].decode, ">=", 1.0)
        out.check(f"{name}: encode / xor+zstd-1", mine.encode / single["xor+zstd-1"].encode, ">=", 1.0)


def bench_anchor(name: str, new: Weights, rounds: int, out: Report) -> None:
    bound = full_bound(new)
    elements = sum(tensor.size for tensor in new.values())
    empty = {key: np.zeros_like(tensor) for key, tensor in new.items()}
    codecs = [MEMCPY, ours("ours", full=True), *([ZIPNN] if ZIPNN else [])]
    figures = {f.codec: f for f in measure(codecs, empty, new, rounds)[0]}
    out.section(f"anchor, {name}: bound {bound / elements:.3f} bits per parameter")
    out.table(list(figures.values()), elements)
    mine = figures["ours"]
    out.check("anchor: size / exponent entropy", 8 * mine.num_bytes / bound, "<=", 1.01)
    if "zipnn" in figures:
        out.check("anchor: decode / ZipNN", mine.decode / figures["zipnn"].decode, ">=", 1.5)
        out.check("anchor: encode / ZipNN", mine.encode / figures["zipnn"].encode, ">=", 1.0)


def bench_memory(streamed_gb: float, published_gb: float, out: Report) -> None:
    program = Path(__file__).with_name("codec_memory.py")
    out.section("memory")
    for what, gigabytes in (("stream", streamed_gb), ("publish", published_gb)):
        command = [sys.executable, str(program), what, str(gigabytes)]
        figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        out.line(
            f"{what}: {figures['gb']:.1f} GB of weights as {figures['sent_gb']:.3f} GB of chunks, encoded and decoded by "
            f"{figures['threads']:.0f} threads in {figures['seconds']:.1f} s: {figures['extra_mib']:.1f} MiB of extra memory  "
        )
        rooms = {"stream": 0, "publish": 32}[what]  # a part of 16 MiB that fills, and one that is read
        out.check(f"extra MiB to {what}, per thread", (figures["extra_mib"] - rooms) / figures["threads"], "<=", 32)


def bench_start(out: Report) -> None:
    """Measure the start-up cost of a short-lived process: importing the codec, and its first large chunk."""
    program = (
        "import time; t = time.process_time(); import numpy; n = time.process_time()\n"
        "import prime_protocol.codec as c; i = time.process_time(); c.warm_up(); w = time.process_time()\n"
        "print(n - t, i - n, w - i)"
    )

    def times(**extra: str) -> list[float]:
        command, environment = [sys.executable, "-c", program], os.environ | extra
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return [float(number) for number in done.stdout.split()]

    with tempfile.TemporaryDirectory() as empty:
        compiling = times(NUMBA_CACHE_DIR=empty)[2]
        numpy_s, codec_s, loading = map(
            statistics.median, zip(*(times(NUMBA_CACHE_DIR=empty) for _ in range(3)), strict=True)
        )
    out.section("start of a process, seconds of processor time")
    out.line(
        f"numpy {numpy_s:.2f}, codec without kernels {codec_s:.2f} more, numba and kernels from its cache {loading:.2f} more; "
        f"compiling them once {compiling:.1f}"
    )


class Report:
    """Collects checks and prints the tables."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def line(self, text: str) -> None:
        print(text, flush=True)

    def section(self, title: str) -> None:
        self.line(f"\n### {title}\n")

    def table(self, figures: list[Figure], elements: float) -> None:
        self.line(
            "| codec | bits per parameter | ratio | encode GB/s | decode in place | beside the base |\n|---|---|---|---|---|---|"
        )
        for f in figures:
            self.line(
                f"| {f.codec} | {8 * f.num_bytes / elements:.4f} | {2 * elements / f.num_bytes:.1f}x "
                f"| {f.encode:.2f} ± {f.encode_spread:.2f} | {f.decode:.2f} ± {f.decode_spread:.2f} "
                f"| {f.beside:.2f} ± {f.beside_spread:.2f} |"
            )

    def check(self, name: str, value: float, relation: str, bar: float) -> None:
        self.checks.append(at_most(name, value, bar) if relation == "<=" else at_least(name, value, bar))


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{model[1] if model else platform.processor()}, Python {platform.python_version()}, numpy {np.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="synthetic checkpoints of 4 M parameters")
    parser.add_argument("--checkpoints", type=Path, help="folder that checkpoints.py wrote")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="these learning rates alone, an anchor at the last; no memory"
    )
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds (7, or 5 with --quick)")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    if not options.quick and options.checkpoints is None:
        parser.error("give --quick, or --checkpoints DIR")
    output, report = Output(as_json=options.json), Report()
    report.line(f"{hardware()}; {time.strftime('%Y-%m-%d')}")
    warm_up()
    rounds = options.rounds or (5 if options.quick else 7)
    for rate in options.rates or (QUICK_RATES if options.quick else RATES):
        if options.quick:
            base, new = synthetic_pair(rate)
            name = f"synthetic lr {rate:g}"
        else:
            files = sorted((options.checkpoints / f"lr{rate:g}").glob("step*.npz"))
            base, new = load(files[-2]), load(files[-1])
            name = f"lr {rate:g}"
        bench_deltas(name, base, new, rate, rounds, None if options.quick else 30.0, report)
    bench_anchor(name, new, rounds, report)
    if not options.rates:
        bench_memory(1.0 if options.quick else 14.0, 0.2 if options.quick else 1.0, report)
        bench_start(report)
    report.section("checks")
    return output.finish(report.checks)


if __name__ == "__main__":
    sys.exit(main())
