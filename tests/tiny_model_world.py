"""The demo's model in other sizes, as files."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

from prime_node.adapters.models.tiny_model import tiny_model_files


def write_tiny_model(folder: Path, **sizes: int) -> Path:
    """Write a model's configuration and tokenizer. Example: write_tiny_model(folder, hidden_size=16)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tiny_model_files(**sizes).items():
        (folder / name).write_bytes(data)
    return folder


def charsmap(key: str, replacement: str) -> str:
    """Return a table in sentencepiece's format, in base64, which replaces one key; the offset of each node leads to a new row."""
    path = key.encode()
    units = [0] * 256 * (len(path) + 2)
    units[0] = 256 << 10
    for number, byte in enumerate(path, start=1):
        place, row = 256 * number ^ byte, 256 * (number + 1)
        units[place] = (place ^ row) << 10 | (number == len(path)) << 8 | byte
    units[256 * (len(path) + 1)] = 1 << 31
    size = 4 * len(units)
    return base64.b64encode(struct.pack(f"<I{len(units)}I", size, *units) + replacement.encode() + b"\0").decode()
