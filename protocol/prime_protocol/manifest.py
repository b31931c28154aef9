"""Manifests: the trainer's signed description of one published policy.

A publication is a manifest and some blobs (files, objects in a bucket, ranges of a CDN). The manifest names every resulting
tensor's digest, and one or more encodings: ways to those tensors, from nothing or from an older policy. An encoding is an index
and some parts. A part holds chunks one after another; a chunk is a piece of one tensor that decodes alone; the index names each
chunk's digest. So nothing has to be decoded before it has been checked, nothing is used before its result has been, and a
receiver reads the index of the one way that it takes.
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
from prime_protocol.key_ring import ChainPoint, Role
from prime_protocol.run_spec import PinnedRun


class CheckpointKind(StrEnum):
    """What an encoding needs beside itself."""

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
    """One blob of an encoding."""

    digest: Digest
    size: int = Field(ge=1, le=2**31)


class Encoding(WireModel):
    """One way to the policy's weights. Parts may be shared with other encodings: they are named by digest."""

    kind: CheckpointKind
    base: BasePolicy | None
    """Set for a delta."""
    index: PartEntry
    """The chunk table, a blob of its own: chunk_index.py."""
    parts: tuple[PartEntry, ...] = Field(max_length=limits.CHUNKS_MAX)

    @property
    def blobs(self) -> tuple[PartEntry, ...]:
        """Everything that a receiver downloads, the index first."""
        return (self.index, *self.parts)

    @property
    def sent_bytes(self) -> int:
        return sum(blob.size for blob in self.blobs)

    @property
    def base_version(self) -> int | None:
        """None for an anchor. A manifest has at most one encoding for each value."""
        return None if self.base is None else self.base.policy_version


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
    previous: Digest | None
    """Digest of the manifest of policy_version - 1; None for policy 0."""
    model_config_digest: Digest
    """Of the run's config.json: these weights belong to this architecture."""
    state_root: Digest
    """weights.state_root over `tensors`."""
    tensors: tuple[TensorEntry, ...] = Field(min_length=1, max_length=limits.CHUNKS_MAX)
    encodings: tuple[Encoding, ...] = Field(min_length=1, max_length=limits.ENCODINGS_MAX)
    produced_by: Provenance
    created_at_ms: Count

    @property
    def blobs(self) -> tuple[PartEntry, ...]:
        """Everything that must be there before the manifest is."""
        return tuple(blob for encoding in self.encodings for blob in encoding.blobs)

    def encoding(self, base_version: int | None) -> Encoding | None:
        """The delta against that policy; None asks for the anchor."""
        return next((encoding for encoding in self.encodings if encoding.base_version == base_version), None)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest whose signature was verified for a pinned run. Whether it continues the chain is chain.py's question."""

    manifest: Manifest
    digest: str
    envelope: Envelope

    @property
    def point(self) -> ChainPoint:
        """Its place in the chain."""
        return ChainPoint(policy_version=self.manifest.policy_version, manifest=self.digest)


def sign_manifest(manifest: Manifest, *keys: SigningKey) -> SignedManifest:
    envelope = seal(manifest, PayloadType.MANIFEST, *keys)
    return SignedManifest(manifest, envelope.digest, envelope)


def open_manifest(envelope: Envelope, run: PinnedRun) -> SignedManifest:
    """Signature by a trainer of the run, then schema, then whether that trainer was to sign this policy. Raises PeerError."""
    payload = run.keys.verify_kept(envelope, PayloadType.MANIFEST, Role.TRAINER)
    manifest = parse_json(payload, Manifest)
    signed = SignedManifest(manifest, envelope.digest, envelope)
    run.keys.verify_manifest(envelope, signed.point)
    return signed
