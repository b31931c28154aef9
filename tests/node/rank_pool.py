"""Four real processes joined by gloo, kept over all tests of a module, for jobs on 1, 2 or 4 ranks.

A job is a function of a module (it travels by its name) that takes this process's Ranks first. Every process joins every group
of ranks, because torch.distributed requires it; processes outside the group do nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROCESSES = 4
DEADLINE_S = 100.0


class RankPool:
    """Pool of processes. Example: RankPool(folder).run(job, ranks=2, steps=3) returns both ranks' results, in order."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["tests.node.rank_jobs", "tests.node.coordinator_process"]
        )  # one server for both
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, str(folder / "meet")), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], *, ranks: int, replicas: int = 1, **arguments: Any) -> list[Any]:
        """Return the results in order of ranks. Raises AssertionError with the traceback of the failed rank."""
        for pipe in self._pipes:
            pipe.send((job, ranks, replicas, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        for rank, (is_well, value) in enumerate(answers[:ranks]):
            assert is_well, f"rank {rank}: {value}"
        return [value for _, value in answers[:ranks]]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()


def _serve(rank: int, pipe: Connection, meet: str) -> None:
    import torch
    import torch.distributed as dist

    from prime_node.adapters.training.ranks import Ranks

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=PROCESSES, timeout=timeout)
    groups: dict[tuple[int, int], Ranks] = {}
    while True:
        try:
            job, count, replicas, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if (count, replicas) not in groups:
                groups[count, replicas] = Ranks.among(range(count), replicas=replicas, timeout=timeout)
            here = groups[count, replicas]
            pipe.send((True, job(here, **arguments) if here.rank >= 0 else None))
        except BaseException:  # noqa: BLE001 - whatever it is, the test is to show it
            pipe.send((False, traceback.format_exc()))
