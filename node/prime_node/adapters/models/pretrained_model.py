"""A published model in Hugging Face format, from a folder or from a hub: its small files, and its weights.

`name_or_path` is a folder if it exists (`~` is the user's home), else the name of a model on the hub (huggingface_hub caches its
downloads).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download

from prime_protocol.errors import LocalError
from prime_protocol.visible import printable
from prime_protocol.weights import Weights, WeightTensor

_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_WITH_WEIGHTS = (*_FILES, "*.safetensors", "*.safetensors.index.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_STORAGE = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.uint32}


def pretrained_model_files(name_or_path: str) -> dict[str, bytes]:
    """Return configuration and tokenizer. Raises LocalError if a file that a run needs is missing."""
    folder = _folder(name_or_path, patterns=_FILES)
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise LocalError(f"model {name_or_path}: no {', '.join(missing)} in {folder}")
    return {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}


def pretrained_weights(name_or_path: str) -> Weights:
    """Return all tensors of its safetensors files, bit for bit. Raises LocalError."""
    return _weights(name_or_path, _folder(name_or_path, patterns=_WITH_WEIGHTS))


def hub_weights(name: str) -> Weights:
    """Return the same of a model on the hub: a folder of this name is not opened. Raises LocalError."""
    if not _HUB_NAME.fullmatch(name) or ".." in name:
        raise LocalError(
            f"model {printable(name)}: no name on the hub; name your copy in base_model (trainer: initial_weights)"
        )
    return _weights(name, _download(name, patterns=_WITH_WEIGHTS))


def _weights(name: str, folder: Path) -> Weights:
    weights = folder_weights(folder)
    if not weights:
        raise LocalError(f"model {name}: no .safetensors in {folder}")
    return weights


def folder_weights(folder: Path) -> Weights:
    """Return all tensors of a folder's safetensors files. They are memory-mapped, so nothing is read before it is used."""
    weights: dict[str, WeightTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(_read(path))
    return weights


def _folder(name_or_path: str, *, patterns: tuple[str, ...]) -> Path:
    folder = Path(name_or_path).expanduser()
    return folder if folder.is_dir() else _download(name_or_path, patterns=patterns)


def _download(name: str, *, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        raise LocalError(
            f"model {name}: not a folder, and not available from the hub ({str(error).splitlines()[0][:200]})"
        ) from None


def _read(path: Path) -> dict[str, WeightTensor]:
    """Return a file's tensors, located by its header: safetensors' numpy reader does not support bf16."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    data = np.memmap(path, mode="r", offset=start, dtype=np.uint8)
    weights = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise LocalError(f"{path}: tensor {name} has type {entry['dtype']}; bf16, fp16 and fp32 can be trained")
        dtype = _DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        values = data[begin:end].view(_STORAGE[dtype])
        weights[name] = WeightTensor(dtype, tuple(entry["shape"]), values)
    return weights
