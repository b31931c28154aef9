"""Key rings: which keys may sign what, and how that may change. Root metadata of The Update Framework (TUF 1.0.33, 4.3, 5.3).

The RunSpec's keys are version 0. Version n + 1 names the digest of version n. A threshold of version n's root keys and
a threshold of its own sign it. So anyone with the join link can follow the chain from the RunSpec, and an attacker with
fewer root keys than the threshold can add nothing to it.

A ring names the newest manifest of its time by version and digest, and its trainer keys sign the manifests after that.
So the manifests of an outgoing key stay verifiable, and a thief of that key can sign neither future manifests nor
another history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.assignment import Count, Step, Text
from prime_protocol.digest import Digest
from prime_protocol.envelope import Envelope, PayloadType, WireModel, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import KeyId

Keys = Annotated[tuple[KeyId, ...], Field(min_length=1, max_length=limits.SIGNATURES_MAX)]


class Role(StrEnum):
    """Role of a key in a run."""

    ROOT = "root"
    COORDINATOR = "coordinator"
    TRAINER = "trainer"
    VALIDATOR = "validator"
    AUDITOR = "auditor"


class RoleKeys(WireModel):
    """Keys of each role, as key ids. Each role but the auditors' has at least one; a key may have several roles."""

    root: Keys
    """Signers of the RunSpec (all of them) and of key rings (as many as the threshold)."""
    coordinator: Keys
    """Signers of leases, receipts, batches and timestamps."""
    trainer: Keys
    """Signers of manifests."""
    validator: Keys
    """Signers of verdicts."""
    auditor: tuple[KeyId, ...] = Field(default=(), max_length=limits.SIGNATURES_MAX, exclude_if=lambda keys: not keys)
    """Signers of requests for bundles that were trained on, in a run that gives these to auditors. They sign nothing else."""
    root_threshold: int | None = Field(default=None, ge=1, le=limits.SIGNATURES_MAX)
    """Number of root keys that must sign the next key ring; None: all of them."""
    trainer_threshold: int = Field(default=1, ge=1, le=limits.SIGNATURES_MAX)
    """Number of trainer keys that must sign a manifest."""

    @model_validator(mode="after")
    def _thresholds_can_be_met(self) -> Self:
        for role in (Role.ROOT, Role.TRAINER):
            if self.threshold(role) > len(set(self.of(role))):
                raise ValueError(f"{role}_threshold is above the number of {role} keys")
        return self

    def of(self, role: Role) -> tuple[str, ...]:
        """Return the keys of a role."""
        keys: tuple[str, ...] = getattr(self, role)
        return keys

    def threshold(self, role: Role) -> int:
        """Return the number of signatures that a statement of the role needs."""
        if role is Role.ROOT:
            return len(set(self.root)) if self.root_threshold is None else self.root_threshold
        return self.trainer_threshold if role is Role.TRAINER else 1


class ChainPoint(WireModel):
    """Place in the chain of manifests. Example: ChainPoint(policy_version=41, manifest="af13...")."""

    policy_version: Step
    manifest: Digest


class KeyRing(WireModel):
    """Keys of a run from some moment on (envelope type KEY_RING)."""

    run: Digest
    version: int = Field(ge=1, le=limits.KEY_RINGS_MAX)
    previous: Digest
    """Digest of the previous ring; of the RunSpec for version 1."""
    keys: RoleKeys
    """All keys of all roles. A key that is missing here has lost its role."""
    published: ChainPoint | None
    """Newest manifest when the ring was made, None before the first. This ring's trainer keys sign the manifests after it."""
    created_at_ms: Count
    reason: Text = ""


@dataclass(slots=True)
class KeyChain:
    """Chain of a run's known key rings, each verified. It only grows; every verification of a signature uses it."""

    run: str
    """Digest of the RunSpec."""
    first: RoleKeys
    """Keys of the RunSpec."""
    rings: list[tuple[KeyRing, Envelope]] = field(default_factory=list)

    @property
    def version(self) -> int:
        """Version of the newest ring; 0 is the RunSpec."""
        return len(self.rings)

    @property
    def digest(self) -> str:
        """Digest of the newest ring; of the RunSpec if there is none."""
        return self.rings[-1][1].digest if self.rings else self.run

    @property
    def current(self) -> RoleKeys:
        """Keys of the newest ring; those of the RunSpec if there is none."""
        return self.rings[-1][0].keys if self.rings else self.first

    @property
    def published(self) -> ChainPoint | None:
        """Newest manifest that the root has named: no honest head is older."""
        return next((ring.published for ring, _ in reversed(self.rings) if ring.published is not None), None)

    def ever(self, role: Role) -> frozenset[str]:
        """Return every key that has or had the role."""
        return frozenset(self.first.of(role)).union(*(ring.keys.of(role) for ring, _ in self.rings))

    def is_revoked(self, key_id: str, role: Role) -> bool:
        """Return whether the key had the role and has lost it."""
        return key_id in self.ever(role) and key_id not in self.current.of(role)

    def check(self, envelope: Envelope) -> KeyRing:
        """Return the next ring, if the envelope holds it. Raises RemoteError.

        (1) size; (2) a threshold of the newest ring's root keys signed it; (3) schema and run; (4) it directly follows
        the newest ring; (5) a threshold of its own root keys signed it; (6) its manifest is not older than the last
        ring's.
        """
        if len(envelope.payload) > limits.KEY_RING_BYTES_MAX:  # (1)
            raise LimitExceeded("KEY_RING_BYTES_MAX", len(envelope.payload), limits.KEY_RING_BYTES_MAX)
        old = self.current
        payload = envelope.verify(PayloadType.KEY_RING, trusted=old.root, threshold=old.threshold(Role.ROOT))  # (2)
        ring = parse_json(payload, KeyRing)  # (3)
        if ring.run != self.run:
            raise RemoteError(ErrorCode.WRONG_RUN, f"key ring {ring.version} belongs to run {ring.run[:12]}")
        if (ring.version, ring.previous) != (self.version + 1, self.digest):  # (4)
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN,
                f"key ring {ring.version} does not follow ring {self.version} ({self.digest[:12]})",
            )
        envelope.verify(PayloadType.KEY_RING, trusted=ring.keys.root, threshold=ring.keys.threshold(Role.ROOT))  # (5)
        before, named = self.published, ring.published  # (6)
        if before is not None and (
            named is None
            or named.policy_version < before.policy_version
            or (named.policy_version == before.policy_version and named != before)
        ):
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN, f"key ring {ring.version} names an earlier policy than {before.policy_version}"
            )
        return ring

    def add(self, envelope: Envelope) -> KeyRing:
        """Add the next ring. Idempotent for the newest one. Raises RemoteError."""
        if self.rings and envelope.payload == self.rings[-1][1].payload:
            return self.rings[-1][0]
        ring = self.check(envelope)
        self.rings.append((ring, envelope))
        return ring

    def verify(self, envelope: Envelope, kind: PayloadType, role: Role) -> bytes:
        """Return the payload, signed by the role's current keys. Raises RemoteError: REVOKED if its keys have lost the role."""
        return self._verify(envelope, kind, role, self.current)

    def verify_kept(self, envelope: Envelope, kind: PayloadType, role: Role) -> bytes:
        """Return a stored payload that was verified on arrival: any key that ever had the role may sign. Raises RemoteError."""
        return envelope.verify(kind, trusted=self.ever(role))

    def replaced_by(self, envelope: Envelope, role: Role) -> KeyRing | None:
        """Return the ring that replaced the signers of a statement that `verify_kept` returned; None if one is current."""
        signers = {one.key_id for one in envelope.signatures}
        replaced = None
        for ring, _ in reversed(self.rings):
            if not signers.isdisjoint(ring.keys.of(role)):
                return replaced
            replaced = ring
        return replaced

    def verify_manifest(self, envelope: Envelope, here: ChainPoint) -> None:
        """Check that the trainer keys responsible for this place of the chain signed the policy.

        Raises RemoteError: FORK if the root has named another manifest for this policy, REVOKED if the signer had the
        role at another time only.
        """
        keys = self.first
        for ring, _ in self.rings:
            if ring.published is not None and here.policy_version <= ring.published.policy_version:
                if here.policy_version == ring.published.policy_version and here != ring.published:
                    raise RemoteError(
                        ErrorCode.FORK,
                        f"policy {here.policy_version} is {here.manifest[:12]}, but the run's root names "
                        f"{ring.published.manifest[:12]}",
                    )
                break
            keys = ring.keys
        self._verify(envelope, PayloadType.MANIFEST, Role.TRAINER, keys)

    def _verify(self, envelope: Envelope, kind: PayloadType, role: Role, keys: RoleKeys) -> bytes:
        trusted = keys.of(role)
        try:
            return envelope.verify(kind, trusted=trusted, threshold=keys.threshold(role))
        except RemoteError as error:
            if error.code is not ErrorCode.BAD_SIGNATURE:
                raise
            outdated = self.ever(role).difference(trusted).intersection(one.key_id for one in envelope.signatures)
            if not outdated:
                raise
            raise RemoteError(
                ErrorCode.REVOKED, f"signed by {min(outdated)}, not a {role} key here in key ring {self.version}"
            ) from None
