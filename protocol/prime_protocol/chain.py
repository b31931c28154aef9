"""The chain of manifests: which publication may follow which.

Each manifest names the digest of the previous one, so the head's digest fixes the whole history. `check_manifest` is
one numbered list of checks. Everything that accepts a manifest (coordinator, worker, verifier) calls it and nothing
else.
"""

from __future__ import annotations

from math import prod

from prime_protocol import limits
from prime_protocol.checkpoint import check_root
from prime_protocol.chunk_index import INDEX_BYTES_MAX
from prime_protocol.codec import DTYPES
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.manifest import CheckpointKind, Encoding, Manifest, SignedManifest, open_manifest
from prime_protocol.replay import ReplayPolicy
from prime_protocol.run_spec import PinnedRun


def checked_manifest(envelope: Envelope, run: PinnedRun) -> SignedManifest:
    """Return a manifest of which the signature and all that `check_manifest` checks are right. Raises RemoteError."""
    signed = open_manifest(envelope, run)
    check_manifest(signed.manifest, run)
    return signed


def check_manifest(manifest: Manifest, run: PinnedRun) -> None:
    """Check everything that one manifest must satisfy by itself. Raises RemoteError.

    (1) it is of this run; (2) its policy version is within the run, the step before made it, and only policy 0 has
    neither predecessor nor batch; (3) it describes the run's model; (4) an anchor has no base, a delta has an older
    one, and no two encodings have the same; (5) tensor names are unique, types known, sizes within the limits; (6) the
    tensor table hashes to the state root; (7) indices and parts are within the limits; (8) it commits to the
    re-execution of its step as the RunSpec promises. chunk_index.open_index checks the contents of an index.
    """
    spec = run.spec
    here = f"manifest {manifest.policy_version}"
    if manifest.run != run.digest:  # (1)
        raise RemoteError(ErrorCode.WRONG_RUN, f"{here} belongs to run {manifest.run[:12]}, not {run.digest[:12]}")
    if manifest.policy_version > spec.max_steps:  # (2)
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{here}: the run ends with policy {spec.max_steps}")
    _check_origin(manifest)  # (2)
    if manifest.model_config_digest != spec.model_config_digest:  # (3)
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{here}: its config.json differs from the run's")
    _check_bases(manifest)  # (4)
    _check_tensors(manifest, spec.limits)  # (5)
    check_root(manifest)  # (6)
    for encoding in manifest.encodings:  # (7)
        _check_sizes(encoding, spec.limits)
    _check_commitments(manifest, spec.replay)  # (8)


def check_link(manifest: Manifest, previous: SignedManifest | None) -> None:
    """Check that `manifest` directly follows `previous` (None: it is policy 0). Raises RemoteError(CHAIN_BROKEN)."""
    here = f"manifest {manifest.policy_version}"
    if previous is None:
        if manifest.policy_version != 0 or manifest.previous is not None:
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN, f"{here}: the chain must begin with policy 0, which has no predecessor"
            )
        return
    if manifest.policy_version != previous.manifest.policy_version + 1 or manifest.previous != previous.digest:
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN,
            f"{here} does not continue manifest {previous.manifest.policy_version} ({previous.digest[:12]})",
        )
    shape = [(t.name, t.dtype, t.shape) for t in manifest.tensors]
    if shape != [(t.name, t.dtype, t.shape) for t in previous.manifest.tensors]:
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{here}: its tensors have other names, types or shapes than before")


def check_not_a_fork(new: SignedManifest, known: SignedManifest) -> None:
    """Check that two manifests of one version are the same one.

    Raises RemoteError(FORK): keep both envelopes, they are evidence.
    """
    if new.manifest.policy_version == known.manifest.policy_version and new.digest != known.digest:
        raise RemoteError(
            ErrorCode.FORK,
            f"two signed manifests for policy {new.manifest.policy_version}: {known.digest[:12]} and {new.digest[:12]}",
        )


def _check_origin(manifest: Manifest) -> None:
    version, is_first = manifest.policy_version, manifest.policy_version == 0
    if (manifest.previous is None) != is_first or (manifest.produced_by.batch is None) != is_first:
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN, f"manifest {version}: only policy 0 has neither predecessor nor batch"
        )
    if manifest.produced_by.step != version - 1:
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"manifest {version}: policy n + 1 must be the product of step n")


def _check_bases(manifest: Manifest) -> None:
    here = f"manifest {manifest.policy_version}"
    for encoding in manifest.encodings:
        base = encoding.base
        if (encoding.kind is CheckpointKind.DELTA) != (base is not None) or (
            base is not None and base.policy_version >= manifest.policy_version
        ):
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN, f"{here}: a delta must name an older base, an anchor must name none"
            )
    if len({encoding.base_version for encoding in manifest.encodings}) != len(manifest.encodings):
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{here}: two encodings have the same base")


def _check_commitments(manifest: Manifest, replay: ReplayPolicy | None) -> None:
    made, here = manifest.produced_by, f"manifest {manifest.policy_version}"
    said = (made.lr, made.lr_multiplier, made.numerics, made.training_state)
    if replay is None:
        if any(value is not None for value in said):
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN, f"{here}: it commits to a re-execution that the RunSpec does not promise"
            )
        return
    is_first, is_due = manifest.policy_version == 0, manifest.policy_version % replay.state_every == 0
    if (made.lr is None) != is_first or made.lr_multiplier is None or made.numerics is None:
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{here}: it does not commit to its learning rate and numerics")
    if is_due and made.training_state is None:
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN,
            f"{here}: it lacks the training state, which is due every {replay.state_every} policies",
        )


def _check_sizes(encoding: Encoding, bounds: limits.Limits) -> None:
    index_bytes_max = min(INDEX_BYTES_MAX, bounds.blob_bytes_max)
    if encoding.index.size > index_bytes_max:
        raise LimitExceeded("index bytes", encoding.index.size, index_bytes_max)
    for part in encoding.parts:
        if part.size > bounds.blob_bytes_max:
            raise LimitExceeded("blob_bytes_max", part.size, bounds.blob_bytes_max)
    if encoding.sent_bytes > bounds.checkpoint_bytes_max:
        raise LimitExceeded("checkpoint_bytes_max", encoding.sent_bytes, bounds.checkpoint_bytes_max)


def _check_tensors(manifest: Manifest, bounds: limits.Limits) -> None:
    if len(manifest.tensors) > bounds.checkpoint_tensors_max:
        raise LimitExceeded("checkpoint_tensors_max", len(manifest.tensors), bounds.checkpoint_tensors_max)
    if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: two tensors have the same name")
    total = 0
    for tensor in manifest.tensors:
        if tensor.dtype not in DTYPES:
            raise RemoteError(ErrorCode.CHAIN_BROKEN, f"tensor {tensor.name} has unknown type {tensor.dtype}")
        total += prod(tensor.shape) * DTYPES[tensor.dtype]
    if total > bounds.checkpoint_bytes_max:
        raise LimitExceeded("checkpoint_bytes_max", total, bounds.checkpoint_bytes_max)
