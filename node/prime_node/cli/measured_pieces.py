"""Cache of calibrations: what was measured of a pair of engines, in pieces, so that a measurement can be resumed and repeated."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_node.config import user_cache
from prime_node.files import write_durably
from prime_protocol.digest import digest_of

KEY_FILE = "key.json"
DIGEST_BYTES = 32
"""Digest at the end of a piece, where a zip file may have a comment: the format's own sums do not cover all of it."""


def calibrations_folder() -> Path:
    """Return the folder of all measurements of this user."""
    return user_cache() / "calibrations"


class MeasuredPieces:
    """Pieces of one measurement. Other engines, weights, prompts or settings are another measurement."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        """Open the measurement that `key` describes, a JSON object. Nothing is written yet."""
        text = json.dumps(key, indent=1, sort_keys=True)
        self._key = text
        self.folder = calibrations_folder() / digest_of(text.encode())[:32]

    def read(self, name: str) -> dict[str, npt.NDArray[Any]] | None:
        """Return the arrays of a piece; None if it is missing or damaged."""
        try:
            stored = (self.folder / f"{name}.npz").read_bytes()
        except OSError:
            return None
        if digest_of(data := stored[:-DIGEST_BYTES]) != stored[-DIGEST_BYTES:].hex():
            return None
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            return {key: found[key] for key in found.files}

    def write(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep a piece, durably. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / KEY_FILE).exists():
            write_durably(self.folder / KEY_FILE, self._key.encode())
        data = io.BytesIO()
        named: dict[str, Any] = dict(arrays)
        np.savez(data, **named)
        written = data.getvalue()
        write_durably(self.folder / f"{name}.npz", written + bytes.fromhex(digest_of(written)))
