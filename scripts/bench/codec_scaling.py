"""What a second thread gains the codec, beside what this machine has to give: for codec.py."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from baselines import Codec, Weights, run

from prime_protocol.codec.kernels.base import kernel

SCALING_ELEMENTS = 1 << 25


def copy_of(weights: Weights) -> Weights:
    """All tensors in one allocation, each on a cache line of its own."""
    spans = {name: -(-tensor.nbytes // 64) * 64 for name, tensor in weights.items()}
    memory, copies = np.empty(sum(spans.values()) + 64, np.uint8), {}
    at = -memory.ctypes.data % 64
    for name, tensor in weights.items():
        copies[name] = memory[at : at + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        np.copyto(copies[name], tensor)
        at += spans[name]
    return copies


@kernel
def touch(words: Any) -> Any:
    """The sum of a word from each line of 64 bytes: a sum, so that the compiler does not leave the loads out."""
    total = np.uint64(0)
    for at in range(0, words.size, 32):
        total += words[at]
    return total


def read_once(weights: Weights) -> None:
    """A load of each cache line, and nothing else: what no codec that looks at its base can be faster than."""
    for tensor in weights.values():
        touch(tensor.reshape(-1))


def scaling(codec: Codec, base: Weights, new: Weights, rounds: int) -> dict[str, float]:
    """How much sooner two threads are done than one: median of the rounds.

    Beside them what the machine had to give: two processes with half each that share nothing, and two threads that only hash,
    copy or read memory. Two processors that are threads of one core, or a busy machine, give far less than two.
    """
    block = bytes(4 << 20)
    ratios: dict[str, list[float]] = {}

    def seconds(work: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    with ThreadPoolExecutor(2) as pool:
        blobs, one, two = codec.encode(base, new, pool), copy_of(base), copy_of(base)
        parts = [codec.encode(part, changed, None) for part, changed in zip(halves(one), halves(new), strict=True)]
        codec.decode(blobs, base, one, pool)
        codec.decode(blobs, base, two, pool)

        def encoding(part: Weights) -> Callable[[], Any]:
            return lambda: codec.encode(base, part, None)

        def decoding(blobs: list[Any], old: Weights, out: Weights) -> Callable[[], Any]:
            return lambda: codec.decode(blobs, old, out, None)

        shares = list(zip(parts, halves(base), halves(two), strict=True))
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "encode": (lambda: codec.encode(base, new, None), lambda: codec.encode(base, new, pool)),
            "decode": (decoding(blobs, base, one), lambda: codec.decode(blobs, base, two, pool)),
            "encode in processes": (
                lambda: in_processes([encoding(new)]),
                lambda: in_processes([encoding(part) for part in halves(new)]),
            ),
            "decode in processes": (
                lambda: in_processes([decoding(blobs, base, one)]),
                lambda: in_processes([decoding(*share) for share in shares]),
            ),
            "hashing": (
                lambda: run(None, hashlib.sha256, [block] * 8),
                lambda: run(pool, hashlib.sha256, [block] * 8),
            ),
            "memcpy": (
                lambda: run(None, np.copyto, one.values(), new.values()),
                lambda: run(pool, np.copyto, two.values(), new.values()),
            ),
            "reading": (lambda: read_once(one), lambda: run(pool, read_once, halves(two))),
        }
        for _ in range(rounds):
            for name, (alone, together) in pairs.items():
                ratios.setdefault(name, []).append(seconds(alone) / seconds(together))
    return {name: statistics.median(values) for name, values in ratios.items()}


def halves(weights: Weights) -> list[Weights]:
    return [dict(list(weights.items())[turn::2]) for turn in range(2)]


def in_processes(works: list[Callable[[], Any]]) -> None:
    """Each work in a process of its own."""
    children = []
    for work in works:
        child = os.fork()
        if not child:
            work()
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def repeated(weights: Weights, elements: float) -> Weights:
    """The same tensors several times over, so that a small checkpoint keeps two threads busy for long enough."""
    times = max(1, round(SCALING_ELEMENTS / elements))
    return {f"{name} {turn}": tensor for turn in range(times) for name, tensor in weights.items()}
