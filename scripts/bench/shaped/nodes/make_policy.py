"""Writes one policy of incompressible weights, as a trainer would publish it: manifest, index, parts; and the parts in one file.

    python make_policy.py SIZE_MB FOLDER

`FOLDER/payload.bin` holds the parts one after another: all systems broadcast exactly these bytes. `FOLDER/run` is its run
and `FOLDER/config.json` the run's model file, for product_node.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tests.builder import build_manifest
from tests.node.coordinator_world import CONFIG_JSON, TRAINER, make_run

from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.digest import digest_of
from prime_protocol.manifest import sign_manifest
from prime_protocol.weights import WeightTensor

TENSORS = 16


def make_policy(size_mb: float, folder: Path) -> None:
    dice = np.random.default_rng(7)
    elements = int(size_mb * 1e6 / 2 / TENSORS)
    weights = {
        f"layer{number}": WeightTensor("bf16", (elements,), dice.integers(0, 2**16, elements, dtype=np.uint16))
        for number in range(TENSORS)
    }
    encoded = encode_checkpoint(weights)
    run = make_run()
    manifest = build_manifest(run, None, weights, encoded)
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    for blob in encoded.blobs:
        (folder / "blobs" / digest_of(blob)).write_bytes(blob)
    (folder / "manifest").write_bytes(sign_manifest(manifest, TRAINER).envelope.to_bytes())
    (folder / "config.json").write_bytes(CONFIG_JSON)
    (folder / "run").write_bytes(run.envelope.to_bytes())
    (folder / "payload.bin").write_bytes(b"".join(encoded.parts))


if __name__ == "__main__":
    make_policy(float(sys.argv[1]), Path(sys.argv[2]))
