"""A published model in Hugging Face format, from a folder or from a hub: its small files, and its weights.

`name_or_path` is a folder if it exists (`~` is the user's home), else the name of a model on the hub (huggingface_hub caches its
downloads).
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download

from prime_node.adapters.models.model_folder import FILE_BYTES_MAX
from prime_node.broadcast.audit.safetensors_file import read_weights
from prime_node.inside import linked_inside, read_regular
from prime_protocol.errors import LocalError
from prime_protocol.visible import printable
from prime_protocol.weights import Weights

_FILES = tuple(FILE_BYTES_MAX)
_WITH_WEIGHTS = (*_FILES, "*.safetensors", "*.safetensors.index.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
_TRAINABLE = ("bf16", "fp16", "fp32")


def pretrained_model_files(name_or_path: str) -> dict[str, bytes]:
    """Return configuration and tokenizer. Raises LocalError if a file that a run needs is missing."""
    folder = _folder(name_or_path, patterns=_FILES)
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise LocalError(f"model {name_or_path}: no {', '.join(missing)} in {folder}")
    try:
        return {
            name: read_regular(linked_inside(folder, name), bytes_max=bytes_max)
            for name, bytes_max in FILE_BYTES_MAX.items()
            if (folder / name).is_file()
        }
    except OSError as error:
        raise LocalError(f"model {name_or_path}: {error}") from None


def pretrained_weights(name_or_path: str, *, follows_links: bool = False) -> Weights:
    """Return all tensors of its safetensors files, bit for bit. Raises LocalError.

    `follows_links` as for read_weights.
    """
    return folder_weights(_folder(name_or_path, patterns=_WITH_WEIGHTS), follows_links=follows_links)


def hub_weights(name: str) -> Weights:
    """Return the same of a model on the hub: a folder of this name is not opened. Raises LocalError."""
    if not _HUB_NAME.fullmatch(name) or ".." in name:
        raise LocalError(
            f"model {printable(name)}: no name on the hub; name your copy in base_model (trainer: initial_weights)"
        )
    return folder_weights(_download(name, patterns=_WITH_WEIGHTS))


def folder_weights(folder: Path, *, follows_links: bool = False) -> Weights:
    """Return all tensors of a folder's safetensors files. They are memory-mapped, so nothing is read before it is used.

    Raises LocalError.
    """
    weights = read_weights(folder, follows_links=follows_links)
    for name, tensor in weights.items():
        if tensor.dtype not in _TRAINABLE:
            raise LocalError(
                f"{folder}: tensor {printable(name)} has type {tensor.dtype}; {', '.join(_TRAINABLE)} can be trained"
            )
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
