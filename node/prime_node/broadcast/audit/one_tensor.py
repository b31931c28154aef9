"""Prove a single tensor of a policy: fetch and decode only what that needs.

The signed manifest holds the table of all tensors' digests, and the state root over it. So a tensor is proven by its own
chunks, and by those of the same tensor in the bases of its policy: a few requests instead of a checkpoint. These are the
audit's checks (1) to (4) and (9) for the manifests, (6) and (7) for this tensor; parts (5) are not read whole, model files
(8) never.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from prime_node.broadcast.audit.audit import Audit
from prime_node.broadcast.audit.audit_manifests import Step
from prime_node.broadcast.audit.audit_report import AuditReport, Check
from prime_node.broadcast.routes import Path
from prime_node.memory import raw_bytes
from prime_node.ports.transport import PublicSource, Unreachable
from prime_protocol.chunk_index import ChunkEntry
from prime_protocol.codec import CodecError, Target, decode_chunks
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Manifest
from prime_protocol.weights import WeightTensor, empty_like

CHECKS = (1, 2, 3, 4, 6, 7, 9)


@dataclass(frozen=True, slots=True)
class TensorProof:
    """Results of the audit of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """BLAKE3 of its raw little-endian bytes."""
    index: int
    """Row in the signed manifest's tensor table."""
    num_tensors: int
    """Rows of the table."""
    policy_version: int
    manifest: str
    """Digest of the signed manifest."""
    state_root: str
    """Root over the whole table."""
    num_policies: int
    """Publications that it was built from: 1 for an anchor, more for deltas."""
    num_bytes: int
    """Bytes fetched."""


class NoSuchTensor(ValueError):
    """A tensor name from the user that the policy does not have."""


async def prove_tensor(
    source: PublicSource,
    run: str | None,
    name: str,
    *,
    is_pinned: bool = True,
    policy_version: int | None = None,
    now_ms: int | None = None,
    memory_bytes_max: int | None = None,
    on_check: Callable[[Check], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> tuple[AuditReport, TensorProof | None]:
    """Return the proof, or None if a check fails. `is_pinned` is as in `audit`.

    Raises NoSuchTensor, and LocalError for a tensor that needs more memory than `audit` allows; never raises for what a
    source does.
    """
    work = Audit(
        source, on_check, now_ms, is_pinned=is_pinned, memory_bytes_max=memory_bytes_max, due=CHECKS, on_bytes=on_bytes
    )
    try:
        path = await work.manifests(run, chain=False, policy_version=policy_version)
        proof = await _prove(work, path, name)
        work.freshness()
    except (RemoteError, Unreachable) as error:
        work.stop(error)
        return work.report(), None
    return work.report(), proof


async def _prove(work: Audit, path: Path, name: str) -> TensorProof:
    assert work.wanted is not None
    manifest = work.wanted.manifest
    index = _row(manifest, name)
    tensor: WeightTensor | None = None
    for hop in path.hops:
        step = await work.step(hop)
        tensor = await _decode(work, step, name, tensor if step[1].base is not None else None)
        work.num_policies += 1
    work.established(6, f"{work.num_chunks} with their digests, {work.num_bytes:,} bytes; no other chunk was read")
    work.established(7, f"{name} decodes to the digest in row {index} of {len(manifest.tensors)}; no other was decoded")
    entry = manifest.tensors[index]
    return TensorProof(
        name=name,
        dtype=entry.dtype,
        shape=entry.shape,
        digest=entry.digest,
        index=index,
        num_tensors=len(manifest.tensors),
        policy_version=manifest.policy_version,
        manifest=work.wanted.digest,
        state_root=manifest.state_root,
        num_policies=work.num_policies,
        num_bytes=work.num_bytes,
    )


def _row(manifest: Manifest, name: str) -> int:
    for index, entry in enumerate(manifest.tensors):
        if entry.name == name:
            return index
    some = ", ".join(entry.name for entry in manifest.tensors[:3])
    raise NoSuchTensor(
        f"policy {manifest.policy_version} has no tensor {name!r}; it has {len(manifest.tensors)}: {some}, ..."
    )


async def _decode(work: Audit, step: Step, name: str, base: WeightTensor | None) -> WeightTensor:
    """Decode the tensor of one publication, from its own chunks and the same tensor of the base."""
    manifest, encoding = step
    table = await work.open_index(manifest, encoding)
    work.at = 6
    try:
        index = _row(manifest, name)
    except NoSuchTensor as error:  # the name is valid for the wanted policy; this base lacks it
        raise RemoteError(ErrorCode.CHAIN_BROKEN, str(error)) from None
    entry = manifest.tensors[index]
    if base is not None and (base.dtype, base.shape) != (entry.dtype, entry.shape):
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: its base has another tensor {name}"
        )
    copies = 1 if base is None else 2
    work.require_room(manifest, copies * raw_bytes([entry]))
    out = empty_like(entry.dtype, entry.shape)
    chunks = [table[int(number)] for number in np.flatnonzero(table.tensors == index)]
    for part, group in groupby(chunks, key=lambda chunk: chunk.part):
        await _decode_range(work, step, part, list(group), out, base)
    if await asyncio.to_thread(lambda: out.digest) != entry.digest:
        work.at = 7
        raise RemoteError(
            ErrorCode.DIGEST_MISMATCH,
            f"manifest {manifest.policy_version}: tensor {name} does not have its digest after decoding",
        )
    return out


async def _decode_range(
    work: Audit, step: Step, part: int, chunks: list[ChunkEntry], out: WeightTensor, base: WeightTensor | None
) -> None:
    """Decode neighbouring chunks of one part, fetched in one request."""
    manifest, encoding = step
    start, end = chunks[0].offset, chunks[-1].offset + chunks[-1].size
    work.at = 6
    data = await work.source.blob(encoding.parts[part].digest, start=start, end=end)
    work.num_bytes += len(data)
    work.on_bytes(len(data))
    pieces = [memoryview(data)[chunk.offset - start : chunk.offset - start + chunk.size] for chunk in chunks]
    for chunk, piece in zip(chunks, pieces, strict=True):
        if await asyncio.to_thread(digest_of, piece) != chunk.digest:
            raise RemoteError(
                ErrorCode.DIGEST_MISMATCH,
                f"policy {manifest.policy_version}: a chunk of part {part} does not have its digest {chunk.digest[:12]}",
            )
        work.num_chunks += 1
    target = Target(out.data, None if base is None else base.data, dtype=out.dtype)
    placed = [(piece, chunk.start, chunk.count, target) for chunk, piece in zip(chunks, pieces, strict=True)]
    try:
        await asyncio.to_thread(decode_chunks, placed)
    except CodecError:
        work.at = 7
        raise
