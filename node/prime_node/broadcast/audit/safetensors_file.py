"""Read and write safetensors files, tensor by tensor, without torch, for all dtypes.

The published library has no bf16 in numpy, and it needs all bytes of a file at once. Here a tensor is written as it is held
and read through a memory map, so the extra memory is one tensor's at most. Reading is for a file that this machine's user
names, and that a stranger may have made: its sizes are bounded, and its faults are LocalErrors.

u64 little endian: bytes of the header | header: JSON name -> dtype, shape, data_offsets | the tensors' bytes
"""

from __future__ import annotations

import hashlib
import json
import os
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from prime_node.inside import linked_anywhere, linked_inside, open_regular, read_regular
from prime_protocol import limits
from prime_protocol.codec import DTYPES
from prime_protocol.envelope import load_json
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.visible import printable
from prime_protocol.weights import Weights, WeightTensor

NAMES = {
    "bf16": "BF16",
    "fp16": "F16",
    "fp32": "F32",
    "fp64": "F64",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
    "u8": "U8",
    "u16": "U16",
    "u32": "U32",
    "u64": "U64",
    "i8": "I8",
    "i16": "I16",
    "i32": "I32",
    "i64": "I64",
    "bool": "BOOL",
}
"""File format's name of each of our dtypes. A test checks that none is missing."""
DTYPE_OF = {theirs: ours for ours, theirs in NAMES.items()}
HEADER_BYTES_MAX, INDEX_BYTES_MAX = 2**24, 2**25
"""Bytes of a file's header, some 150,000 tensors, and of a folder's index. Parsed, JSON takes up to twenty times its bytes."""
FILES_MAX = 4_096
"""Files of one model."""
INDEX_FILE = "model.safetensors.index.json"
METADATA = "__metadata__"
"""Entry of a header that is no tensor."""
_PIECE_BYTES = 64 * 2**20


def layout_of(weights: Weights) -> tuple[list[str], bytes]:
    """Return the tensors in the order of the file, and the bytes before theirs.

    Large element types come first, so that each tensor is aligned. transformers requires `format: pt`.
    """
    order = sorted(weights, key=lambda name: (-DTYPES[weights[name].dtype], name))
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name in order:
        tensor = weights[name]
        start, end = end, end + tensor.data.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text


def write_safetensors(path: Path, weights: Weights) -> str:
    """Write a file and return its SHA-256."""
    order, head = layout_of(weights)
    hasher = hashlib.sha256(head)
    with path.open("wb") as file:
        file.write(head)
        for name in order:
            data = weights[name].data.view(np.uint8).data
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                hasher.update(piece)
                file.write(piece)
    return hasher.hexdigest()


def read_weights(path: Path, *, follows_links: bool = False) -> dict[str, WeightTensor]:
    """Return every tensor of a file, or of a model directory's files, as memory maps. Raises LocalError.

    `follows_links`: links may leave the directory, for one that this user names and of which nothing is published.
    """
    weights: dict[str, WeightTensor] = {}
    for file in _files_of(path, follows_links):
        try:
            found = _read_file(file)
        except (OSError, ValueError, RemoteError) as error:
            raise LocalError(f"{file} is not a safetensors file: {printable(str(error), 300)}") from None
        if twice := weights.keys() & found.keys():
            raise LocalError(f"{path}: tensor {printable(min(twice), 100)} is in two files")
        weights |= found
        if len(weights) > limits.CHUNKS_MAX:
            raise LocalError(f"{path} has more than {limits.CHUNKS_MAX:,} tensors")
    return weights


def _files_of(path: Path, follows_links: bool) -> list[Path]:
    find = linked_anywhere if follows_links else linked_inside
    if path.is_file():
        return [path.resolve()]
    if not path.is_dir():
        raise LocalError(f"{path}: no such file or folder")
    index = path / INDEX_FILE
    if os.path.lexists(index):
        try:
            names = set(
                load_json(read_regular(find(path, INDEX_FILE), bytes_max=INDEX_BYTES_MAX))["weight_map"].values()
            )
        except (OSError, RemoteError, KeyError, TypeError, AttributeError) as error:
            raise LocalError(f"{index} is not an index of safetensors files: {printable(str(error), 200)}") from None
        if not all(isinstance(name, str) for name in names):
            raise LocalError(f"{index} names files that are no text")
    else:
        names = {file.name for file in path.glob("*.safetensors")}
        if not names:
            raise LocalError(f"{path} has no *.safetensors file")
    if len(names) > FILES_MAX:
        raise LocalError(f"{path}: a model of {len(names):,} files; the most is {FILES_MAX:,}")
    return [find(path, name) for name in sorted(names)]


def _read_file(path: Path) -> dict[str, WeightTensor]:
    """Read one file. Raises ValueError and RemoteError for anything that is not the format, OSError from the disk."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise ValueError("its header does not fit")
        if header_bytes > HEADER_BYTES_MAX:
            raise ValueError(f"its header has {header_bytes:,} bytes; the most is {HEADER_BYTES_MAX:,}")
        header = load_json(file.read(header_bytes))
        whole = np.asarray(np.memmap(file, np.uint8, mode="r"))  # one map for all tensors: each would hold a file open
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop(METADATA, None)
    start_of_data, covered, weights = 8 + header_bytes, [(0, 0)], {}
    for name, entry in header.items():
        dtype, shape, start, end = _entry(printable(name, 100), entry)
        if end - start != prod(shape) * DTYPES[dtype] or start_of_data + end > size:
            raise ValueError(f"{printable(name, 100)} has not as many bytes as its shape needs")
        covered.append((start, end))
        data = whole[start_of_data + start : start_of_data + end].view(f"<u{DTYPES[dtype]}")
        weights[name] = WeightTensor(dtype, shape, data)
    covered.sort()
    if covered[-1][1] != size - start_of_data or any(before[1] != after[0] for before, after in pairwise(covered)):
        raise ValueError("its tensors overlap or leave gaps")
    return weights


def _entry(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, start and end of one header entry."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} must have exactly dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPE_OF:
        raise ValueError(f"{name} has the unknown type {entry['dtype']!r:.40}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    sizes = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [-1]
    if any(type(item) is not int or item < 0 for item in sizes) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name} has an impossible shape or offset")
    if len(shape) > limits.TENSOR_RANK_MAX:  # the time for their product grows with the square of their number
        raise ValueError(f"{name} has {len(shape)} dimensions, more than {limits.TENSOR_RANK_MAX}")
    return DTYPE_OF[entry["dtype"]], tuple(shape), offsets[0], offsets[1]
