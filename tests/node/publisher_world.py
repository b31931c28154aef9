"""Shared parts of the publisher's tests: weights, a publisher, and what it publishes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from tests.builder import provenance
from tests.node.batch_coordinator import TRAINER, BatchCoordinator
from tests.time_world import VirtualClock

from prime_node.broadcast.publish.encoder import Published
from prime_node.broadcast.publish.publisher import Publisher
from prime_protocol.weights import Weights, WeightTensor

UntrustedRow = list[Published]
_FOLDER = tempfile.TemporaryDirectory()


def new_folder() -> Path:
    """Return an empty folder that ends with the process."""
    return Path(tempfile.mkdtemp(dir=_FOLDER.name))


def weights(version: int, *, other: bool = False) -> Weights:
    numbers = np.random.default_rng([version, other]).integers(0, 2**16, 600, dtype=np.uint16)
    return {"layer": WeightTensor("bf16", (20, 30), numbers)}


def make(
    coordinator: BatchCoordinator, *, pending_max: int = 2, rows: UntrustedRow | None = None, folder: Path | None = None
) -> Publisher:
    on_published = (lambda published: None) if rows is None else rows.append
    return Publisher(
        coordinator,
        coordinator.run,
        TRAINER,
        clock=VirtualClock(),
        pending_max=pending_max,
        on_published=on_published,
        folder=folder or new_folder(),
    )


def sparse(version: int) -> Weights:
    """Each policy changes three elements of the one before."""
    numbers = np.random.default_rng(0).integers(0x3C00, 0x3D00, 600, dtype=np.uint16)
    for step in range(version):
        numbers[(7 * step + np.array([0, 200, 400])) % 600] += 1
    return {"layer": WeightTensor("bf16", (20, 30), numbers)}


async def publish(
    coordinator: BatchCoordinator, versions: range, *, rows: UntrustedRow | None = None, folder: Path | None = None
) -> None:
    publisher = make(coordinator, rows=rows, folder=folder)
    await publisher.start()
    for version in versions:
        await publisher.submit(version, sparse(version), provenance(version))
    await publisher.flush()
    await publisher.close()
