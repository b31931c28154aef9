"""Memory that encoding and decoding take in addition to the weights. scripts/bench/codec.py runs it as a separate process.

    python scripts/bench/codec_memory.py stream 14    a checkpoint of 14 GB, one tensor at a time in memory
    python scripts/bench/codec_memory.py publish 1    1 GB of weights as the trainer publishes them, and back

Prints JSON. `extra_mib` is the highest resident memory less the memory resident before: kernels, weights, and room for the
result.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from checkpoints import synthetic_pair
from memory import peak_bytes, reset_peak

from prime_node.broadcast.publish.disk_room import PartSpool
from prime_protocol.checkpoint import encode_parts
from prime_protocol.chunk_index import open_index
from prime_protocol.codec import decode_chunk, encode_tensors, warm_up
from prime_protocol.manifest import BasePolicy, TensorEntry
from prime_protocol.weights import WeightTensor, num_bytes

THREADS = 2


def stream(gigabytes: float) -> dict[str, float]:
    """Encode and decode a checkpoint of `gigabytes`, tensor by tensor."""
    base, new = synthetic_pair(3e-6, elements=1 << 24)
    old, young = base["mlp"].reshape(-1), new["mlp"].reshape(-1)
    out = np.zeros_like(old)
    pool = ThreadPoolExecutor(THREADS)
    before, size, sent = reset_peak(), 0, 0
    begin = time.perf_counter()

    def tensors() -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
        for _ in range(max(1, int(gigabytes * 1e9 / old.nbytes))):
            yield young, old, "bf16"

    def apply(chunk: Any) -> None:
        decode_chunk(chunk.data, out, old, dtype="bf16", start=chunk.start, count=chunk.count)

    for _, chunk in encode_tensors(tensors(), pool=pool):
        pool.submit(apply, chunk).result()
        size, sent = size + 2 * chunk.count, sent + len(chunk.data)
    assert np.array_equal(out, young)
    return result(size, sent, begin, before)


def publish(gigabytes: float) -> dict[str, float]:
    """An anchor and a delta, part by part through the spool, and back."""
    old, young = synthetic_pair(3e-6, elements=1 << 24)
    times = max(1, round(gigabytes * 1e9 / (2 << 24)))
    weights = {
        f"{turn}.{name}": WeightTensor("bf16", tensor.shape, tensor.reshape(-1).copy())
        for turn in range(times)
        for name, tensor in young.items()
    }
    base = {name: WeightTensor("bf16", t.shape, old[name.split(".")[1]].reshape(-1)) for name, t in weights.items()}
    out = {name: np.zeros_like(tensor.data) for name, tensor in weights.items()}
    table = [TensorEntry(name=n, dtype=t.dtype, shape=t.shape, digest="0" * 64) for n, t in weights.items()]
    names, before, sent = list(weights), reset_peak(), 0
    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool, PartSpool(Path(tempfile.gettempdir())) as spool:
        for named in (None, (BasePolicy(policy_version=0, state_root="0" * 64), base)):
            encoding, packed = encode_parts(weights, named, keep=spool.keep, pool=pool)
            index, sent = open_index(packed, encoding, table), sent + encoding.sent_bytes
            for number, part in enumerate(encoding.parts):
                data = memoryview(spool.read(part))
                for chunk in (index[i] for i in index.of_part(number)):
                    name, piece = names[chunk.tensor], data[chunk.offset : chunk.offset + chunk.size]
                    source = None if named is None else base[name].data
                    decode_chunk(piece, out[name], source, dtype="bf16", start=chunk.start, count=chunk.count)
            assert all(np.array_equal(out[name], tensor.data) for name, tensor in weights.items())
    return result(2 * num_bytes(weights), sent, begin, before)


def result(size: int, sent: int, begin: float, before: int) -> dict[str, float]:
    return {
        "gb": size / 1e9,
        "sent_gb": sent / 1e9,
        "seconds": time.perf_counter() - begin,
        "extra_mib": (peak_bytes() - before) / 2**20,
        "threads": THREADS,
    }


if __name__ == "__main__":
    warm_up()
    print(json.dumps({"stream": stream, "publish": publish}[sys.argv[1]](float(sys.argv[2]))))
