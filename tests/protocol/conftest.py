"""One small, valid run: keys, RunSpec, lease, bundle, two policies. Tests tamper with copies of its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest

from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.checkpoint import EncodedCheckpoint, encode_checkpoint, tensor_table
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, WireModel, seal
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.manifest import BasePolicy, Manifest, Provenance, SignedManifest, sign_manifest
from prime_protocol.parcel import pack_parcel
from prime_protocol.rollout import (
    Completion,
    EngineInfo,
    FinishReason,
    RolloutHeader,
    Rollouts,
    pack_body,
    rollouts_for,
)
from prime_protocol.run_spec import EnvironmentSpec, ModelFile, PinnedRun, RunSpec
from prime_protocol.weights import Weights, WeightTensor, root_of

NOW_MS = 1_790_000_000_000
CONFIG = b'{"model_type": "qwen3"}'
STOP = 257
Raises = Callable[..., PeerError]
Model = TypeVar("Model", bound=WireModel)


@dataclass(frozen=True)
class Sample:
    root: SigningKey
    coordinator: SigningKey
    trainer: SigningKey
    validator: SigningKey
    worker: SigningKey
    stranger: SigningKey
    run: PinnedRun
    lease: Lease
    completions: tuple[Completion, ...]
    rollouts: Rollouts
    header: RolloutHeader
    body: bytes
    weights: tuple[Weights, ...]
    encoded: tuple[EncodedCheckpoint, ...]
    manifests: tuple[SignedManifest, ...]

    @property
    def parcel(self) -> bytes:
        return pack_parcel(self.header, self.body, PayloadType.ROLLOUT, self.worker)


@pytest.fixture(scope="session")
def sample() -> Sample:
    root, coordinator, trainer, validator, worker, stranger = (SigningKey(bytes([i]) * 32) for i in range(1, 7))
    spec = RunSpec(
        name="sample",
        created_at_ms=NOW_MS,
        keys=RoleKeys(
            root=(root.key_id,),
            coordinator=(coordinator.key_id,),
            trainer=(trainer.key_id,),
            validator=(validator.key_id,),
        ),
        model_files=(ModelFile(name="config.json", digest=digest_of(CONFIG), size=len(CONFIG)),),
        vocab_size=264,
        environments=(EnvironmentSpec(name="spell", id="reasoning_gym", options={"task": "spell_backward"}),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(STOP,)),
        max_steps=10,
        groups_per_step=2,
        rollouts_per_group=2,
    )
    run = _pin(spec, root)
    weights = _policies()
    base = BasePolicy(policy_version=0, state_root=root_of(weights[0]))
    encoded = (
        encode_checkpoint(weights[0], part_bytes=64),
        encode_checkpoint(weights[1], (base, weights[0]), part_bytes=64),
    )
    first = sign_manifest(_manifest(run, weights[0], encoded[0], previous=None), trainer)
    second = sign_manifest(_manifest(run, weights[1], encoded[1], previous=first), trainer)
    lease = Lease(
        run=run.digest,
        lease_id=digest_of(b"lease"),
        worker=worker.key_id,
        step=2,
        policy_version=1,
        policy_digest=second.digest,
        groups=tuple(
            GroupAssignment(
                slot=slot,
                problem=Problem(environment="spell", index=slot),
                prompt_token_ids=(104, 105),
                seeds=(slot * 10, slot * 10 + 1),
            )
            for slot in (4, 5)
        ),
        sampling=spec.sampling,
        issued_at_ms=NOW_MS,
        expires_at_ms=NOW_MS + 60_000,
    )
    completions = (
        Completion((97, STOP), (-0.5, -0.25), FinishReason.STOP),
        Completion((98, 99, 100, 101), (-1.0, -2.0, -0.125, -0.5), FinishReason.LENGTH),
        Completion((STOP,), (-3.0,), FinishReason.STOP),
        Completion((1, 2, 3, STOP), (-0.5, -0.5, -0.5, -0.5), FinishReason.STOP),
    )
    rollouts = rollouts_for(lease, completions)
    body, decompressed = pack_body(rollouts)
    header = RolloutHeader(
        body_digest=digest_of(body),
        body_bytes=len(body),
        run=run.digest,
        worker=worker.key_id,
        lease_id=lease.lease_id,
        step=lease.step,
        policy_version=lease.policy_version,
        policy_digest=lease.policy_digest,
        num_rollouts=4,
        decompressed_bytes=decompressed,
        engine=EngineInfo(name="test", version="1", dtype="fp32", device="cpu"),
        created_at_ms=NOW_MS,
    )
    return Sample(
        root, coordinator, trainer, validator, worker, stranger,
        run, lease, completions, rollouts, header, body, weights, encoded, (first, second),
    )  # fmt: skip


@pytest.fixture(scope="session")
def raises() -> Raises:
    """`raises(ErrorCode.X, call, *args)`: the call raises exactly that PeerError."""

    def check(code: ErrorCode, call: Callable[..., object], *args: object, **named: object) -> PeerError:
        with pytest.raises(PeerError) as caught:
            call(*args, **named)
        assert caught.value.code is code, caught.value
        return caught.value

    return check


@pytest.fixture(scope="session")
def changed() -> Callable[..., WireModel]:
    """`changed(message, field=value)`: a validated copy of a message with other fields."""

    def change(message: Model, **fields: object) -> Model:
        return type(message).model_validate(
            {name: getattr(message, name) for name in type(message).model_fields} | fields
        )

    return change


def _pin(spec: RunSpec, root: SigningKey) -> PinnedRun:
    envelope = seal(spec, PayloadType.RUN_SPEC, root)
    return PinnedRun(envelope.digest, spec, envelope)


def _policies() -> tuple[Weights, Weights]:
    """Two bf16 matrices, an fp32 vector, and a tensor without elements; the second policy differs in two elements."""
    embed = np.arange(0x3F00, 0x3F00 + 300, dtype=np.uint16)
    norm = np.full(5, 0x3F800000, np.uint32)
    changed = embed.copy()
    changed[[3, 77]] += 1
    return tuple(  # type: ignore[return-value]
        {
            "embed": WeightTensor("bf16", (30, 10), matrix),
            "empty": WeightTensor("bf16", (0, 4), np.zeros(0, np.uint16)),
            "head": WeightTensor("bf16", (10, 30), matrix[::-1].copy()),
            "norm": WeightTensor("fp32", (5,), norm),
        }
        for matrix in (embed, changed)
    )


def _manifest(
    run: PinnedRun, weights: Weights, encoded: EncodedCheckpoint, previous: SignedManifest | None
) -> Manifest:
    version = 0 if previous is None else previous.manifest.policy_version + 1
    return Manifest(
        run=run.digest,
        policy_version=version,
        previous=None if previous is None else previous.digest,
        model_config_digest=digest_of(CONFIG),
        state_root=root_of(weights),
        tensors=tensor_table(weights),
        encodings=(encoded.encoding,),
        produced_by=Provenance(
            step=version - 1,
            optimizer_steps=version,
            batch=None if previous is None else digest_of(b"batch"),
            software="sample 1",
        ),
        created_at_ms=NOW_MS,
    )
