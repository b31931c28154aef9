"""Speed of `prime-node verify` and of raw hashing of the same files, in one run.

    python scripts/bench/verify.py --quick          a policy of 300 MB, under a minute
    python scripts/bench/verify.py                  600 MB

A published folder is generated: an anchor and a delta of a model with Gaussian weights in bf16, signed and chained as a trainer
would. Every figure is taken in turn inside each round, those of a few milliseconds five times; the table shows medians and, after
the sign, half the spread between the quartiles. Rates and shares are of the best time, which a busy machine disturbs least. The
files are read once before, so the disk plays no part: raw hashing reads the same files from the same cache. "published" are the
bytes of the parts, "weights" those that they decode to.

Work of verify beyond one pass of hashing: a second one over each chunk, decoding, and a third one over the decoded weights.
"hashing" is verify's reader alone. `--json` prints the checks alone; the exit code is 1 if one missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from checks import Output, at_least, at_most
from memory import peak_bytes

from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.broadcast.audit.audit import Verified, audit
from prime_node.broadcast.audit.compare import compare
from prime_node.broadcast.audit.export import export_checkpoint
from prime_node.broadcast.audit.one_tensor import prove_tensor
from prime_node.broadcast.audit.safetensors_file import read_weights
from prime_node.broadcast.audit.verified_parts import PARTS_AT_ONCE, bound_threads, feed_parts
from prime_protocol.assignment import Sampling
from prime_protocol.checkpoint import CheckpointDecoder, encode_checkpoint, root_of_table, tensor_table
from prime_protocol.chunk_index import open_index
from prime_protocol.codec import warm_up
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.manifest import (
    BasePolicy,
    Manifest,
    Provenance,
    SignedManifest,
    open_manifest,
    sign_manifest,
)
from prime_protocol.run_spec import EnvironmentSpec, ModelFile, PinnedRun, RunSpec, open_run_spec
from prime_protocol.weights import Weights, WeightTensor, num_bytes

T = TypeVar("T")
KEY = SigningKey(bytes(32))
CONFIG = b'{"model_type": "bench"}'
TENSORS = 24
HASHING = ("raw1", "raw", "hashing")
PASSES = 3
"""Passes over all parts in the figures that only hash, in place of a larger checkpoint, which would take too long."""
HASHING_SHARE_MIN = 0.8
"""Share of raw hashing with as many threads. Starting an event loop and passing parts on costs some milliseconds at any size."""
EXTRA_BYTES_MAX = 256 * 2**20
"""Memory of an audit beyond the weights themselves and what the interpreter holds."""


def make_weights(elements: int) -> Weights:
    """Gaussian bf16 weights in TENSORS matrices."""
    rng = np.random.default_rng(0)
    rows = elements // TENSORS // 1024
    weights = {}
    for number in range(TENSORS):
        values = rng.standard_normal(rows * 1024, np.float32) * np.float32(0.02)
        weights[f"layer.{number}.weight"] = WeightTensor(
            "bf16", (rows, 1024), (values.view(np.uint32) >> 16).astype(np.uint16)
        )
    return weights


def next_policy(weights: Weights) -> Weights:
    """One element in a hundred moves by one unit in the last place."""
    rng = np.random.default_rng(1)
    changed = {}
    for name, tensor in weights.items():
        data = tensor.data.copy()
        data[rng.integers(0, data.size, data.size // 100)] += 1
        changed[name] = WeightTensor(tensor.dtype, tensor.shape, data)
    return changed


def make_run() -> PinnedRun:
    keys = (KEY.key_id,)
    spec = RunSpec(
        name="bench",
        created_at_ms=0,
        keys=RoleKeys(root=keys, coordinator=keys, trainer=keys, validator=keys),
        model_files=(ModelFile(name="config.json", digest=digest_of(CONFIG), size=len(CONFIG)),),
        vocab_size=16,
        environments=(EnvironmentSpec(name="toy", id="toy"),),
        sampling=Sampling(completion_tokens_max=8, stop_token_ids=(15,)),
        max_steps=10,
        groups_per_step=1,
        rollouts_per_group=1,
    )
    envelope = seal(spec, PayloadType.RUN_SPEC, KEY)
    return open_run_spec(envelope, pinned=envelope.digest)


def publish(
    folder: Path, run: PinnedRun, weights: Weights, previous: tuple[SignedManifest, Weights] | None
) -> SignedManifest:
    """Add a policy to a published folder: an anchor first, then deltas."""
    base = None if previous is None else previous[0]
    against = None
    if previous is not None:
        held = previous[0].manifest
        against = BasePolicy(policy_version=held.policy_version, state_root=held.state_root), previous[1]
    encoded = encode_checkpoint(weights, against)
    tensors = tensor_table(weights)
    version = 0 if base is None else base.manifest.policy_version + 1
    signed = sign_manifest(
        Manifest(
            run=run.digest,
            policy_version=version,
            previous=None if base is None else base.digest,
            model_config_digest=digest_of(CONFIG),
            state_root=root_of_table(tensors),
            tensors=tensors,
            encodings=(encoded.encoding,),
            produced_by=Provenance(
                step=version - 1,
                optimizer_steps=version,
                batch=None if base is None else digest_of(b"batch"),
                software="bench",
            ),
            created_at_ms=0,
        ),
        KEY,
    )
    for data in (*encoded.blobs, CONFIG):
        path = folder / "blobs" / digest_of(data)[:2] / digest_of(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "manifests").mkdir(exist_ok=True)
    (folder / "run.json").write_bytes(run.envelope.to_bytes())
    (folder / f"manifests/{version:08d}.json").write_bytes(signed.envelope.to_bytes())
    (folder / "head.json").write_bytes(signed.envelope.to_bytes())
    return signed


async def _bounded(work: Coroutine[None, None, T]) -> T:
    """Await `work` with the command's bound on threads."""
    bound_threads()
    return await work


class Nothing:
    """Takes parts and leaves them."""

    def feed_part(self, index: int, data: bytes | memoryview) -> None:
        pass


class Bench:
    """One published folder and everything that is timed on it."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self.source = FolderSource(folder)
        pinned = open_run_spec(asyncio.run(self.source.run_spec()), pinned=run)
        self.anchor, self.delta = (open_manifest(asyncio.run(self.source.manifest(n)), pinned).manifest for n in (0, 1))
        self.paths = [folder / "blobs" / part.digest[:2] / part.digest for part in self.anchor.encodings[0].parts]
        self.pool = ThreadPoolExecutor(PARTS_AT_ONCE)
        self.verified: list[Verified] = []

    def hash_files(self, *, threads: bool) -> None:
        def one(path: Path) -> str:
            return digest_of(path.read_bytes())

        paths = self.paths * PASSES
        digests = list(self.pool.map(one, paths) if threads else map(one, paths))
        assert digests == [part.digest for part in self.anchor.encodings[0].parts] * PASSES

    def hash_as_verify(self) -> None:
        parts = self.anchor.encodings[0].parts * PASSES
        asyncio.run(_bounded(feed_parts(self.source, parts, Nothing(), what="policy 0")))

    def decode(self) -> None:
        """All parts at hand, the chunks hashed and decoded; tensors are not hashed."""
        (encoding,) = self.anchor.encodings
        index = open_index(asyncio.run(self.source.blob(encoding.index.digest)), encoding, self.anchor.tensors)
        decoder = CheckpointDecoder(self.anchor, encoding, index)
        parts = [path.read_bytes() for path in self.paths]
        self.began_s = time.perf_counter()
        list(self.pool.map(decoder.feed_part, range(len(parts)), parts))

    def verify(self, policy_version: int) -> None:
        self.verified.clear()
        report = asyncio.run(
            _bounded(audit(self.source, self.run, policy_version=policy_version, on_verified=self.verified.append))
        )
        assert report.passed, report.failure

    def prove(self) -> None:
        report, proof = asyncio.run(_bounded(prove_tensor(self.source, self.run, "layer.3.weight", policy_version=0)))
        assert report.passed, report.failure
        assert proof is not None

    def export(self, folder: Path) -> None:
        export_checkpoint(self.verified[0], folder, software="bench")

    def compare(self, exported: Path) -> None:
        assert compare(self.verified[0].weights, read_weights(exported)).equal

    def seconds(self, call: Callable[[], None]) -> float:
        self.began_s = time.perf_counter()
        call()
        return time.perf_counter() - self.began_s


def measure(bench: Bench, rounds: int, scratch: Path) -> dict[str, list[float]]:
    """Seconds of each figure, round by round."""
    taken: dict[str, list[float]] = {}
    out = scratch / "out"
    steps: dict[str, Callable[[], None]] = {
        "raw1": lambda: bench.hash_files(threads=False),
        "raw": lambda: bench.hash_files(threads=True),
        "hashing": bench.hash_as_verify,
        "decode": bench.decode,
        "delta": lambda: bench.verify(1),
        "verify": lambda: bench.verify(0),
        "export": lambda: bench.export(out),
        "compare": lambda: bench.compare(out),
        "tensor": bench.prove,
    }
    for number in range(rounds + 1):
        for name in [*HASHING] * 5 + ["decode", "delta", "verify", "export", "compare", "tensor"]:
            seconds = bench.seconds(steps[name]) / (PASSES if name in HASHING else 1)
            if number:  # the first round warms caches
                taken.setdefault(name, []).append(seconds)
        shutil.rmtree(out)
    return taken


def peak_extra_bytes(folder: Path, run: str) -> int:
    """In a process of its own: memory at the audit's peak, less what was held before and the weights."""
    done = subprocess.run(
        [sys.executable, __file__, "--audit", str(folder), run], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def audit_alone(folder: Path, run: str) -> int:
    bench = Bench(folder, run)
    warm_up()
    before = peak_bytes()
    bench.verify(0)
    return peak_bytes() - before - num_bytes(bench.verified[0].weights)


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    name = model[1] if model else platform.processor()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, {PARTS_AT_ONCE} parts at once"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="150 M parameters instead of 300 M")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds (9, or 5 with --quick)")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--audit", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.audit:
        print(audit_alone(Path(options.audit[0]), options.audit[1]))
        return 0
    output = Output(as_json=options.json)
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        folder, run = Path(scratch) / "public", make_run()
        folder.mkdir()
        weights = make_weights(150_000_000 if options.quick else 300_000_000)
        raw_bytes = num_bytes(weights)
        publish(folder, run, next_policy(weights), (publish(folder, run, weights, None), weights))
        del weights
        bench = Bench(folder, run.digest)
        taken = measure(bench, options.rounds or (5 if options.quick else 9), Path(scratch))
        extra = peak_extra_bytes(folder, run.digest)
        sent, sent_delta = bench.anchor.encodings[0].sent_bytes, bench.delta.encodings[0].sent_bytes
    share = min(taken["raw"]) / min(taken["hashing"])
    checks = [
        at_least("verify's hashing, share of raw hashing on as many threads", share, HASHING_SHARE_MIN),
        at_most("memory beyond the weights, MiB", extra / 2**20, EXTRA_BYTES_MAX / 2**20),
    ]
    print(f"{hardware()}; {time.strftime('%Y-%m-%d')}")
    print(f"anchor: {sent / 1e6:.0f} MB for {raw_bytes / 1e6:.0f} MB of weights; delta: {sent_delta / 1e6:.1f} MB\n")
    print("| | seconds | best | GB/s published | GB/s weights |\n|---|---|---|---|---|")
    titles = {
        "raw1": "raw: read and BLAKE3, one thread",
        "raw": f"raw: read and BLAKE3, {PARTS_AT_ONCE} threads",
        "hashing": "verify's reader: hashing alone",
        "decode": "chunks hashed and decoded, parts in memory",
        "verify": "verify of the anchor, all checks",
        "delta": "verify of the delta, its anchor included",
        "compare": "--against, beyond the audit",
        "export": "--export, beyond the audit (SHA-256, fsync)",
        "tensor": "--tensor, 1 of 24 tensors",
    }
    for name, title in titles.items():
        seconds = taken[name]
        middle = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [middle] * 3
        part = 1 / TENSORS if name == "tensor" else 1.0
        published = (sent + (sent_delta if name == "delta" else 0)) * part / 1e9
        print(
            f"| {title} | {middle:.3f} ± {(quartiles[2] - quartiles[0]) / 2:.3f} | {min(seconds):.3f} "
            f"| {published / min(seconds):.2f} | {raw_bytes * part / 1e9 / min(seconds):.2f} |"
        )
    return output.finish(checks)


if __name__ == "__main__":
    sys.exit(main())
