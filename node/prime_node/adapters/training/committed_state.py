"""The training state as one file of raw tensors, for commitments and re-execution (prime_protocol/training_state.py).

Names are those of checkpoints (train_state.py). Random generators are left out: no step draws from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.sharding import Placement
from prime_node.adapters.training.torch_optimizers import plain_state, put_state
from prime_node.algo.shares import Packing, PackingSettings
from prime_node.ports.train_backend import CommittedTensors
from prime_protocol.checkpoint import PART_BYTES
from prime_protocol.errors import LocalError
from prime_protocol.manifest import PartEntry
from prime_protocol.training_state import TrainingTensor

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int16: "i16"}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}

Parts = Mapping[str, tuple[Mapping[str, Tensor], torch.optim.Optimizer]]
"""Trained tensors with their optimizer, by the prefix of their names: "" of the policy, "critic." of a critic."""


def tensors_of(parts: Parts, reference: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return everything that the next step depends on, by name: masters, the optimizers' states and the reference policy."""
    state: dict[str, Any] = {f"reference.{name}": tensor for name, tensor in reference.items()}
    for prefix, (tensors, optimizer) in parts.items():
        for name, parameter in tensors.items():
            state[f"{prefix}model.{name}"] = parameter.detach()
            for key, value in plain_state(optimizer, parameter).items():
                state[f"{prefix}optimizer.{name}.{key}"] = value
    return state


def write_state(state: Mapping[str, Any], path: Path, ranks: Ranks) -> CommittedTensors:
    """Write all tensors to a file, one after another, and hash them in parts. A collective: the first rank writes and hashes.

    Raises LocalError for a value that is no tensor of a known type.
    """
    entries: list[TrainingTensor] = []
    with (path if ranks.is_first else Path(os.devnull)).open("wb") as file:
        parts = _PartWriter(file)
        for name in sorted(state):
            tensor = state[name]
            if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
                raise LocalError(
                    f"run.replay: the training state cannot hold {name}, which is no tensor of fp32 or bf16"
                )
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            entries.append(TrainingTensor(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(whole.shape)))
            if ranks.is_first:
                parts.feed(_raw_bytes(whole))
        parts.close()
    return CommittedTensors(tuple(entries), tuple(parts.entries))


class _PartWriter:
    """Writes bytes to a file and hashes them in parts of PART_BYTES, in one pass and without a copy."""

    def __init__(self, file: BinaryIO) -> None:
        self.entries: list[PartEntry] = []
        self._file, self._hasher, self._size = file, blake3(), 0

    def feed(self, raw: memoryview) -> None:
        while raw:
            piece = raw[: PART_BYTES - self._size]
            self._file.write(piece)
            self._hasher.update(piece)
            self._size += len(piece)
            raw = raw[len(piece) :]
            if self._size == PART_BYTES:
                self.close()

    def close(self) -> None:
        """End the part, if it has begun."""
        if self._size:
            self.entries.append(PartEntry(digest=self._hasher.hexdigest(), size=self._size))
            self._hasher, self._size = blake3(), 0


def _raw_bytes(tensor: Tensor) -> memoryview:
    data: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.data


def read_state(path: Path, entries: Sequence[TrainingTensor]) -> dict[str, Tensor]:
    """Return the tensors of a file that `write_state` wrote. They are copies."""
    state, place = {}, 0
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for entry in entries:
        if entry.dtype not in _TORCH:
            raise LocalError(
                f"the training state's tensor {entry.name} has type {entry.dtype}, which no trainer writes"
            )
        raw = data[place : place + entry.num_bytes].copy()
        state[entry.name] = torch.from_numpy(raw).view(_TORCH[entry.dtype]).reshape(entry.shape)
        place += entry.num_bytes
    return state


@torch.no_grad()
def put_tensors(state: Mapping[str, Tensor], parts: Parts, reference_room: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give masters and optimizers these values, and return the reference policy, if the state has one. A collective.

    Raises LocalError if the state is not one of this model and optimizer.
    """
    left = dict(state)
    reference: dict[str, Tensor] = {}
    try:
        for prefix, (tensors, optimizer) in parts.items():
            optimizer.state.clear()
            for name, parameter in tensors.items():
                parameter.copy_(_placed(left.pop(f"{prefix}model.{name}"), parameter))
                of_name = f"{prefix}optimizer.{name}."
                keys = [key for key in left if key.startswith(of_name)]
                values = {key.removeprefix(of_name): left.pop(key) for key in keys}
                if values:  # some, such as the number of steps, are scalars that every rank holds
                    same = {key: value.shape == parameter.shape for key, value in values.items()}
                    placed = {key: _placed(one, parameter) if same[key] else one for key, one in values.items()}
                    put_state(optimizer, parameter, placed)
        if any(name.startswith("reference.") for name in left):
            for name, room in reference_room.items():
                room.copy_(_placed(left.pop(f"reference.{name}"), room))
                reference[name] = room
    except KeyError as error:
        raise LocalError(f"the training state lacks {error}: it is of another model or recipe") from None
    if left:
        raise LocalError(f"the training state has {min(left)}, which this model and recipe lack: it is of another run")
    return reference


def _placed(value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise LocalError(f"the training state has a tensor of shape {tuple(value.shape)}, expected {tuple(like.shape)}")
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.to_local().device), like.device_mesh, like.placements)
    return value.to(like.device)


def numerics_of(device: torch.device, placement: Placement, ranks: Ranks, packing: PackingSettings) -> str:
    """Return the name of this process's arithmetic. Example: `torch-2.13.0/cpu/avx512/fp32/ranks1/tree128`."""
    version, _, build = torch.__version__.partition("+")
    if device.type == "cuda":
        version, unit = f"{version}+{build}" if build else version, torch.cuda.get_device_name(device).replace(" ", "-")
    else:
        unit = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    rows = f"{packing.packing}{packing.row_tokens if packing.packing is Packing.TREE else ''}"
    processes = f"ranks{ranks.count}" if ranks.copies == 1 else f"ranks{ranks.count}x{ranks.copies}"
    return f"torch-{version}/{device.type}/{unit}/{placement.compute_dtype}/{processes}/{rows}"
