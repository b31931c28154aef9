"""Shared parts of the tests of proofs: a run with proofs, and a lease of it."""

from __future__ import annotations

from tests.builder import build_lease
from tests.node.worker_world import WORKER, make_run

from prime_protocol.assignment import GroupAssignment, Problem, Sampling
from prime_protocol.check_policy import CheckPolicy

RUN = make_run(
    vocab_size=264,
    sampling=Sampling(completion_tokens_max=40, stop_token_ids=tuple(range(4))),
    checks=CheckPolicy(proofs=True),
)
LEASE = build_lease(
    RUN,
    WORKER,
    [
        GroupAssignment(
            slot=slot,
            problem=Problem(environment="toy", index=slot),
            prompt_token_ids=(80, 81 + slot),
            seeds=tuple(range(10 * slot, 10 * slot + 4)),
        )
        for slot in range(2)
    ],
)
