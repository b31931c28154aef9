"""Every decoder reads the golden vectors, chunks that were sent once."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_lab import codec_reference as reference
from prime_protocol.codec import Mode, decode_chunk, mode_of
from prime_protocol.codec.layout import TYPES

from .cases import decode_all_ways

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "vectors" / "codec.json").read_text())["chunks"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_golden_chunk_decodes_to_what_it_always_did(vector: dict[str, Any]) -> None:
    storage = TYPES[vector["dtype"]].storage
    data, new = base64.b64decode(vector["chunk"]), np.frombuffer(base64.b64decode(vector["new"]), storage)
    base = None if vector["base"] is None else np.frombuffer(base64.b64decode(vector["base"]), storage)
    out = np.zeros_like(new)
    decode_chunk(data, out, base, dtype=vector["dtype"], start=0, count=vector["count"])
    assert np.array_equal(out, new)
    numbers = None if base is None else base.tolist()
    assert reference.decode(data, numbers, dtype=vector["dtype"], count=vector["count"]) == new.tolist()
    if mode_of(data) is Mode.CLASS:
        assert base is not None
        assert decode_all_ways(data, base, vector["dtype"]) == [new.tolist()] * 4


def test_every_mode_has_a_golden_chunk() -> None:
    assert {mode_of(base64.b64decode(vector["chunk"])) for vector in VECTORS} == set(Mode)
