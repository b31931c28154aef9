"""The processes that train one model together, as torch.distributed knows them; `ALONE` where there is one.

Every method but the properties is a collective: all ranks call it, in the same order, or all wait. Collectives have a deadline
(a rank that was stopped, or that hangs, is noticed there); a rank that died is noticed at once.
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
"""Rank 0 may wait long for rollouts, and the others for rank 0. If it dies, their wait ends at once."""
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
"""Longer than any step's difference between ranks; after it, the job is restarted from its checkpoint."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Example: ALONE, or Ranks.join(device="cpu")."""

    rank: int
    count: int
    mesh: DeviceMesh | None
    """What parameters are sharded over; one dimension, or (replicate, shard) with HSDP. None without torch.distributed."""
    host_group: Any = None
    """A gloo group for what is not on the device: counts, errors, samples."""
    save_group: Any = None
    """Another, for the thread that writes checkpoints: collectives of one group must not cross."""
    call_group: Any = None
    """Another, without a deadline, for what rank 0 calls."""
    aside_groups: tuple[Any, ...] = ()
    """The first and the last of these once more, for the thread that publishes."""

    @classmethod
    def join(cls, *, device: str, replicas: int = 1, timeout: timedelta = COLLECTIVE_TIMEOUT) -> Ranks:
        """The ranks that torchrun started: NCCL between GPUs, gloo between CPUs.

        `replicas`: HSDP; the model is sharded over count / replicas ranks, and each shard has so many copies. Raises LocalError.
        """
        kind = torch.device(device).type
        if kind == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=timeout)
        return cls.among(range(dist.get_world_size()), kind=kind, replicas=replicas, timeout=timeout)

    @classmethod
    def single(cls, *, device: str) -> Ranks:
        """One process that computes as many do, for what sharding brings beside the sharding: bf16, offload."""
        kind = torch.device(device).type
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if not dist.is_initialized():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return cls.among([0], kind=kind)

    @classmethod
    def among(
        cls, members: Sequence[int], *, kind: str = "cpu", replicas: int = 1, timeout: timedelta = COLLECTIVE_TIMEOUT
    ) -> Ranks:
        """Some of the processes; all of torch.distributed's must call this, members or not."""
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
        """The same ranks with groups of their own, for the publisher's thread."""
        return (
            self
            if self.mesh is None
            else replace(self, host_group=self.aside_groups[0], call_group=self.aside_groups[1])
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def copy(self) -> int:
        """Which copy of the model this rank's shard belongs to; 0 unless HSDP replicates."""
        return 0 if self.mesh is None or self.mesh.ndim == 1 else int(self.mesh.get_local_rank("replicate"))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element over all ranks, in float64."""
        if self.mesh is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.host_group)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in their order."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather_at(self, rank: int, value: Any) -> list[Any] | None:
        """Every rank's value at one of them; None on the others."""
        values: list[Any] | None = [None] * self.count if rank == self.rank else None
        dist.gather_object(value, values, group=self.host_group, group_dst=rank)
        return values

    def deal(self, values: Sequence[Any] | None) -> Any:
        """Rank 0 gives every rank its value; the others give None."""
        if self.mesh is None:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        given = list(values) if values is not None else None
        dist.scatter_object_list(mine, given, group=self.host_group, group_src=0)
        return mine[0]

    def lead(self, calls: Sequence[Any]) -> None:
        """Rank 0: give every rank its call; `next_call` takes it."""
        dist.scatter_object_list([None], list(calls), group=self.call_group, group_src=0)

    def next_call(self) -> Any:
        """The others: wait for what rank 0 gives, as long as it lives."""
        call: list[Any] = [None]
        dist.scatter_object_list(call, None, group=self.call_group, group_src=0)
        return call[0]


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_torchelastic_launched()


ALONE = Ranks(0, 1, None)
"""One process without torch.distributed."""
