"""The processes that train one model together, as in torch.distributed; `ALONE` if there is only one.

Every method but the properties is a collective: all ranks must call it, in the same order. Collectives have a deadline, which
detects a rank that hangs or was suspended; a rank that died is detected at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from prime_protocol.errors import LocalError

_IDLE = timedelta(days=365)
"""Timeout of waits between steps: rank 0 may wait long for rollouts, and the others for rank 0. If it dies, their wait ends at
once."""
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
"""Longer than any difference between ranks within a step; after it, the job is restarted from its checkpoint."""


@dataclass(frozen=True)
class Ranks:
    """This process and its group. Example: ALONE, or Ranks.join(device="cpu")."""

    rank: int
    count: int
    mesh: DeviceMesh | None
    """Mesh that parameters are sharded over: one dimension, or (replicate, shard) with HSDP. None without torch.distributed."""
    host_group: Any = None
    """Group on gloo for data in host memory: counts, errors, samples."""
    save_group: Any = None
    """Another gloo group, for the thread that writes checkpoints: collectives of one group must not cross."""
    call_group: Any = None
    """Another gloo group, without a deadline, for rank 0's calls."""
    aside_groups: tuple[Any, ...] = ()
    """Second pair of a host and a call group, for the thread that publishes."""

    @classmethod
    def join(
        cls,
        *,
        device: str,
        replicas: int = 1,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
        meeting: str | None = None,
    ) -> Ranks:
        """Join the ranks that torchrun started: NCCL between GPUs, gloo between CPUs.

        `replicas`: HSDP; the model is sharded over count / replicas ranks, and each shard has that many copies. Raises
        LocalError. `meeting` is where they meet, for torch; None: the address that torchrun names.
        """
        kind = torch.device(device).type
        if kind == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=meeting, timeout=timeout)
        return cls.among(range(dist.get_world_size()), kind=kind, replicas=replicas, timeout=timeout)

    @classmethod
    def single(cls, *, device: str) -> Ranks:
        """Return one process that computes as many do, for features that need sharding: bf16, offload."""
        chosen = torch.device(device)
        kind = chosen.type
        # FSDP puts parameters on the current GPU, which is else the first.
        if kind == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if not dist.is_initialized():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return cls.among([0], kind=kind)

    @classmethod
    def among(
        cls, members: Sequence[int], *, kind: str = "cpu", replicas: int = 1, timeout: timedelta = COLLECTIVE_TIMEOUT
    ) -> Ranks:
        """Return a subset of the processes. All processes of torch.distributed must call this, members or not."""
        count = len(members)
        if replicas < 1 or count % replicas:
            raise LocalError(
                f"trainer.replicas: {count} ranks cannot hold {replicas} copies of the model; it must divide them"
            )
        ranks = list(members)
        waits = (timeout, timeout, _IDLE, timeout, _IDLE)
        host, save, call, *aside = (dist.new_group(ranks, timeout=wait, backend="gloo") for wait in waits)
        if replicas > 1:
            placed = torch.tensor(ranks).reshape(replicas, -1)
            mesh = DeviceMesh(kind, placed, mesh_dim_names=("replicate", "shard"))
        else:
            mesh = DeviceMesh(kind, ranks, mesh_dim_names=("shard",))
        rank = dist.get_rank()
        return cls(ranks.index(rank) if rank in ranks else -1, count, mesh, host, save, call, tuple(aside))

    def aside(self) -> Ranks:
        """Return the same ranks with groups of their own, for the publisher's thread."""
        return (
            self
            if self.mesh is None
            else replace(self, host_group=self.aside_groups[0], call_group=self.aside_groups[1])
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def copies(self) -> int:
        """Number of copies of the model that the ranks hold together; more than 1 with HSDP."""
        return 1 if self.mesh is None or self.mesh.ndim == 1 else int(self.mesh.size(0))

    @property
    def copy(self) -> int:
        """Index of the copy of the model to which this rank's shard belongs; 0 unless HSDP replicates."""
        return 0 if self.mesh is None or self.mesh.ndim == 1 else int(self.mesh.get_local_rank("replicate"))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add the values element by element over all ranks, in float64."""
        if self.mesh is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.host_group)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank, in rank order."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather_at(self, rank: int, value: Any) -> list[Any] | None:
        """Return every rank's value on one rank; None on the others."""
        values: list[Any] | None = [None] * self.count if rank == self.rank else None
        dist.gather_object(value, values, group=self.host_group, group_dst=rank)
        return values

    def deal(self, values: Sequence[Any] | None) -> Any:
        """Send every rank its value from rank 0; the others pass None."""
        if self.mesh is None:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        given = list(values) if values is not None else None
        dist.scatter_object_list(mine, given, group=self.host_group, group_src=0)
        return mine[0]

    def lead(self, calls: Sequence[Any]) -> None:
        """Send every rank its call from rank 0; `next_call` receives it."""
        dist.scatter_object_list([None], list(calls), group=self.call_group, group_src=0)

    def next_call(self) -> Any:
        """Receive rank 0's next call on another rank, waiting as long as rank 0 lives."""
        call: list[Any] = [None]
        dist.scatter_object_list(call, None, group=self.call_group, group_src=0)
        return call[0]


def is_launched() -> bool:
    """Return whether torchrun started this process."""
    return dist.is_torchelastic_launched()


ALONE = Ranks(0, 1, None)
"""One process without torch.distributed."""
