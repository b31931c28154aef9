"""The trainer's own checkpoints: one folder each, complete or absent.

    checkpoints/00000140-sft/              within the supervised phase, after 140 of its steps
    checkpoints/00000210-step-00000040/    that phase took 210 steps; holds policy 40
        state.json                         TrainerState
        ...                                whatever the backend saves

A checkpoint is written under another name, every file and the folder are synced, then it is renamed, then the parent
folder is synced. After a kill at any moment, the newest complete one is found again; the next start removes partial
ones. `begin` and `finish` are separate, so that the bytes may be written while the next steps are computed.

The cut is consistent: state.json names step, phase and batch of exactly the weights in the same folder. All other state
of a run follows from it. The coordinator, which owns scheduling and curriculum, gives the same batch for the same step
again. The publisher finds its place by the head of the chain.

Invariant: there is always a checkpoint from which every unannounced policy can be made again. The trainer runs ahead of
the publisher, so the newest checkpoint may hold policy 7 although policy 5 was not announced when the process died. A
trainer that resumed at 7 could never announce 5 and 6. A checkpoint at step n is usable once policy n - 1 is announced:
`head`, the newest announced policy, decides which one is loaded and which may be deleted.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from prime_node.files import sync
from prime_node.trainer.state import Phase, TrainerState
from prime_protocol.errors import LocalError

_STATE_FILE = "state.json"
_PARTIAL = ".partial"


class Checkpoints:
    """The checkpoints of one run in one folder."""

    def __init__(self, folder: Path, *, run: str, kept: int, keep_every: int = 0) -> None:
        """Open the folder.

        `run` is the run's digest; a checkpoint of another run is refused. Checkpoints whose step `keep_every` divides
        are kept forever.
        """
        self._folder = folder
        self._run = run
        self._kept = kept
        self._keep_every = keep_every

    def begin(self, state: TrainerState) -> Path | None:
        """Return an empty folder to write into; None if this state is already saved. Raises LocalError."""
        target = self._folder / _name_of(state)
        if target.exists():
            return None
        partial = target.with_suffix(_PARTIAL)
        with self._cleaning(partial):
            partial.mkdir(parents=True)
        return partial

    def finish(self, state: TrainerState, write: Callable[[], None], *, head: int) -> None:
        """Complete a checkpoint, durably.

        `write` fills the folder. Raises LocalError; the older checkpoints stay complete.
        """
        target = self._folder / _name_of(state)
        partial = target.with_suffix(_PARTIAL)
        with self._cleaning(partial):
            write()
            (partial / _STATE_FILE).write_text(state.model_dump_json(indent=1), encoding="utf-8")
            for path in (*partial.iterdir(), partial):
                sync(path)
            partial.rename(target)
            sync(self._folder)
        for old in self._usable(head)[: -self._kept]:
            if not self._is_kept(old):
                shutil.rmtree(old)

    @contextlib.contextmanager
    def _cleaning(self, partial: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, LocalError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise LocalError(
                f"checkpoint {partial.stem} cannot be written in {self._folder}: {error}. The previous checkpoint is intact"
            ) from None

    def _is_kept(self, path: Path) -> bool:
        return self._keep_every > 0 and "-step-" in path.name and _step_of(path) % self._keep_every == 0

    def durable_step(self, head: int) -> int:
        """Return the step at which a trainer killed now would resume."""
        usable = self._usable(head)
        return _step_of(usable[-1]) if usable else 0

    def newest(self, *, head: int) -> tuple[TrainerState, Path] | None:
        """Return the checkpoint to resume from; None if there is none at all. Raises LocalError.

        Deletes partial checkpoints, and those ahead of the returned one: their steps will be computed again.
        """
        for partial in self._folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(partial)
        complete, usable = self._complete(), self._usable(head)
        if not complete:
            return None
        if not usable:
            raise LocalError(
                f"the checkpoints in {self._folder} begin at step {_step_of(complete[0])}, but the coordinator's newest policy is"
                f" {head}: the coordinator lost data, or the folder belongs to another run"
            )
        for ahead in complete[len(usable) :]:
            shutil.rmtree(ahead)
        path = usable[-1]
        try:
            state = TrainerState.model_validate_json((path / _STATE_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise LocalError(
                f"checkpoint {path} cannot be read: {error}. Delete it to resume from the previous one"
            ) from None
        if state.run != self._run:
            raise LocalError(f"checkpoint {path} belongs to run {state.run[:12]}, not {self._run[:12]}")
        return state, path

    def _complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return sorted(path for path in self._folder.glob("*-*") if path.suffix != _PARTIAL)

    def _usable(self, head: int) -> list[Path]:
        return [path for path in self._complete() if _step_of(path) <= head + 1]


def _name_of(state: TrainerState) -> str:
    """Return the folder's name. Names sort in the order of training."""
    if state.phase is Phase.SFT:
        return f"{state.sft_step:08d}-sft"
    return f"{state.sft_step:08d}-step-{state.step:08d}"


def _step_of(path: Path) -> int:
    """Return the step at which it resumes; 0 within the supervised phase."""
    _, _, step = path.name.partition("-step-")
    return int(step or 0)
