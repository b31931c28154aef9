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
from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.evidence import Moments
from prime_protocol.identity import SigningKey

NEW_TRAINER, NEW_COORDINATOR = SigningKey(b"\x50" * 32), SigningKey(b"\x51" * 32)


def pair_of(worker: str) -> PairMoments:
    moments = Moments(cap=1.0, lambdas=(1.0,), log_moments=(0.1,), num_tokens=1_000)
    return PairMoments(worker=worker, validator="table/fp32/cpu", moments={"logprob": moments})


CALIBRATED = CheckPolicy(calibration=Calibration(pairs=(pair_of("table/fp32/cpu"),)))


def make_source(clock: VirtualClock, *, policies: int = 1, checks: CheckPolicy | None = None) -> MemorySource:
    source = MemorySource(make_run(checks=checks or CheckPolicy()))
    source.now_ms = clock.now_ms
    for version in range(policies):
        source.publish(table_weights(version))
    return source


def make_trust(folder: Path, clock: VirtualClock, *sources: MemorySource) -> Trust:
    """Make a new machine: it shares nothing with the sources but the join link."""
    run = make_run(checks=sources[0].run.spec.checks)
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


def amend(source: MemorySource, worker: str, key: SigningKey = ROOT) -> Envelope:
    """Add a class of workers to the calibration of the source's run, and return the amendment."""
    known = source.run.calibrations
    amendment = CalibrationAmendment(
        run=source.run.digest,
        version=known.version + 1,
        previous=known.digest,
        pairs=(pair_of(worker),),
        created_at_ms=0,
    )
    envelope = seal(amendment, PayloadType.CALIBRATION, key)
    known.add(envelope)
    return envelope
