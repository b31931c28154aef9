"""The trainer's commitments for re-execution: what a manifest says of its step, and the files of training states.

A state's file waits in the trainer's folder until its policy is published. A later start removes what a crash left.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prime_node.inside import place
from prime_node.ports.train_backend import TrainBackend
from prime_node.trainer.state import TrainerState
from prime_protocol.digest import digest_of
from prime_protocol.replay import ReplayPolicy
from prime_protocol.training_state import TrainingState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateFile:
    """One committed training state: implementation of broadcast.publish.publisher.Attachment."""

    index: bytes
    path: Path
    sizes: tuple[int, ...]
    """Bytes of its parts."""

    @property
    def digest(self) -> str:
        """Digest for the manifest."""
        return digest_of(self.index)

    def blobs(self) -> Iterator[Callable[[], bytes]]:
        """Yield a function for each blob, which reads it; the index is last."""
        start = 0
        for size in self.sizes:
            yield partial(self._read, start, size)
            start += size
        yield lambda: self.index

    def drop(self) -> None:
        """Delete the file. Idempotent."""
        self.path.unlink(missing_ok=True)

    def _read(self, start: int, size: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(size)


@dataclass(slots=True)
class Committer:
    """Commitments of one trainer."""

    policy: ReplayPolicy
    folder: Path
    """Folder for files of states, emptied at the start."""
    first: int = 0
    """First policy that this start publishes: it may compute with other numerics than the one before."""

    def begin(self, first: int) -> None:
        """Note the first policy to publish, and remove what a crash left."""
        self.first = first
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def is_due(self, policy_version: int) -> bool:
        """Return whether a policy's manifest commits to the training state."""
        return policy_version >= self.first and (
            policy_version == self.first or policy_version % self.policy.state_every == 0
        )

    def commit(self, state: TrainerState, backend: TrainBackend) -> StateFile:
        """Write and hash the training state. It uses the weights, so it belongs into the trainer's thread. Raises LocalError."""
        return committed_file(state, backend, place(self.folder, f"{state.step:08d}"))


def committed_file(state: TrainerState, backend: TrainBackend, path: Path) -> StateFile:
    """Write a training state to a file, and return it with its index. Raises LocalError."""
    written = backend.commit(path)
    index = TrainingState(
        run=state.run,
        policy_version=state.step,
        progress=state.model_dump_json(),
        tensors=written.tensors,
        parts=written.parts,
    )
    return StateFile(index.model_dump_json().encode(), path, tuple(part.size for part in written.parts))
