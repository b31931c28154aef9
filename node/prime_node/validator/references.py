"""Trusted rollouts beside unseeded ones, so that their rewards can be compared (prime_protocol/reward_ranks.py).

Which groups are sampled, and by which seeds, follows from a secret of this process and the bundle's digest: nobody can foresee it
when he uploads, and a bundle that is handed out twice is compared with the same completions. Both are drawn from one policy, the
bundle's, and each reference serves one comparison only, or the ranks of an honest worker would not be a uniformly random choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blake3 import blake3

from prime_node.ports.engine import Engine, GenerateRequest
from prime_protocol.assignment import Lease
from prime_protocol.noise import SEED_MAX
from prime_protocol.rollout import Completion
from prime_protocol.run_spec import RunSpec

References = Mapping[int, Sequence[Completion]]
"""What a validator sampled for a bundle, by index of the group in the lease: as many as the worker was asked for."""


async def sample_references(lease: Lease, engine: Engine, *, spec: RunSpec, bundle: str, secret: bytes) -> References:
    """The engine holds the policy that sampled the bundle. Groups whose environment answers are not compared."""
    turns_max = {one.name: one.turns_max for one in spec.environments}
    indices: list[int] = []
    requests: list[GenerateRequest] = []
    for index, group in enumerate(lease.groups):
        size = len(group.seeds)
        stream = blake3(f"{bundle}\0{index}".encode(), key=secret).digest(length=8 * (1 + size))
        draw, *seeds = (int.from_bytes(stream[8 * i : 8 * i + 8], "big") for i in range(1 + size))
        if draw < spec.checks.reference_share * 2**64 and turns_max[group.problem.environment] == 1:
            indices += [index] * size
            requests += [GenerateRequest(group.prompt_token_ids, seed & SEED_MAX) for seed in seeds]
    sampled = await engine.generate(requests, lease.sampling) if requests else []
    references: dict[int, list[Completion]] = {}
    for index, completion in zip(indices, sampled, strict=True):
        references.setdefault(index, []).append(completion)
    return references
