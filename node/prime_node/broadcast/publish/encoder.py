"""Make the encodings of each next policy, and hold what that takes: older weights, and the sizes of what was published.

spans.py decides which encodings are made. A policy is a copy that encodes itself; `WholeCopy` is one in this process's memory.
Memory: the weights of the last policy, of the last one at each longer span, and of policy 0, so len(spans) + 1 policies at most.
Encodings stream out part by part, so they take one part, and some chunks for each thread. A base that is not held (after a
restart) is skipped until its turn comes again; policy 0 can be supplied from outside.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from prime_node.broadcast.publish.spans import (
    SpanRules,
    anchor_is_due,
    needed_later,
    paying_deltas,
    planned_bases,
    worth_remembering,
)
from prime_node.broadcast.routes import UpdateRoute, routes_of
from prime_node.ports.train_backend import PolicyCopy
from prime_protocol.checkpoint import encode_parts, tensor_table
from prime_protocol.manifest import BasePolicy, Encoding, Manifest, PartEntry, TensorEntry
from prime_protocol.weights import Weights, num_bytes


@dataclass(frozen=True, slots=True)
class Published:
    """One policy that was announced."""

    policy_version: int
    state_root: str
    raw_bytes: int
    """Bytes of all tensors."""
    encodings: Mapping[str, int]
    """Bytes of each encoding: "anchor", "delta_1" for the one from the policy before, "delta_4" and so on."""
    seconds: float
    """Duration from the start of its turn."""
    encode_seconds: float
    """Part of `seconds` until everything was encoded."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that a worker that keeps up downloads for it."""
        return self.encodings.get("delta_1", self.encodings.get("anchor", min(self.encodings.values())))

    @property
    def ratio(self) -> float:
        """Ratio of raw to sent bytes."""
        return self.raw_bytes / max(1, self.sent_bytes)


class Attachment(Protocol):
    """Further public blobs of a policy, which its provenance names."""

    def blobs(self) -> Iterator[Callable[[], bytes]]:
        """Yield a function for each blob, which reads it."""

    def drop(self) -> None:
        """Release what holds them. Idempotent."""


log = logging.getLogger(__name__)
ENCODE_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Half the cores: encoding runs during the next step, which needs the others."""


@dataclass(frozen=True, slots=True)
class WholeCopy:
    """Implementation of ports.train_backend.PolicyCopy. The weights must not change any more."""

    weights: Weights

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors."""
        return num_bytes(self.weights)

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Return the table of tensors."""
        return tensor_table(self.weights)

    def encode(
        self, base: tuple[BasePolicy, WholeCopy] | None, *, keep: Callable[[PartEntry, bytearray], object]
    ) -> tuple[Encoding, bytes]:
        """Encode the policy, as an anchor or against `base`. Return the encoding and its index."""
        old = None if base is None else (base[0], base[1].weights)
        if ENCODE_THREADS == 1:
            return encode_parts(self.weights, old, keep=keep)
        with ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="encode") as pool:
            return encode_parts(self.weights, old, keep=keep, pool=pool)

    def drop(self) -> None:
        """Do nothing: Python frees the memory."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoding's manifest entry, and its index. Its parts went to `keep`."""

    encoding: Encoding
    index: bytes


@dataclass(frozen=True, slots=True)
class _Held:
    policy: BasePolicy
    copy: PolicyCopy


class SpanEncoder:
    """Encoder of one run. `encode` is heavy and may run in a thread; calls do not overlap."""

    def __init__(self, rules: SpanRules) -> None:
        self.rules = rules
        self._held: dict[int, _Held] = {}
        self._routes: dict[int, tuple[UpdateRoute, ...]] = {}

    @property
    def held(self) -> tuple[int, ...]:
        """Policies whose weights are in memory."""
        return tuple(sorted(self._held))

    def encode(
        self, policy_version: int, copy: PolicyCopy, keep: Callable[[PartEntry, bytearray], object]
    ) -> list[Encoded]:
        """Return every encoding that pays: the anchor first, then deltas from the nearest base to the farthest.

        `keep` gets the parts of every encoding that is tried.
        """
        anchor_bytes = self._anchor_bytes()
        deltas: dict[int, Encoded] = {}
        for base_version in planned_bases(policy_version, self.rules):
            if base := self._held.get(base_version):
                deltas[base_version] = Encoded(*copy.encode((base.policy, base.copy), keep=keep))
        sizes = {base: delta.encoding.sent_bytes for base, delta in deltas.items()}
        paying = paying_deltas(policy_version, sizes, self._routes, anchor_bytes=anchor_bytes)
        chosen = {base: sizes[base] for base in paying}
        needs_anchor = anchor_is_due(policy_version, chosen, self._routes, self.rules, anchor_bytes=anchor_bytes)
        anchor = [Encoded(*copy.encode(None, keep=keep))] if needs_anchor else []
        return anchor + [deltas[base] for base in paying]

    def published(self, manifest: Manifest, copy: PolicyCopy, *, head: int) -> None:
        """Record a published policy; drop what no policy after `head` needs."""
        version = manifest.policy_version
        self._routes = worth_remembering({**self._routes, version: routes_of(manifest)})
        needed = needed_later(head, self.rules)
        if version in needed and version not in self._held:
            policy = BasePolicy(policy_version=version, state_root=manifest.state_root)
            self._held[version] = _Held(policy, copy)
        else:
            copy.drop()
        for gone in self._held.keys() - needed:
            self._held.pop(gone).copy.drop()
        log.debug("keeping policies %s as bases, %d bytes each", self.held, copy.raw_bytes)

    def _anchor_bytes(self) -> int | None:
        """Return the size of an anchor, estimated by the newest one's; all are of similar size."""
        for version in sorted(self._routes, reverse=True):
            for route in self._routes[version]:
                if route.base_version is None:
                    return route.sent_bytes
        return None
