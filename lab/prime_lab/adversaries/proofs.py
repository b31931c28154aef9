"""Cheats that sample honestly and forge the proofs of hidden states: they never had them, or had other ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prime_lab.adversaries.engine import Means, Model, rescored
from prime_node.ports.engine import GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.proof import MODULUS_MIN, PROOF_BYTES
from prime_protocol.rollout import Completion

Requests = Sequence[GenerateRequest]


async def copied_proofs(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Send the proofs of the previous completion, if it has as many."""
    completions = await model.generate(requests, sampling)
    return [
        replace(one, proofs=other.proofs) if len(other.proofs) == len(one.proofs) else one
        for one, other in zip(completions, [completions[-1], *completions[:-1]], strict=True)
    ]


async def zero(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Send only zeros: upstream, a modulus of zero crashes the verifier."""
    return [replace(one, proofs=bytes(len(one.proofs))) for one in await model.generate(requests, sampling)]


async def blank(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Send a valid modulus with the zero polynomial."""
    proof = MODULUS_MIN.to_bytes(2, "big") + bytes(PROOF_BYTES - 2)
    completions = await model.generate(requests, sampling)
    return [replace(one, proofs=proof * (len(one.proofs) // PROOF_BYTES)) for one in completions]


async def missing(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Send no proofs except for the first completion: upstream, fewer proofs give fewer results, and all of them pass."""
    first, *others = await model.generate(requests, sampling)
    return [first, *(replace(one, proofs=b"") for one in others)]


async def of_another_step(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Send the proofs that the policy of two steps before has for the same tokens."""
    completions = await model.generate(requests, sampling)
    await model.load(means.seen[max(0, len(means.seen) - 3)], policy_version=0)
    older = await rescored(model, requests, completions, sampling)
    await model.load(means.seen[-1], policy_version=0)
    return [replace(one, proofs=other.proofs) for one, other in zip(completions, older, strict=True)]
