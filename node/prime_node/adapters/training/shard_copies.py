"""Policies as they are published, left on the ranks in shards: no rank ever holds a whole model.

Each rank keeps its own rows of every tensor, rounded, for the policies that deltas need, and encodes them in chunks of its own.
A chunk never crosses a shard's border, and the index allows that. Rank 0 gets the encoded chunks, tensor by tensor, in order. A
tensor's digest is over all its bytes, so its rows go to one rank, a different one for each tensor, which hashes and discards
them. No rank ever gathers more than one tensor's rows.

Concurrency: `take` copies in the trainer's thread, and a step waits only for this. Everything else happens in a second thread
of each rank, on groups of its own (`aside`), led by rank 0's publisher. It waits for a copy that its rank's other thread has
not made yet.

HSDP's further copies of the model (Ranks.copy > 0) contribute nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from blake3 import blake3
from torch import Tensor

from prime_node.adapters.engines.torch_weights import to_weights
from prime_node.adapters.training.ranks import Ranks
from prime_protocol.checkpoint import assemble
from prime_protocol.codec import encode_tensor
from prime_protocol.manifest import BasePolicy, Encoding, PartEntry, TensorEntry
from prime_protocol.weights import Weights

Chunk = tuple[bytes, int]
"""Encoded bytes, and the number of elements that they decode to."""
TAKEN_WITHIN_S = 300.0


class ShardCopies:
    """This rank's rows of several policies. All methods but `take` are collectives of `aside`."""

    def __init__(self, ranks: Ranks, aside: Ranks) -> None:
        self._ranks = ranks
        self._aside = aside
        self._copies: dict[int, Weights] = {}
        self._changed = threading.Condition()

    def put(self, number: int, rows: Weights) -> None:
        """Store this rank's rows of a policy, already rounded and no longer modified. No collective."""
        with self._changed:
            self._copies[number] = rows
            self._changed.notify_all()

    def take(self, number: int, rows: Iterable[tuple[str, Tensor]], *, dtype: str) -> None:
        """Copy this rank's rows, rounded to `dtype`."""
        self.put(number, to_weights(rows, dtype=dtype))

    def tensors(self, number: int) -> tuple[TensorEntry, ...]:
        """Return the tensor table of a manifest, on every rank."""
        mine: list[tuple[int, TensorEntry]] = []
        for index, (name, tensor) in enumerate(self.of(number).items()):
            owner = index % self._ranks.count
            rows = self._aside.gather_at(
                owner, (tensor.shape[:1], tensor.data.view(np.uint8)) if self._is_original else None
            )
            if rows is None:
                continue
            hasher, length = blake3(), 0
            for (num_rows,), data in filter(None, rows):
                hasher.update(data.data)
                length += num_rows
            entry = TensorEntry(
                name=name, dtype=tensor.dtype, shape=(length, *tensor.shape[1:]), digest=hasher.hexdigest()
            )
            mine.append((index, entry))
        everywhere = [row for part in self._aside.gather(mine) for row in part]
        return tuple(entry for _, entry in sorted(everywhere, key=lambda row: row[0]))

    def chunks(self, number: int, base: int | None) -> Iterator[list[list[Chunk]]]:
        """Yield each tensor's chunks by rank, in order, on rank 0, and nothing elsewhere. All ranks must iterate to the end."""
        old = None if base is None else self.of(base)
        for name, tensor in self.of(number).items():
            encoded: list[Chunk] = []
            if self._is_original:
                against = None if old is None else old[name].data
                encoded = [
                    (chunk.data, chunk.count) for chunk in encode_tensor(tensor.data, against, dtype=tensor.dtype)
                ]
            yield self._aside.gather_at(0, encoded) or []

    def drop(self, number: int) -> None:
        """Forget a policy's rows."""
        with self._changed:
            self._copies.pop(number, None)

    @property
    def held(self) -> int:
        """Number of copies that are not dropped."""
        return len(self._copies)

    @property
    def _is_original(self) -> bool:
        return self._ranks.copy == 0

    def of(self, number: int) -> Weights:
        """Return this rank's rows of a policy; no collective."""
        with self._changed:
            taken = self._changed.wait_for(lambda: number in self._copies, TAKEN_WITHIN_S)
            assert taken, f"copy {number} does not exist"
            return self._copies[number]


class ShardedCopy:
    """Implementation of ports.train_backend.PolicyCopy on rank 0, which has the publisher. The others run `follow_copies`."""

    def __init__(self, number: int, copies: ShardCopies, aside: Ranks, *, raw_bytes: int) -> None:
        self._number = number
        self._copies = copies
        self._aside = aside
        self._raw_bytes = raw_bytes

    @property
    def raw_bytes(self) -> int:
        """Size of all tensors."""
        return self._raw_bytes

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Return the tensor table of a manifest."""
        self._lead("tensors", self._number)
        return self._copies.tensors(self._number)

    def encode(
        self, base: tuple[BasePolicy, ShardedCopy] | None, *, keep: Callable[[PartEntry, bytearray], object]
    ) -> tuple[Encoding, bytes]:
        """Encode the policy, against an older copy or alone, on all ranks."""
        against = None if base is None else base[1]._number
        self._lead("chunks", self._number, against)
        chunks = (chunk for tensor in self._copies.chunks(self._number, against) for rank in tensor for chunk in rank)
        return assemble(chunks, None if base is None else base[0], keep=keep)

    def drop(self) -> None:
        """Forget the copy on all ranks."""
        self._lead("drop", self._number)
        self._copies.drop(self._number)

    def _lead(self, method: str, *arguments: Any) -> None:
        self._aside.lead([(method, arguments)] * self._aside.count)


def follow_copies(copies: ShardCopies, aside: Ranks) -> None:
    """Run the requests of rank 0's publisher, in a second thread of every other rank, until one is None."""
    while (call := aside.next_call()) is not None:
        method, arguments = call
        answer = getattr(copies, method)(*arguments)
        if method == "chunks":
            for _ in answer:
                continue
