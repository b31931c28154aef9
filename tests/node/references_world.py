"""Shared parts of the tests of reference rewards: a run that compares rewards, and bundles of a worker that takes no seeds."""

from __future__ import annotations

from dataclasses import replace

from tests.node.table_engine import table_weights
from tests.node.validator_world import (
    TableScorer,
    make_bundle,
)
from tests.node.worker_world import make_run

from prime_node.ports.engine import GenerateRequest
from prime_node.validator.loop import run_validator as run_validator
from prime_protocol.assignment import Lease
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.noise import SEED_MAX
from prime_protocol.rollout import rollouts_for

COMPARED = CheckPolicy(unseeded=True, reference_share=1.0)
RUN = make_run(rollouts_per_group=16, checks=COMPARED)


async def sampled(num: int, lease: Lease, *, created_at_ms: int = 0) -> bytes:
    """Return the bundle of a worker without seeds that uploads the longest of several answers, which scores best here."""
    engine = TableScorer()
    await engine.load(table_weights(0), policy_version=0)
    requests = [GenerateRequest(group.prompt_token_ids, seed) for group in lease.groups for seed in group.seeds]
    drawn = [
        await engine.generate([replace(one, seed=(one.seed + turn) & SEED_MAX) for one in requests], lease.sampling)
        for turn in range(7, 7 + num)
    ]
    best = [max(several, key=lambda one: len(one.token_ids)) for several in zip(*drawn, strict=True)]
    unseeded = engine.info.model_copy(update={"seeded": False})
    return make_bundle(lease, rollouts_for(lease, best), engine=unseeded, created_at_ms=created_at_ms)
