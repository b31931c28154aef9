"""Manifests: the trainer's signed description of one published policy.

A publication consists of a manifest and some blobs (files, objects in a bucket, ranges of a CDN). The manifest names
the digest of every resulting tensor. It offers one or more encodings: update paths to those tensors, from nothing or
from an older policy. An encoding has an index and some parts. A part holds consecutive chunks; a chunk is a piece of
one tensor that decodes alone; the index names each chunk's digest. So a receiver checks everything before decoding it,
checks the result before using it, and reads only the index of the update path that it takes.
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
    """Dependence of an encoding on other weights."""

    ANCHOR = "anchor"
    """Encoding that needs nothing else."""
    DELTA = "delta"
    """Encoding that needs the weights of its base policy."""


class BasePolicy(WireModel):
    """Policy that a delta is applied to."""

    policy_version: Step
    state_root: Digest


class TensorEntry(WireModel):
    """One tensor of the policy, as it is after decoding."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...] = Field(max_length=limits.TENSOR_RANK_MAX)
    digest: Digest
    """Digest of its raw little-endian bytes."""


class PartEntry(WireModel):
    """One blob of an encoding."""

    digest: Digest
    size: int = Field(ge=1, le=2**31)


class Encoding(WireModel):
    """One update path to the policy's weights. Encodings may share parts, because digests name them."""

    kind: CheckpointKind
    base: BasePolicy | None
    """Base policy, for a delta only."""
    index: PartEntry
    """Blob of the chunk table: chunk_index.py."""
    parts: tuple[PartEntry, ...] = Field(max_length=limits.CHUNKS_MAX)

    @property
    def blobs(self) -> tuple[PartEntry, ...]:
        """All blobs that a receiver downloads, the index first."""
        return (self.index, *self.parts)

    @property
    def sent_bytes(self) -> int:
        """Total size of all blobs."""
        return sum(blob.size for blob in self.blobs)

    @property
    def base_version(self) -> int | None:
        """Version of the base, None for an anchor. A manifest has at most one encoding for each value."""
        return None if self.base is None else self.base.policy_version


class Provenance(WireModel):
    """Origin of the policy."""

    step: int = Field(ge=-1, le=limits.STEP_MAX)
    """Training step: policy_version - 1. -1 for the initial policy."""
    optimizer_steps: Count
    """Optimizer steps since the run's own training began, supervised ones included."""
    batch: Digest | None
    """Digest of the TrainBatch payload that the step consumed; None for the initial policy."""
    software: Name
    lr: float | None = Field(default=None, ge=0.0, exclude_if=lambda value: value is None)
    """Learning rate of the step's last optimizer step, exactly; null for policy 0. This field and the next three: section 25."""
    lr_multiplier: float | None = Field(default=None, gt=0.0, le=1.0, exclude_if=lambda value: value is None)
    """Multiplier of the next step's learning rate."""
    numerics: Name | None = Field(default=None, exclude_if=lambda value: value is None)
    """Arithmetic that computed the step. Example: `torch-2.13.0/cpu/avx512/fp32/ranks1/tree128`."""
    training_state: Digest | None = Field(default=None, exclude_if=lambda value: value is None)
    """Digest of the index of the whole training state at this policy, a public blob."""


class Manifest(WireModel):
    """One published policy."""

    run: Digest
    policy_version: Step
    previous: Digest | None
    """Digest of the manifest of policy_version - 1; None for policy 0."""
    model_config_digest: Digest
    """Digest of the run's config.json: the architecture of these weights."""
    state_root: Digest
    """Digest of all tensors: weights.state_root over `tensors`."""
    tensors: tuple[TensorEntry, ...] = Field(min_length=1, max_length=limits.CHUNKS_MAX)
    encodings: tuple[Encoding, ...] = Field(min_length=1, max_length=limits.ENCODINGS_MAX)
    produced_by: Provenance
    created_at_ms: Count

    @property
    def blobs(self) -> tuple[PartEntry, ...]:
        """All blobs that must be available before the manifest is."""
        return tuple(blob for encoding in self.encodings for blob in encoding.blobs)

    def encoding(self, base_version: int | None) -> Encoding | None:
        """Return the delta against that policy; None asks for the anchor."""
        return next((encoding for encoding in self.encodings if encoding.base_version == base_version), None)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """Manifest whose signature was verified for a pinned run. chain.py checks whether it continues the chain."""

    manifest: Manifest
    digest: str
    envelope: Envelope

    @property
    def point(self) -> ChainPoint:
        """Place of the manifest in the chain."""
        return ChainPoint(policy_version=self.manifest.policy_version, manifest=self.digest)


def sign_manifest(manifest: Manifest, *keys: SigningKey) -> SignedManifest:
    """Sign a manifest with one trainer key or several."""
    envelope = seal(manifest, PayloadType.MANIFEST, *keys)
    return SignedManifest(manifest, envelope.digest, envelope)


def open_manifest(envelope: Envelope, run: PinnedRun) -> SignedManifest:
    """Verify a manifest's envelope and parse it. Raises RemoteError.

    (1) a trainer key of the run signed it; (2) schema; (3) that key is responsible for this policy.
    """
    payload = run.keys.verify_kept(envelope, PayloadType.MANIFEST, Role.TRAINER)
    manifest = parse_json(payload, Manifest)
    signed = SignedManifest(manifest, envelope.digest, envelope)
    run.keys.verify_manifest(envelope, signed.point)
    return signed
