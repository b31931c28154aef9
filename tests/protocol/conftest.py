"""One small, valid run: keys, RunSpec, lease, bundle, two policies. Tests tamper with copies of its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
from tests.builder import base_of, build_header, build_lease, build_manifest, build_spec, pinned, role_keys

from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.checkpoint import EncodedCheckpoint, encode_checkpoint
from prime_protocol.envelope import PayloadType, WireModel
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.manifest import SignedManifest, sign_manifest
from prime_protocol.parcel import pack_parcel
from prime_protocol.rollout import Completion, FinishReason, RolloutHeader, Rollouts, pack_body, rollouts_for
from prime_protocol.run_spec import EnvironmentSpec, PinnedRun
from prime_protocol.weights import Weights, WeightTensor

NOW_MS = 1_790_000_000_000
CONFIG = b'{"model_type": "qwen3"}'
STOP = 257
Raises = Callable[..., RemoteError]
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
    spec = build_spec(
        role_keys(root, coordinator, trainer, validator),
        {"config.json": CONFIG},
        name="sample",
        created_at_ms=NOW_MS,
        vocab_size=264,
        environments=(EnvironmentSpec(name="spell", id="reasoning_gym", options={"task": "spell_backward"}),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(STOP,)),
    )
    run = pinned(spec, root)
    weights = _policies()
    anchor = encode_checkpoint(weights[0], part_bytes=64)
    first = sign_manifest(build_manifest(run, None, weights[0], anchor, created_at_ms=NOW_MS), trainer)
    delta = encode_checkpoint(weights[1], (base_of(first), weights[0]), part_bytes=64)
    second = sign_manifest(build_manifest(run, first, weights[1], delta, created_at_ms=NOW_MS), trainer)
    groups = [
        GroupAssignment(
            slot=slot,
            problem=Problem(environment="spell", index=slot),
            prompt_token_ids=(104, 105),
            seeds=(slot * 10, slot * 10 + 1),
        )
        for slot in (4, 5)
    ]
    lease = build_lease(
        run,
        worker,
        groups,
        step=2,
        policy_version=1,
        policy_digest=second.digest,
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
    header = build_header(lease, body, decompressed, created_at_ms=NOW_MS)
    return Sample(
        root, coordinator, trainer, validator, worker, stranger,
        run, lease, completions, rollouts, header, body, weights, (anchor, delta), (first, second),
    )  # fmt: skip


@pytest.fixture(scope="session")
def raises() -> Raises:
    """`raises(ErrorCode.X, call, *args)`: the call raises exactly that RemoteError."""

    def check(code: ErrorCode, call: Callable[..., object], *args: object, **named: object) -> RemoteError:
        with pytest.raises(RemoteError) as caught:
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
