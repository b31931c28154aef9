"""Manifests: the trainer's signed description of one published policy.

A publication is a manifest and some parts. A part is a blob (a file, an object in a bucket, a range of a CDN) that holds
chunks one after another; a chunk is a piece of one tensor that decodes alone. The manifest names the digest of every part,
every chunk and every resulting tensor, so nothing has to be decoded before it has been checked, and nothing is used before
its result has been.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Count, Name, Step
from prime_protocol.digest import Digest
from prime_protocol.envelope import Envelope, PayloadType, WireModel, parse_json, seal
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun


class CheckpointKind(StrEnum):
    """What a publication needs beside itself."""

    ANCHOR = "anchor"
    """Nothing: it stands alone."""
    DELTA = "delta"
    """The weights of its base policy."""


class BasePolicy(WireModel):
    """The policy that a delta is applied to."""

    policy_version: Step
    state_root: Digest


class TensorEntry(WireModel):
    """One tensor of the policy, as it is after decoding."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...] = Field(max_length=limits.TENSOR_RANK_MAX)
    digest: Digest
    """Of its raw little-endian bytes."""


class PartEntry(WireModel):
    """One blob of the publication."""

    digest: Digest
    size: int = Field(ge=1, le=2**31)


class ChunkEntry(WireModel):
    """A range of one part that decodes to a range of one tensor."""

    part: Count
    """Index of its part."""
    offset: Count
    """First byte in the part."""
    size: int = Field(ge=1, le=2**31)
    """Compressed bytes."""
    digest: Digest
    """Of the compressed bytes."""
    tensor: Count
    """Index of its tensor."""
    start: Count
    """First element."""
    count: int = Field(ge=1, le=2**31)
    """Elements."""


class Provenance(WireModel):
    """What produced the policy."""

    step: int = Field(ge=-1, le=limits.STEP_MAX)
    """The training step: policy_version - 1. -1 for the initial policy."""
    optimizer_steps: Count
    """Optimizer steps since the run's own training began, supervised ones included."""
    batch: Digest | None
    """Digest of the TrainBatch payload that the step consumed; None for the initial policy."""
    software: Name


class Manifest(WireModel):
    """One published policy."""

    run: Digest
    policy_version: Step
    kind: CheckpointKind
    base: BasePolicy | None
    """Set for a delta."""
    previous: Digest | None
    """Digest of the manifest of policy_version - 1; None for policy 0."""
    model_config_digest: Digest
    """Of the run's config.json: these weights belong to this architecture."""
    state_root: Digest
    """weights.state_root over `tensors`."""
    tensors: tuple[TensorEntry, ...] = Field(min_length=1, max_length=limits.CHUNKS_MAX)
    parts: tuple[PartEntry, ...] = Field(max_length=limits.CHUNKS_MAX)
    chunks: tuple[ChunkEntry, ...] = Field(max_length=limits.CHUNKS_MAX)
    """In the order of the parts and their bytes: they fill each part without gap."""
    produced_by: Provenance
    created_at_ms: Count

    @property
    def sent_bytes(self) -> int:
        """What a worker downloads for it."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest whose signature was verified for a pinned run. Whether it continues the chain is chain.py's question."""

    manifest: Manifest
    digest: str
    envelope: Envelope


def sign_manifest(manifest: Manifest, key: SigningKey) -> SignedManifest:
    envelope = seal(manifest, PayloadType.MANIFEST, key)
    return SignedManifest(manifest, envelope.digest, envelope)


def open_manifest(envelope: Envelope, run: PinnedRun) -> SignedManifest:
    """Signature by the run's trainer, then schema. Raises PeerError."""
    payload = envelope.verify(PayloadType.MANIFEST, trusted=run.spec.keys.trainer)
    return SignedManifest(parse_json(payload, Manifest), envelope.digest, envelope)
