"""Bundles that one call of the scorer verifies together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from prime_node.validator.judge import OpenedBundle
from prime_node.validator.spans import policies_of
from prime_protocol.assignment import Sampling
from prime_protocol.replies import CheckTask

T = TypeVar("T")


class BundleAudit(NamedTuple):
    """A bundle to verify by a forward pass."""

    task: CheckTask
    bundle: OpenedBundle


class BatchKey(NamedTuple):
    """What bundles of one call have in common."""

    policies: tuple[int, ...]
    """Policies that sampled them. A bundle of several policies is verified alone."""
    sampling: Sampling
    is_unseeded: bool
    has_proofs: bool


def batches(audits: Iterable[BundleAudit], *, tokens_max: int) -> list[list[BundleAudit]]:
    """Divide bundles into batches of one key and at most `tokens_max` completion tokens. A larger bundle is alone."""
    found: list[list[BundleAudit]] = []
    open_batches: dict[BatchKey, list[BundleAudit]] = {}
    for audit in audits:
        key = _key(audit.bundle)
        batch = open_batches.get(key)
        num_tokens = sum(one.bundle.rollouts.num_tokens for one in [*(batch or ()), audit])
        if batch is None or num_tokens > tokens_max or len(key.policies) > 1:
            batch = open_batches[key] = []
            found.append(batch)
        batch.append(audit)
    return found


async def take_waiting(queue: asyncio.Queue[T | None], *, most: int) -> list[T]:
    """Remove and return what waits in a queue, 1 to `most` items. None is the end: the list is empty then."""
    found: list[T] = []
    while not found or (len(found) < most and not queue.empty()):
        item = await queue.get()
        if item is None:
            if found:
                queue.put_nowait(None)  # for the next call
            break
        found.append(item)
    return found


def _key(bundle: OpenedBundle) -> BatchKey:
    policies = tuple(policies_of(bundle.rollouts))
    return BatchKey(policies, bundle.lease.sampling, bundle.is_unseeded, bundle.rollouts.proofs_CB is not None)
