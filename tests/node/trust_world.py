"""Sources of a run whose keys change, and what one machine knows of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.node.table_engine import table_weights
from tests.node.worker_world import (
    ROOT,
    MemorySource,
    make_run,
    next_ring,
)
from tests.time_world import VirtualClock

from prime_node.broadcast.follow.trust import Trust
from prime_protocol.envelope import Envelope
from prime_protocol.identity import SigningKey

NEW_TRAINER, NEW_COORDINATOR = SigningKey(b"\x50" * 32), SigningKey(b"\x51" * 32)


def make_source(clock: VirtualClock, *, policies: int = 1) -> MemorySource:
    source = MemorySource(make_run())
    source.now_ms = clock.now_ms
    for version in range(policies):
        source.publish(table_weights(version))
    return source


def make_trust(folder: Path, clock: VirtualClock, *sources: MemorySource) -> Trust:
    """Make a new machine: it shares nothing with the sources but the join link."""
    run = make_run()
    assert run.digest == sources[0].run.digest
    return Trust(
        run, [(f"source-{i}", source) for i, source in enumerate(sources)], folder, clock=clock, rng=random.Random(1)
    )


def rotate(source: MemorySource, *signers: SigningKey, **keys: Any) -> Envelope:
    """Add the source's next ring, at its head, and return it."""
    head = source.signed(max(source.manifests))
    ring = next_ring(source.run.keys, *(signers or (ROOT,)), published=head.point, **keys)
    source.run.keys.add(ring)
    source.key_rings.append(ring)
    return ring
