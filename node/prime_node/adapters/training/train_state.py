"""Master weights, optimizer and random state in torch's distributed checkpoint format (DCP), the same for any number of ranks.

    model.NAME                  masters (masters.py) of the parameters that are trained; frozen ones follow from the model
    optimizer.NAME.KEY          the optimizer's state for each
    reference.NAME              the reference policy's values of the same parameters, if one is kept
    random.RANK                 torch's generator on each rank
    critic.model.NAME           the critic's parameters, and critic.optimizer.NAME.KEY, if there is one
    note                        bytes from the caller that saved it

Names of one rank's own data contain the rank: for the same name on two ranks DCP would silently keep only one. A checkpoint of
one process can be read by many and vice versa; DCP splits the tensors again.

A state on its way to the disk is copied only if it would change before a thread writes it. The state of AdamW is two or three
times the weights. A copy of it would be the largest part of a trainer's memory, for seconds.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from prime_node.adapters.training.committed_state import Parts, tensors_of
from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.torch_optimizers import put_state
from prime_protocol.errors import LocalError


class SavedState:
    """Tensors that another thread writes. Who changes them calls `before_change` first."""

    def __init__(self, state: dict[str, Any], *, is_copy: bool = False) -> None:
        """Keep a state. `is_copy`: nothing changes its tensors."""
        self._state = state
        self._is_copy, self._is_begun = is_copy, False
        self._guard = threading.Lock()
        self._written = threading.Event()

    @contextlib.contextmanager
    def writing(self) -> Iterator[dict[str, Any]]:
        """Give the state to the thread that writes it, once."""
        with self._guard:
            self._is_begun = True
        try:
            yield self._state
        finally:
            self._state = {}
            self._written.set()

    def before_change(self) -> None:
        """Wait until the state is written; copy it if its writing has not begun."""
        with self._guard:
            if not self._is_copy and not self._is_begun:
                self._state = {key: _cloned(value) for key, value in self._state.items()}
                self._is_copy = True
        if not self._is_copy:
            self._written.wait()


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def current_train_state(
    parts: Parts,
    ranks: Ranks,
    *,
    note: bytes,
    reference: Mapping[str, Tensor],
) -> SavedState:
    """Return the current state. `parts`: tensors with their optimizer, by the prefix of their names; `note`: alike on all ranks.

    A single process on a CPU copies nothing: it calls `before_change` before a step changes the tensors. Otherwise all of them
    are copied to the host's memory: a rank that waited for its own write would wait for all ranks.
    """
    state: dict[str, Any] = {f"random.{ranks.rank}": torch.get_rng_state(), "note": _as_tensor(note)}
    state |= tensors_of(parts, reference)
    if ranks.mesh is None and not any(isinstance(value, Tensor) and value.is_cuda for value in state.values()):
        return SavedState(state)
    copies = {key: _copy(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    return SavedState(copies, is_copy=True)


def writer(saved: SavedState, folder: Path, ranks: Ranks) -> Callable[[], None]:
    """Return a function that writes the state durably, once.

    It is a collective, for one thread of each rank; all raise its LocalError.
    """

    def write() -> None:
        try:
            with saved.writing() as state, _without_advice():
                save(
                    state,
                    storage_writer=FileSystemWriter(folder, sync_files=True),
                    process_group=ranks.save_group,
                    no_dist=ranks.mesh is None,
                )
        except (CheckpointException, OSError, RuntimeError) as error:  # the first is a BaseException
            reason = _reason(error)
            if "unexpected pos" in reason:  # the only message of torch's zip writer if a write is refused
                free_mb = shutil.disk_usage(folder).free // 2**20
                reason += f": a file could not be written whole; is the disk full? {free_mb} MiB are free in {folder}"
            raise LocalError(reason) from None

    return write


def note_of(folder: Path, ranks: Ranks) -> bytes:
    """Return the note of a checkpoint. Raises LocalError if it cannot be read."""
    with _reader(folder) as reader:
        stored = reader.read_metadata().state_dict_metadata.get("note")
        if not isinstance(stored, TensorStorageMetadata):
            raise LocalError(f"checkpoint {folder} cannot be loaded: it has no note")
        state = {"note": torch.empty(stored.size, dtype=torch.uint8)}
        _load(state, reader, ranks)
    return state["note"].numpy().tobytes()


def holds(folder: Path, prefix: str) -> bool:
    """Return whether a checkpoint that can be read has tensors of this prefix."""
    return any(name.startswith(prefix) for name in FileSystemReader(folder).read_metadata().state_dict_metadata)


def restore_train_state(
    masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, folder: Path, ranks: Ranks, *, prefix: str = ""
) -> None:
    """Restore the copied state of the tensors with this prefix. Raises LocalError."""
    with _reader(folder) as reader:
        stored = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {f"{prefix}model.{name}": parameter.detach() for name, parameter in masters.items()}
        own = f"random.{ranks.rank}"
        if own in stored:
            state[own] = torch.get_rng_state()
        for name, parameter in masters.items():
            of_name = f"{prefix}optimizer.{name}."
            for key in (key for key in stored if key.startswith(of_name)):
                state[key] = _room_for(stored[key], parameter)
        _load(state, reader, ranks)
    if own in stored:
        torch.set_rng_state(state[own])
    optimizer.state.clear()
    for name, parameter in masters.items():
        of_name = f"{prefix}optimizer.{name}."
        found = {key.removeprefix(of_name): value for key, value in state.items() if key.startswith(of_name)}
        if found:
            put_state(optimizer, parameter, found)


def stored_reference(room: Callable[[], dict[str, Tensor]], folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    """Return the reference policy of a checkpoint, in tensors of `room`; empty if it has none. Raises LocalError."""
    with _reader(folder) as reader:
        if not any(name.startswith("reference.") for name in reader.read_metadata().state_dict_metadata):
            return {}
        values = room()
        _load({f"reference.{name}": tensor for name, tensor in values.items()}, reader, ranks)
    return values


@contextlib.contextmanager
def _reader(folder: Path) -> Iterator[FileSystemReader]:
    """Yield a reader of a checkpoint. Raises LocalError for what fails inside."""
    try:
        yield FileSystemReader(folder)
    except (CheckpointException, OSError, RuntimeError) as error:  # the first is a BaseException
        raise LocalError(f"checkpoint {folder} cannot be loaded: {_reason(error)}") from None


def _load(state: dict[str, Any], reader: FileSystemReader, ranks: Ranks) -> None:
    """Fill the tensors of `state` in place. A collective."""
    with _without_advice():
        load(state, storage_reader=reader, process_group=ranks.host_group, no_dist=ranks.mesh is None)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress DCP's warning that torch.distributed is disabled, which appears even if the caller disabled it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _copy(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu()
    return host.clone() if not tensor.is_cuda else host


def _room_for(stored: Any, parameter: Tensor) -> Any:
    """Return a tensor with the parameter's layout if it has the parameter's shape; else one that every rank holds whole."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.properties.dtype).detach()
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)


def _reason(error: BaseException) -> str:
    """Return the system's message for the first rank that failed."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return str(error)
