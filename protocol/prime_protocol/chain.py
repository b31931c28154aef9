"""The chain of manifests: which publication may follow which.

Each manifest names the digest of the one before it, so the head's digest fixes the whole history. `check_manifest` is one
numbered list; whoever takes a manifest in (coordinator, worker, verifier) calls it and nothing else.
"""

from __future__ import annotations

from math import prod

from prime_protocol import limits
from prime_protocol.checkpoint import check_root
from prime_protocol.codec import DTYPES
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.manifest import CheckpointKind, Manifest, SignedManifest
from prime_protocol.run_spec import PinnedRun


def check_manifest(manifest: Manifest, run: PinnedRun) -> None:
    """Everything that one manifest must satisfy by itself. Raises PeerError.

    (1) it is of this run; (2) its policy version is within the run, it was made by the step before, and policy 0 alone has
    neither a predecessor nor a batch; (3) it describes the run's model; (4) an anchor has no base and a delta has an older
    one; (5) tensor names are unique, types known, sizes within the limits; (6) the tensor table hashes to the state root;
    (7) parts are within the limits; (8) chunks fill the parts without gap, in order; (9) chunks cover every tensor exactly,
    in order, and cross none.
    """
    spec = run.spec
    here = f"manifest {manifest.policy_version}"
    if manifest.run != run.digest:  # (1)
        raise PeerError(ErrorCode.WRONG_RUN, f"{here} belongs to run {manifest.run[:12]}, not {run.digest[:12]}")
    if manifest.policy_version > spec.max_steps:  # (2)
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"{here}: the run ends with policy {spec.max_steps}")
    _check_origin(manifest)  # (2)
    if manifest.model_config_digest != spec.model_config_digest:  # (3)
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"{here}: made for another config.json than the run's")
    if (manifest.kind is CheckpointKind.DELTA) != (manifest.base is not None) or (  # (4)
        manifest.base is not None and manifest.base.policy_version >= manifest.policy_version
    ):
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"{here}: a delta names an older base, an anchor names none")
    _check_tensors(manifest, spec.limits)  # (5)
    check_root(manifest)  # (6)
    for part in manifest.parts:  # (7)
        if part.size > spec.limits.blob_bytes_max:
            raise LimitExceeded("blob_bytes_max", part.size, spec.limits.blob_bytes_max)
    _check_chunks_fill_parts(manifest)  # (8)
    _check_chunks_cover_tensors(manifest)  # (9)


def check_link(manifest: Manifest, previous: SignedManifest | None) -> None:
    """`manifest` directly follows `previous` (None: it is policy 0). Raises PeerError(CHAIN_BROKEN)."""
    here = f"manifest {manifest.policy_version}"
    if previous is None:
        if manifest.policy_version != 0 or manifest.previous is not None:
            raise PeerError(ErrorCode.CHAIN_BROKEN, f"{here}: the chain begins with policy 0, which has no predecessor")
        return
    if manifest.policy_version != previous.manifest.policy_version + 1 or manifest.previous != previous.digest:
        raise PeerError(
            ErrorCode.CHAIN_BROKEN,
            f"{here} does not continue manifest {previous.manifest.policy_version} ({previous.digest[:12]})",
        )
    shape = [(t.name, t.dtype, t.shape) for t in manifest.tensors]
    if shape != [(t.name, t.dtype, t.shape) for t in previous.manifest.tensors]:
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"{here}: its tensors have other names, types or shapes than before")


def check_not_a_fork(new: SignedManifest, known: SignedManifest) -> None:
    """Two manifests of one version are the same one. Raises PeerError(FORK): keep both envelopes, they are evidence."""
    if new.manifest.policy_version == known.manifest.policy_version and new.digest != known.digest:
        raise PeerError(
            ErrorCode.FORK,
            f"two signed manifests for policy {new.manifest.policy_version}: {known.digest[:12]} and {new.digest[:12]}",
        )


def _check_origin(manifest: Manifest) -> None:
    version, is_first = manifest.policy_version, manifest.policy_version == 0
    if (manifest.previous is None) != is_first or (manifest.produced_by.batch is None) != is_first:
        raise PeerError(
            ErrorCode.CHAIN_BROKEN, f"manifest {version}: policy 0, and no other, has no predecessor and no batch"
        )
    if manifest.produced_by.step != version - 1:
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"manifest {version}: policy n + 1 is the product of step n")


def _check_tensors(manifest: Manifest, bounds: limits.Limits) -> None:
    if len(manifest.tensors) > bounds.checkpoint_tensors_max:
        raise LimitExceeded("checkpoint_tensors_max", len(manifest.tensors), bounds.checkpoint_tensors_max)
    if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: two tensors have one name")
    total = 0
    for tensor in manifest.tensors:
        if tensor.dtype not in DTYPES:
            raise PeerError(ErrorCode.CHAIN_BROKEN, f"tensor {tensor.name} has unknown type {tensor.dtype}")
        total += prod(tensor.shape) * DTYPES[tensor.dtype]
    if total > bounds.checkpoint_bytes_max:
        raise LimitExceeded("checkpoint_bytes_max", total, bounds.checkpoint_bytes_max)


def _check_chunks_fill_parts(manifest: Manifest) -> None:
    part, offset = 0, 0
    for chunk in manifest.chunks:
        if part < len(manifest.parts) and offset == manifest.parts[part].size:
            part, offset = part + 1, 0
        if part >= len(manifest.parts) or chunk.part != part or chunk.offset != offset:
            raise PeerError(
                ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: chunks leave a gap in part {part}"
            )
        offset += chunk.size
    if part < len(manifest.parts) and offset == manifest.parts[part].size:
        part += 1
    if part != len(manifest.parts):
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: chunks do not fill part {part}")


def _check_chunks_cover_tensors(manifest: Manifest) -> None:
    sizes = [prod(tensor.shape) for tensor in manifest.tensors]
    tensor, start = 0, 0
    for chunk in manifest.chunks:
        while tensor < len(sizes) and start == sizes[tensor]:
            tensor, start = tensor + 1, 0
        is_next = tensor < len(sizes) and (chunk.tensor, chunk.start) == (tensor, start)
        if not is_next or start + chunk.count > sizes[tensor]:
            raise PeerError(
                ErrorCode.CHAIN_BROKEN,
                f"manifest {manifest.policy_version}: chunks do not cover tensor {tensor} in order",
            )
        start += chunk.count
    while tensor < len(sizes) and start == sizes[tensor]:
        tensor, start = tensor + 1, 0
    if tensor != len(sizes):
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: tensor {tensor} is not covered")
