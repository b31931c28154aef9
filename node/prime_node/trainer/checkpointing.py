"""The trainer's own checkpoints: one folder each, complete or absent.

    checkpoints/00000140-sft/              within the supervised phase, after 140 of its steps
    checkpoints/00000210-step-00000040/    that phase took 210 steps; holds policy 40
        state.json                         TrainerState
        ...                                whatever the backend saves
        digests.json                       digest of each of these files
    checkpoints/NAME.damaged/              a checkpoint whose files changed on the disk, until the next one is written

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

A checkpoint is loaded only if its files have the digests that were computed when it was written. One without digests, of an
earlier release, is loaded as it is. If a file is damaged, the checkpoint before is loaded. So the durable step, up to which the
coordinator deletes batches, is that of the second newest usable checkpoint. With `kept` = 1 it is that of the only one, and
damage to it ends the run. If none is intact and the durable step is 0, the trainer begins again from the initial weights.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from prime_node.files import DAMAGED, digest_of_file, kind_of, sync
from prime_node.inside import NotRegular
from prime_node.trainer.state import Phase, TrainerState
from prime_protocol.errors import LocalError

log = logging.getLogger(__name__)

_STATE_FILE, _DIGESTS_FILE = "state.json", "digests.json"
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
        """Complete a checkpoint, durably. `write` fills the folder. Raises LocalError; the older checkpoints stay complete."""
        target = self._folder / _name_of(state)
        partial = target.with_suffix(_PARTIAL)
        with self._cleaning(partial):
            write()
            (partial / _STATE_FILE).write_text(state.model_dump_json(indent=1), encoding="utf-8")
            digests = {path.name: digest_of_file(path) for path in sorted(partial.iterdir())}
            (partial / _DIGESTS_FILE).write_text(json.dumps(digests, indent=1), encoding="utf-8")
            for path in (*partial.iterdir(), partial):
                sync(path)
            partial.rename(target)
            sync(self._folder)
        for old in self._usable(head)[: -self._kept]:
            if not self._is_kept(old):
                shutil.rmtree(old)
        for damaged in self._folder.glob(f"*{DAMAGED}"):
            shutil.rmtree(damaged)

    @contextlib.contextmanager
    def _cleaning(self, partial: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, LocalError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise kind_of(error)(
                f"checkpoint {partial.stem} cannot be written in {self._folder}: {error}. The previous checkpoint is intact"
            ) from None

    def _is_kept(self, path: Path) -> bool:
        return self._keep_every > 0 and "-step-" in path.name and _step_of(path) % self._keep_every == 0

    def durable_step(self, head: int) -> int:
        """Return the step at which a trainer killed now would resume, even if its newest checkpoint were damaged."""
        return self._durable(self._usable(head), head)

    def _durable(self, checkpoints: Sequence[Path], head: int) -> int:
        usable = [step for path in checkpoints if (step := _step_of(path)) <= head + 1]
        return usable[-min(2, self._kept) :][0] if usable else 0

    def newest(self, *, head: int) -> tuple[TrainerState, Path] | None:
        """Return the newest intact checkpoint to resume from; None to begin at step 0. Raises LocalError.

        Deletes partial checkpoints, and those ahead of the returned one: their steps will be computed again. Renames damaged
        ones. If no checkpoint is intact, a trainer may begin again only while the coordinator has all batches since step 0.
        """
        for partial in self._folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(partial)
        complete, usable = self._complete(), self._usable(head)
        if complete and not usable:
            raise LocalError(
                f"the checkpoints in {self._folder} begin at step {_step_of(complete[0])}, but the coordinator's newest policy is"
                f" {head}: the coordinator lost data, or the folder belongs to another run"
            )
        for ahead in complete[len(usable) :]:
            shutil.rmtree(ahead)
        path = self._intact(usable)
        if path is None:
            if damaged := self._damaged():
                self._begin_again(damaged, head)
            return None
        try:
            state = TrainerState.model_validate_json((path / _STATE_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise LocalError(f"{path / _STATE_FILE} cannot be read: {error}") from None
        if state.run != self._run:
            raise LocalError(f"checkpoint {path} belongs to run {state.run[:12]}, not {self._run[:12]}")
        return state, path

    def _intact(self, usable: Sequence[Path]) -> Path | None:
        """Return the newest undamaged checkpoint, after renaming the damaged ones that are newer. Raises LocalError."""
        for path in reversed(usable):
            fault = _fault_of(path)
            if fault is None:
                return path
            log.error("%s; resuming from the checkpoint before it, if there is one. Check the disk", fault)
            aside = path.with_suffix(DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        return None

    def _damaged(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{DAMAGED}"))

    def _begin_again(self, damaged: Sequence[Path], head: int) -> None:
        """Permit a start from the initial weights: the publisher compares each policy that is published already.

        Raises LocalError if the durable step, counted with the damaged checkpoints, was beyond 0.
        """
        if self._durable([path.with_suffix("") for path in damaged], head):
            raise LocalError(
                f"no checkpoint in {self._folder} is intact, the damaged ones are {', '.join(path.name for path in damaged)}:"
                f" restore one from a copy, or remove the suffix {DAMAGED} and its {_DIGESTS_FILE} to load it as it is"
            )
        log.error("no checkpoint in %s is intact: computing all steps again from the initial weights", self._folder)

    def _complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return sorted(path for path in self._folder.glob("*-*") if path.suffix not in {_PARTIAL, DAMAGED})

    def _usable(self, head: int) -> list[Path]:
        return [path for path in self._complete() if _step_of(path) <= head + 1]


def _fault_of(path: Path) -> str | None:
    """Return how the files of a checkpoint differ from what was written; None if they do not, or if it has no digests.

    Raises LocalError if that cannot be found out now, for example without a free descriptor.
    """
    read = path / _DIGESTS_FILE
    if not read.exists():
        log.warning("checkpoint %s has no digests: its files are not checked", path)
        return None
    try:
        written = dict[str, str](json.loads(read.read_bytes()))
        for name, digest in written.items():
            read = path / name
            if digest_of_file(read) != digest:
                return f"{read} is not what was written"
    except (ValueError, TypeError, FileNotFoundError, NotRegular) as error:
        return f"{read} is damaged: {error}"
    except OSError as error:
        if error.errno in (errno.EIO, errno.EISDIR):  # a sector of the disk, or an entry of a folder
            return f"{read} is damaged: {error}"
        raise kind_of(error)(f"{read} cannot be read: {error}; start the trainer again once it can") from None
    return None


def _name_of(state: TrainerState) -> str:
    """Return the folder's name. Names sort in the order of training."""
    if state.phase is Phase.SFT:
        return f"{state.sft_step:08d}-sft"
    return f"{state.sft_step:08d}-step-{state.step:08d}"


def _step_of(path: Path) -> int:
    """Return the step at which it resumes; 0 within the supervised phase."""
    _, _, step = path.name.partition("-step-")
    return int(step or 0)
