"""The demo's model in other sizes, as files."""

from __future__ import annotations

from pathlib import Path

from prime_node.adapters.models.tiny_model import tiny_model_files


def write_tiny_model(folder: Path, **sizes: int) -> Path:
    """Write a model's configuration and tokenizer. Example: write_tiny_model(folder, hidden_size=16)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tiny_model_files(**sizes).items():
        (folder / name).write_bytes(data)
    return folder
