"""Rank 0 leads, the others follow: each call of the train backend is made on all ranks at once.

Concurrency: a follower waits for rank 0's next call without a deadline (rank 0 may wait hours for rollouts). Within a call all
wait for one another, with the deadline of Ranks. If a process dies, its connections close, which ends the waits of all others;
torchrun then restarts every rank.

A LocalError in a call is raised on all ranks alike (the backend ensures that): rank 0 handles it, and followers wait for its
next call. Any other error ends the rank, and with it the job.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.shard_copies import ShardCopies, ShardedCopy, follow_copies
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.shares import RankShare
from prime_node.ports.train_backend import (
    CommittedTensors,
    CriticStats,
    KeptPolicy,
    Loss,
    OptimizerSettings,
    PackedBatch,
    PolicyCopy,
    StepStats,
)
from prime_node.ports.train_samples import TopLogprobs, TrainSample
from prime_protocol.errors import LocalError
from prime_protocol.training_state import TrainingTensor
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

Build = Callable[[Ranks], TorchBackend]
"""Function that makes this rank's backend. It is sent to the followers, so it is a module's function or a partial of one."""
_DISMISSED = "dismissed"
_TAKE_COPY = "take_copy"
_TAKE_ROWS = "take_rows"
DISMISSED_WITHIN_S = 60.0


class LeadingBackend:
    """Implementation of ports.train_backend.TrainBackend on rank 0. The others run `follow`."""

    def __init__(self, build: Build, ranks: Ranks) -> None:
        """Build the backend on all ranks. Raises LocalError, on all of them, if it cannot be built."""
        assert ranks.is_first
        self._ranks = ranks
        ranks.lead([build] * ranks.count)
        self._backend = build(ranks)
        self._aside = ranks.aside()
        self._copies = ShardCopies(ranks, self._aside)
        self._num_copies = 0

    @property
    def sequence_tokens_max(self) -> int:
        """Return the model's number of positions."""
        return self._backend.sequence_tokens_max

    def new_optimizer(self, settings: OptimizerSettings) -> None:
        """Start a new optimizer on all ranks."""
        self._call("new_optimizer", settings)

    def pack(self, samples: Sequence[TrainSample]) -> PackedBatch:
        """Pack samples on rank 0, for any thread."""
        return self._backend.pack(samples)

    def train_step(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        """Train one step on all ranks."""
        stats: StepStats = self._call("train_share", loss, lr, own=self._backend.shares(samples))
        return stats

    def logprobs(self, samples: Sequence[TrainSample], of: KeptPolicy | None = None) -> list[list[float]]:
        """Compute the samples' logprobs on all ranks."""
        found: list[list[float]] = self._call("scores.logprobs", len(samples), of, own=self._backend.shares(samples))
        return found

    def top_logprobs(
        self, samples: Sequence[TrainSample], count: int, of: KeptPolicy | None = None
    ) -> list[TopLogprobs]:
        """Find the likeliest tokens on all ranks."""
        shares = self._backend.shares(samples)
        found: list[TopLogprobs] = self._call("scores.top_logprobs", len(samples), count, of, own=shares)
        return found

    def score_norms(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Compute the samples' score norms on all ranks."""
        found: list[list[float]] = self._call("scores.norms", len(samples), own=self._backend.shares(samples))
        return found

    def keep_policy(self, which: KeptPolicy) -> None:
        """Keep the current policy on all ranks."""
        self._call("keep_policy", which)

    def begin_critic(self) -> None:
        self._call("begin_critic")

    def values(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Compute the critic's values on all ranks."""
        found: list[list[float]] = self._call("share_values", len(samples), own=self._backend.shares(samples))
        return found

    def train_critic(self, samples: Sequence[TrainSample], *, lr: float) -> CriticStats:
        stats: CriticStats = self._call("train_critic_share", lr, own=self._backend.shares(samples))
        return stats

    def snapshot(self) -> Weights:
        """Return the whole weights, gathered from all ranks."""
        weights: Weights = self._call("snapshot")
        return weights

    def copy(self) -> PolicyCopy:
        """Copy the policy on each rank in shards."""
        number, self._num_copies = self._num_copies, self._num_copies + 1
        self._call(_TAKE_COPY, number)
        return ShardedCopy(number, self._copies, self._aside, raw_bytes=self._backend.published_bytes)

    def copy_of(self, weights: Weights) -> PolicyCopy:
        """Distribute other weights to the ranks in shards."""
        number, self._num_copies = self._num_copies, self._num_copies + 1
        self._ranks.lead([(_TAKE_ROWS, (), (number,))] * self._ranks.count)
        self._backend.take_rows(number, self._copies, weights)
        return ShardedCopy(number, self._copies, self._aside, raw_bytes=self._backend.published_bytes)

    def save(self, folder: Path) -> Callable[[], None]:
        """Copy the training state on all ranks, and return a function that writes it."""
        write: Callable[[], None] = self._call("save", folder)
        return write

    def load(self, folder: Path) -> None:
        """Restore the training state on all ranks. Raises LocalError."""
        self._call("load", folder)

    @property
    def numerics(self) -> str:
        """Return the name of the ranks' arithmetic."""
        return self._backend.numerics

    def commit(self, path: Path) -> CommittedTensors:
        """Write the whole training state, gathered from all ranks."""
        found: CommittedTensors = self._call("commit", path)
        return found

    def restore(self, path: Path, tensors: Sequence[TrainingTensor]) -> None:
        """Take over a training state on all ranks, which read the same file. Raises LocalError."""
        self._call("restore", path, tensors)

    def _call(self, method: str, *arguments: Any, own: Sequence[RankShare] = ()) -> Any:
        """Call a method of the backend, or of a part of it, on all ranks. `own`: each rank's own first argument."""
        calls = [(method, own[rank : rank + 1], arguments) for rank in range(self._ranks.count)]
        self._ranks.lead(calls)
        if method == _TAKE_COPY:
            return self._backend.take_copy(arguments[0], self._copies)
        return attrgetter(method)(self._backend)(*calls[0][1], *arguments)


def dismiss(ranks: Ranks) -> None:
    """Dismiss the followers, on rank 0, while they wait for a call. After any other error they end with this process."""
    ranks.lead([_DISMISSED] * ranks.count)
    ranks.aside().lead([None] * ranks.count)


def follow(ranks: Ranks) -> None:
    """Run rank 0's calls until it dismisses this rank. Raises any error but LocalError."""
    aside = ranks.aside()
    copies = ShardCopies(ranks, aside)
    # A daemon thread: when rank 0 dies, this process ends by its main thread's error, whatever the publisher does. After a
    # dismissal it is joined: a thread inside gloo would abort the process when the interpreter ends.
    publishing = threading.Thread(target=follow_copies, args=(copies, aside), name="copies", daemon=True)
    publishing.start()
    _follow_calls(ranks, copies)
    publishing.join(DISMISSED_WITHIN_S)


def _follow_calls(ranks: Ranks, copies: ShardCopies) -> None:
    build = ranks.next_call()
    if build == _DISMISSED:
        return
    try:
        backend: TorchBackend = build(ranks)
    except LocalError as error:
        log.info("no backend: %s", error)
        farewell = ranks.next_call()  # all ranks take part in it, so it stays outside the assertion
        assert farewell == _DISMISSED  # rank 0 has the same error
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="save") as writer:
        while (call := ranks.next_call()) != _DISMISSED:
            method, own, arguments = call
            try:
                if method == _TAKE_COPY:
                    backend.take_copy(arguments[0], copies)
                    continue
                if method == _TAKE_ROWS:
                    backend.take_rows(arguments[0], copies, None)
                    continue
                result = attrgetter(method)(backend)(*own, *arguments)
            except LocalError as error:
                log.info("%s: %s", method, error)
                continue
            if method == "save":
                writer.submit(_write, result)


def _write(write: Callable[[], None]) -> None:
    try:
        write()
    except LocalError as error:
        log.warning("%s", error)
    except Exception:  # nothing awaits this call
        log.exception("this rank's part of a checkpoint could not be written")
