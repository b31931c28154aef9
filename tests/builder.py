"""Valid messages of a run, for the test worlds and the benches. `changes` replace what is built, field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prime_protocol.assignment import GroupAssignment, Lease
from prime_protocol.checkpoint import EncodedCheckpoint, root_of_table, tensor_table
from prime_protocol.chunk_index import HEAD_BYTES, ROW
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.manifest import BasePolicy, Manifest, Provenance, SignedManifest
from prime_protocol.rollout import EngineInfo, RolloutHeader
from prime_protocol.run_spec import ModelFile, PinnedRun, RunSpec, open_run_spec
from prime_protocol.weights import Weights

ENGINE = EngineInfo(name="test", version="1", dtype="fp32", device="cpu")
FOREVER_MS = 10**12


def role_keys(root: SigningKey, coordinator: SigningKey, trainer: SigningKey, validator: SigningKey) -> RoleKeys:
    """One key a role."""
    return RoleKeys(
        root=(root.key_id,),
        coordinator=(coordinator.key_id,),
        trainer=(trainer.key_id,),
        validator=(validator.key_id,),
    )


def build_spec(keys: RoleKeys, files: Mapping[str, bytes], /, **changes: object) -> RunSpec:
    """Needs at least vocab_size, environments and sampling."""
    fields: dict[str, object] = {
        "name": "test",
        "created_at_ms": 0,
        "keys": keys,
        "model_files": tuple(
            ModelFile(name=name, digest=digest_of(data), size=len(data)) for name, data in files.items()
        ),
        "max_steps": 10,
        "groups_per_step": 2,
        "rollouts_per_group": 2,
    }
    return RunSpec.model_validate(fields | changes)


def pinned(spec: RunSpec, root: SigningKey) -> PinnedRun:
    """Return the run as a holder of the join link has it."""
    envelope = seal(spec, PayloadType.RUN_SPEC, root)
    return open_run_spec(envelope, pinned=envelope.digest)


def build_lease(run: PinnedRun, worker: SigningKey, groups: Sequence[GroupAssignment], /, **changes: object) -> Lease:
    """Return a lease of step 0 and policy 0 that never expires."""
    fields: dict[str, object] = {
        "run": run.digest,
        "lease_id": digest_of(b"lease"),
        "worker": worker.key_id,
        "step": 0,
        "policy_version": 0,
        "policy_digest": digest_of(b"policy 0"),
        "groups": tuple(groups),
        "sampling": run.spec.sampling,
        "issued_at_ms": 0,
        "expires_at_ms": FOREVER_MS,
    }
    return Lease.model_validate(fields | changes)


def build_header(lease: Lease, body: bytes, decompressed_bytes: int, /, **changes: object) -> RolloutHeader:
    """Return the header of an honest worker's bundle for a lease."""
    fields: dict[str, object] = {
        "body_digest": digest_of(body),
        "body_bytes": len(body),
        "run": lease.run,
        "worker": lease.worker,
        "lease_id": lease.lease_id,
        "step": lease.step,
        "policy_version": lease.policy_version,
        "policy_digest": lease.policy_digest,
        "num_rollouts": lease.num_rollouts,
        "decompressed_bytes": decompressed_bytes,
        "engine": ENGINE,
        "created_at_ms": 0,
        "lease_digest": digest_of(lease.model_dump_json().encode()),
    }
    return RolloutHeader.model_validate(fields | changes)


def provenance(version: int, *, batch: str | None = None) -> Provenance:
    """Return the provenance of a policy, made from a batch that no test reads."""
    if version and batch is None:
        batch = digest_of(b"batch %d" % (version - 1))
    return Provenance(step=version - 1, optimizer_steps=version, batch=batch, software="test")


def build_manifest(
    run: PinnedRun,
    after: SignedManifest | None,
    weights: Weights,
    /,
    *update_paths: EncodedCheckpoint,
    **changes: object,
) -> Manifest:
    """The policy after `after`, with these ways to get it."""
    version = 0 if after is None else after.manifest.policy_version + 1
    tensors = tensor_table(weights)
    fields: dict[str, object] = {
        "run": run.digest,
        "policy_version": version,
        "previous": None if after is None else after.digest,
        "model_config_digest": next(file.digest for file in run.spec.model_files if file.name == "config.json"),
        "state_root": root_of_table(tensors),
        "tensors": tensors,
        "encodings": tuple(way.encoding for way in update_paths),
        "produced_by": provenance(version),
        "created_at_ms": 0,
    }
    return Manifest.model_validate(fields | changes)


def base_of(signed: SignedManifest) -> BasePolicy:
    """Return the name of the policy to which a delta is applied."""
    return BasePolicy(policy_version=signed.manifest.policy_version, state_root=signed.manifest.state_root)


def rows_of(index: bytes) -> list[tuple[int, int, str]]:
    """(size, count, digest) of every chunk of an index."""
    rows = np.frombuffer(index, dtype=ROW, offset=HEAD_BYTES)
    return [(int(row["size"]), int(row["count"]), row["digest"].tobytes().hex()) for row in rows]
