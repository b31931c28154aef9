"""What a second thread gains the codec, beside what this machine has to give: for codec.py."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from baselines import Codec, Weights, run

from prime_protocol.codec.kernels.base import kernel
from prime_protocol.codec.kernels.words import population

SCALING_ELEMENTS = 1 << 25
COUNTED_TIMES = 2000


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


@kernel
def count_ones(words: Any) -> Any:
    """The set bits of what lies in the cache, many times over: what two processors do side by side that need no memory."""
    total = np.int64(0)
    for turn in range(COUNTED_TIMES):
        for at in range(words.size):
            total += population(words[at] ^ np.uint64(turn))
    return total


def read_once(weights: Weights) -> None:
    """A load of each cache line, and nothing else: what no codec that looks at its base can be faster than."""
    for tensor in weights.values():
        touch(tensor.reshape(-1))


def scaling(codec: Codec, base: Weights, new: Weights, rounds: int) -> dict[str, float]:
    """How much sooner two threads are done than one: median of the rounds.

    Beside them what the machine had to give: two processes with half each that share nothing, and two threads or processes that
    only hash or count in the cache, or copy or read memory. Two processors that are threads of one core, or a busy machine, give
    far less than two.
    """
    block, cached = bytes(4 << 20), np.arange(1 << 12, dtype=np.uint64)
    count_ones(cached)
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
            "memcpy in processes": (
                lambda: in_processes([lambda: copy(one, new)]),
                lambda: in_processes([partial(copy, *pair) for pair in zip(halves(two), halves(new), strict=True)]),
            ),
            "reading": (lambda: read_once(one), lambda: run(pool, read_once, halves(two))),
            "reading in processes": (
                lambda: in_processes([lambda: read_once(one)]),
                lambda: in_processes([partial(read_once, half) for half in halves(two)]),
            ),
            "counting in the cache": (
                lambda: run(None, count_ones, [cached] * 8),
                lambda: run(pool, count_ones, [cached] * 8),
            ),
        }
        for _ in range(rounds):
            for name, (alone, together) in pairs.items():
                ratios.setdefault(name, []).append(seconds(alone) / seconds(together))
    return {name: statistics.median(values) for name, values in ratios.items()}


def copy(out: Weights, weights: Weights) -> None:
    for tensor, source in zip(out.values(), weights.values(), strict=True):
        np.copyto(tensor, source)


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
