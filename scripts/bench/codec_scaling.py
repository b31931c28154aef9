"""Gain of a second thread for the codec, compared with this machine's own limit. Used by codec.py."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from baselines import Codec, Weights, run
from blake3 import blake3

from prime_protocol.codec.kernels.base import kernel

SCALING_ELEMENTS = 1 << 26
STEPS = 20_000_000
"""Iterations of the integer loop, for each of two threads."""
OTHERS_MAX = 0.05
"""A round counts in which other processes took no more than this share of a processor."""


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
    """Return the sum of a word from each line of 64 bytes. The sum keeps the compiler from omitting the loads."""
    total = np.uint64(0)
    for at in range(0, words.size, 32):
        total += words[at]
    return total


@kernel
def count(steps: Any) -> Any:
    """Run a chain of integer steps (xorshift) in registers: parallel work that needs no memory and fills no shared execution
    unit."""
    word = np.uint64(88172645463325252)
    for _ in range(steps):
        word ^= word << np.uint64(13)
        word ^= word >> np.uint64(7)
        word ^= word << np.uint64(17)
    return word


def read_once(weights: Weights) -> None:
    """Load each cache line: no codec that reads its base can be faster."""
    for tensor in weights.values():
        touch(tensor.reshape(-1))


@dataclass
class Gains:
    """Speed-up of two threads over one: the median of the rounds that count."""

    of: dict[str, float] = field(default_factory=dict)
    counted: int = 0
    tried: int = 0
    others: float = 0.0
    """The greatest share of a processor that other processes took in a round that counts."""


def scaling(codec: Codec, base: Weights, new: Weights, rounds: int, patience_s: float) -> Gains:
    """Measure our two threads and, in the same rounds, the machine's limits: two processes with half of the work each, which
    share nothing, and two threads that copy memory, hash, or only count.

    Two processors that are threads of one core, or that other programs use too, give far less than two. So a round counts if
    other processes and guests of this machine used little of them. If too few such rounds come within `patience_s`, the rounds
    with the least other use count.
    """
    block = bytes(8 << 20)
    count(1)
    with ThreadPoolExecutor(2) as pool:
        one, two = copy_of(base), copy_of(base)
        there, back = codec.encode(base, new, pool), codec.encode(new, base, pool)
        shares = [codec.encode(old, changed, None) for old, changed in zip(halves(base), halves(new), strict=True)]
        for blobs in (there, back):  # all memory is there, and so are both threads' buffers
            codec.decode(blobs, one, one, pool)
            codec.decode(blobs, base if blobs is there else new, two, pool)

        def in_place(weights: Weights, threads: ThreadPoolExecutor | None) -> None:
            for blobs in (there, back):
                codec.decode(blobs, weights, weights, threads)

        halved = list(zip(shares, halves(base), halves(two), strict=True))
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "encode": (lambda: codec.encode(base, new, None), lambda: codec.encode(base, new, pool)),
            "decode": (lambda: codec.decode(there, base, two, None), lambda: codec.decode(there, base, two, pool)),
            "decode in place": (lambda: in_place(one, None), lambda: in_place(one, pool)),
            "encode in processes": (
                lambda: in_processes([lambda: codec.encode(base, new, None)]),
                lambda: in_processes(
                    [
                        partial(codec.encode, old, changed, None)
                        for old, changed in zip(halves(base), halves(new), strict=True)
                    ]
                ),
            ),
            "decode in processes": (
                lambda: in_processes([lambda: codec.decode(there, base, two, None)]),
                lambda: in_processes([partial(codec.decode, *share, None) for share in halved]),
            ),
            "memcpy": (
                lambda: run(None, np.copyto, two.values(), new.values()),
                lambda: run(pool, np.copyto, two.values(), new.values()),
            ),
            "hashing": (lambda: run(None, hash_of, [block] * 16), lambda: run(pool, hash_of, [block] * 16)),
            "counting": (lambda: run(None, count, [STEPS] * 2), lambda: run(pool, count, [STEPS] * 2)),
        }
        return gains_of(pairs, rounds, patience_s)


def gains_of(pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], rounds: int, patience_s: float) -> Gains:
    found: list[tuple[float, dict[str, float]]] = []
    until_s = time.perf_counter() + patience_s
    while len(found) < rounds or (
        time.perf_counter() < until_s and sum(others <= OTHERS_MAX for others, _ in found) < rounds
    ):
        begin_s, before_s = time.perf_counter(), others_s()
        ratios = {name: seconds(alone) / seconds(together) for name, (alone, together) in pairs.items()}
        found.append(((others_s() - before_s) / (time.perf_counter() - begin_s), ratios))
    found.sort(key=lambda one: one[0])
    counted = found[:rounds]
    medians = {name: statistics.median(ratios[name] for _, ratios in counted) for name in pairs}
    return Gains(medians, len(counted), len(found), counted[-1][0])


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def others_s() -> float:
    """Return the processor time so far of all but this process and its children; 0 if /proc does not give it."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    fields = [int(text) for text in stat.read_text().split("\n", 1)[0].split()[1:9]]
    idle, waiting = fields[3:5]
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = (sum(fields) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in own)


def hash_of(block: bytes) -> bytes:
    digest: bytes = blake3(block).digest()
    return digest


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
