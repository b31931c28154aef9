"""Weights <-> the chunks and parts of a publication. Pure: bytes in, values out.

`encode_checkpoint` is what a publisher does; `CheckpointDecoder` is what everybody else does: feed it chunks in any order,
as they arrive, and take the weights when all have come. Nothing is decoded before its digest matched, and `finish` compares
every resulting tensor with the manifest, so that a wrong base or a faulty decoder cannot pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prime_protocol.codec import decode_chunk, encode_tensor
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import BasePolicy, ChunkEntry, Manifest, PartEntry, TensorEntry
from prime_protocol.weights import Weights, WeightTensor, empty_like, root_of, state_root

PART_BYTES = 16 * 2**20
"""A part is closed once it holds this much: few enough requests, small enough to resume."""


@dataclass(frozen=True, slots=True)
class EncodedCheckpoint:
    """Everything that a manifest says about bytes, and the bytes."""

    state_root: str
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[ChunkEntry, ...]
    parts: tuple[bytes, ...]
    part_entries: tuple[PartEntry, ...]


def encode_checkpoint(new: Weights, base: Weights | None = None, *, part_bytes: int = PART_BYTES) -> EncodedCheckpoint:
    """Encode weights alone (an anchor), or against `base` with the same names, types and shapes (a delta)."""
    tensors = tuple(
        TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, digest=tensor.digest)
        for name, tensor in new.items()
    )
    chunks: list[ChunkEntry] = []
    parts: list[bytearray] = []
    for index, (name, tensor) in enumerate(new.items()):
        old = None if base is None else base[name].data
        for chunk in encode_tensor(tensor.data, old, dtype=tensor.dtype):
            if not parts or len(parts[-1]) >= part_bytes:
                parts.append(bytearray())
            chunks.append(
                ChunkEntry(
                    part=len(parts) - 1,
                    offset=len(parts[-1]),
                    size=len(chunk.data),
                    digest=digest_of(chunk.data),
                    tensor=index,
                    start=chunk.start,
                    count=chunk.count,
                )
            )
            parts[-1] += chunk.data
    sealed = tuple(bytes(part) for part in parts)
    return EncodedCheckpoint(
        state_root=_root(tensors),
        tensors=tensors,
        chunks=tuple(chunks),
        parts=sealed,
        part_entries=tuple(PartEntry(digest=digest_of(part), size=len(part)) for part in sealed),
    )


class CheckpointDecoder:
    """Builds one policy's weights from its chunks. Never touches `base`."""

    def __init__(self, manifest: Manifest, base: Weights | None = None) -> None:
        """`manifest` has passed chain.check_manifest. Raises PeerError(CHAIN_BROKEN) where `base` is not its base."""
        self._manifest = manifest
        self._base = None if manifest.base is None else _checked_base(manifest, manifest.base, base)
        self._weights = {entry.name: empty_like(entry.dtype, entry.shape) for entry in manifest.tensors}
        self._missing = set(range(len(manifest.chunks)))
        self._chunks_of: list[list[int]] = [[] for _ in manifest.parts]
        for number, chunk in enumerate(manifest.chunks):
            self._chunks_of[chunk.part].append(number)

    def feed_part(self, index: int, data: bytes | memoryview) -> None:
        """Decode all chunks of one part. Raises PeerError."""
        entry = self._manifest.parts[index]
        if len(data) != entry.size:
            raise PeerError(
                ErrorCode.DIGEST_MISMATCH, f"part {index} has {len(data)} bytes, its manifest says {entry.size}"
            )
        view = memoryview(data)
        for number in self._chunks_of[index]:
            chunk = self._manifest.chunks[number]
            self.feed_chunk(number, view[chunk.offset : chunk.offset + chunk.size])

    def feed_chunk(self, number: int, data: bytes | memoryview) -> None:
        """Check one chunk's digest, then decode it. Feeding it twice is harmless. Raises PeerError."""
        chunk = self._manifest.chunks[number]
        if digest_of(data) != chunk.digest:
            raise PeerError(
                ErrorCode.DIGEST_MISMATCH,
                f"manifest {self._manifest.policy_version}: digest mismatch in chunk {number}; fetch it from another source",
            )
        entry = self._manifest.tensors[chunk.tensor]
        base = None if self._base is None else self._base[entry.name].data
        out = self._weights[entry.name].data
        decode_chunk(bytes(data), out, base, dtype=entry.dtype, start=chunk.start, count=chunk.count)
        self._missing.discard(number)

    @property
    def num_missing(self) -> int:
        """Chunks that have not come yet."""
        return len(self._missing)

    def finish(self) -> dict[str, WeightTensor]:
        """The weights, after every tensor's digest was compared with the manifest. Raises PeerError."""
        if self._missing:
            raise PeerError(ErrorCode.CHAIN_BROKEN, f"{len(self._missing)} chunks are missing")
        for entry in self._manifest.tensors:
            if self._weights[entry.name].digest != entry.digest:
                raise PeerError(
                    ErrorCode.DIGEST_MISMATCH,
                    f"manifest {self._manifest.policy_version}: tensor {entry.name} does not have its digest after decoding",
                )
        return self._weights


def _checked_base(manifest: Manifest, wanted: BasePolicy, base: Weights | None) -> Weights:
    """`base`, if it is the delta's base and has the same tensors. Raises PeerError(CHAIN_BROKEN)."""
    if base is None or root_of(base) != wanted.state_root:
        raise PeerError(
            ErrorCode.CHAIN_BROKEN,
            f"manifest {manifest.policy_version} needs policy {wanted.policy_version} as its base; these are other weights",
        )
    if {name: (old.dtype, old.shape) for name, old in base.items()} != {
        entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors
    }:
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: its base has other tensors")
    return base


def _root(tensors: Iterable[TensorEntry]) -> str:
    return state_root((entry.name, entry.dtype, entry.shape, entry.digest) for entry in tensors)


def check_root(manifest: Manifest) -> None:
    """The tensor table hashes to the state root. Raises PeerError(CHAIN_BROKEN)."""
    if _root(manifest.tensors) != manifest.state_root:
        raise PeerError(
            ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: tensor table and state root differ"
        )
