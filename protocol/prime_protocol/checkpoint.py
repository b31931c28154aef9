"""Weights <-> the index and parts of an encoding. Pure: bytes in, values out.

A publisher calls `encode_checkpoint`. A receiver feeds `CheckpointDecoder` chunks in any order as they arrive, and
takes the weights once all have arrived. It decodes nothing before its digest has matched. `finish` compares every
resulting tensor with the manifest, so that a wrong base or a faulty decoder is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from prime_protocol.chunk_index import ChunkIndex, pack_index
from prime_protocol.codec import Target, anchor_chunk_elements, decode_chunks, encode_tensors
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import BasePolicy, CheckpointKind, Encoding, Manifest, PartEntry, TensorEntry
from prime_protocol.weights import Weights, WeightTensor, empty_like, root_of, state_root, tensor_digests

PART_BYTES = 16 * 2**20
"""Size at which a part is closed: few enough requests, small enough to resume."""
RUN_CHUNKS = 16
"""Neighbouring chunks that a thread decodes at a time."""


@dataclass(frozen=True, slots=True)
class EncodedCheckpoint:
    """One encoding: its description in a manifest, and its bytes."""

    encoding: Encoding
    index: bytes
    parts: tuple[bytes, ...]

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """Index and parts in the order of `encoding.blobs`."""
        return (self.index, *self.parts)


def tensor_table(weights: Weights) -> tuple[TensorEntry, ...]:
    """Return the tensor table of a manifest."""
    return tuple(
        TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, digest=digest)
        for (name, tensor), digest in zip(weights.items(), tensor_digests(weights.values()), strict=True)
    )


def encode_checkpoint(
    new: Weights, base: tuple[BasePolicy, Weights] | None = None, *, part_bytes: int = PART_BYTES
) -> EncodedCheckpoint:
    """Encode weights alone (an anchor), or against a base with the same names, types and shapes (a delta)."""
    parts: list[bytes] = []
    encoding, index = encode_parts(new, base, keep=lambda _, part: parts.append(bytes(part)), part_bytes=part_bytes)
    return EncodedCheckpoint(encoding, index, tuple(parts))


def encode_parts(
    new: Weights,
    base: tuple[BasePolicy, Weights] | None,
    *,
    keep: Callable[[PartEntry, bytearray], object],
    part_bytes: int = PART_BYTES,
    pool: Executor | None = None,
) -> tuple[Encoding, bytes]:
    """Encode weights of any size like `encode_checkpoint`: `keep` gets each part in order, and this function holds none of them.

    Returns the manifest's description and the index. A pool of threads encodes chunks in parallel; the bytes are the
    same.
    """
    old = None if base is None else base[1]
    tensors = ((tensor.data, None if old is None else old[name].data, tensor.dtype) for name, tensor in new.items())
    anchor_elements = anchor_chunk_elements(sum(tensor.data.size for tensor in new.values()))
    chunks = (
        (chunk.data, chunk.count) for _, chunk in encode_tensors(tensors, pool=pool, anchor_elements=anchor_elements)
    )
    return assemble(chunks, None if base is None else base[0], keep=keep, part_bytes=part_bytes)


def assemble(
    chunks: Iterable[tuple[bytes, int]],
    base: BasePolicy | None,
    *,
    keep: Callable[[PartEntry, bytearray], object],
    part_bytes: int = PART_BYTES,
) -> tuple[Encoding, bytes]:
    """Assemble parts and an index from chunks in order, given as (bytes, elements).

    The chunks may come from any encoder, with any cut.
    """
    rows: list[tuple[int, int, str]] = []
    parts: list[PartEntry] = []
    part = bytearray()

    def close() -> None:
        parts.append(_entry(part))
        keep(parts[-1], part)

    for data, count in chunks:
        if len(part) >= part_bytes:
            close()
            part = bytearray()
        rows.append((len(data), count, digest_of(data)))
        part += data
    if part:
        close()
    index = pack_index(rows)
    encoding = Encoding(
        kind=CheckpointKind.ANCHOR if base is None else CheckpointKind.DELTA,
        base=base,
        index=_entry(index),
        parts=tuple(parts),
    )
    return encoding, index


def _entry(blob: bytes | bytearray) -> PartEntry:
    return PartEntry(digest=digest_of(blob), size=len(blob))


class CheckpointDecoder:
    """Decoder that builds one policy's weights from the chunks of one encoding. It never changes `base`."""

    def __init__(
        self,
        manifest: Manifest,
        encoding: Encoding,
        index: ChunkIndex,
        base: Weights | None = None,
        *,
        base_root: str | None = None,
        pool: Executor | None = None,
        allocate: Callable[[str, tuple[int, ...]], WeightTensor] = empty_like,
    ) -> None:
        """Prepare to decode. `manifest` has passed chain.check_manifest and `index` was opened for it.

        A caller that has just decoded `base` passes its `base_root`; otherwise all of `base` is hashed first. A pool of
        threads hashes tensors in parallel and decodes the input of `feed_part`; it must not be the pool that calls
        this. `allocate` makes the tensors to decode into. Raises RemoteError(CHAIN_BROKEN) if `base` is not the
        encoding's base.
        """
        self._manifest = manifest
        self._encoding = encoding
        self._index = index
        self._pool = pool
        self._base = None
        if encoding.base is not None:
            root = base_root if base is None or base_root else root_of(base, pool=pool)
            self._base = _checked_base(manifest, encoding.base, base, root)
        self._weights = {entry.name: allocate(entry.dtype, entry.shape) for entry in manifest.tensors}
        self._targets = [
            Target(tensor.data, None if self._base is None else self._base[name].data, dtype=tensor.dtype)
            for name, tensor in self._weights.items()
        ]
        self._missing = set(range(len(index)))

    def feed_part(self, index: int, data: bytes | memoryview) -> None:
        """Decode all chunks of one part. Raises RemoteError."""
        entry = self._encoding.parts[index]
        if len(data) != entry.size:
            raise RemoteError(
                ErrorCode.DIGEST_MISMATCH, f"part {index} has {len(data)} bytes, its manifest declares {entry.size}"
            )
        runs = self._runs(self._index.of_part(index), data)
        for _ in map(self._feed_run, runs) if self._pool is None else self._pool.map(self._feed_run, runs):
            pass

    def feed_chunks(self, numbers: range, data: bytes | memoryview) -> None:
        """Decode neighbouring chunks of one part from their joined bytes. Repeating this is harmless. Raises RemoteError."""
        for run in self._runs(numbers, data):
            self._feed_run(run)

    def _runs(self, numbers: range, data: bytes | memoryview) -> Iterator[tuple[range, list[memoryview]]]:
        chunks = self._index.cut(numbers, data)
        for start in range(0, len(chunks), RUN_CHUNKS):
            run = slice(start, start + RUN_CHUNKS)
            yield numbers[run], chunks[run]

    def _feed_run(self, run: tuple[range, list[memoryview]]) -> None:
        """Check each chunk's digest, then decode all of them."""
        numbers, chunks = run
        for number, data in zip(numbers, chunks, strict=True):
            if digest_of(data) != self._index.digest(number):
                raise RemoteError(
                    ErrorCode.DIGEST_MISMATCH,
                    f"manifest {self._manifest.policy_version}: digest mismatch in chunk {number}; fetch it from another source",
                )
        decode_chunks(
            (data, start, count, self._targets[tensor])
            for data, (tensor, start, count) in zip(chunks, self._index.places(numbers), strict=True)
        )
        self._missing.difference_update(numbers)

    def finish(self) -> dict[str, WeightTensor]:
        """Return the weights, after comparing every tensor's digest with the manifest. Raises RemoteError."""
        if self._missing:
            raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{len(self._missing)} chunks are missing")
        digests = tensor_digests(self._weights.values(), self._pool)
        for entry, digest in zip(self._manifest.tensors, digests, strict=True):
            if digest != entry.digest:
                raise RemoteError(
                    ErrorCode.DIGEST_MISMATCH,
                    f"manifest {self._manifest.policy_version}: tensor {entry.name} has a wrong digest after decoding",
                )
        return self._weights


def _checked_base(manifest: Manifest, wanted: BasePolicy, base: Weights | None, root: str | None) -> Weights:
    """Return `base` if it is the delta's base and has the same tensors. Raises RemoteError(CHAIN_BROKEN)."""
    if base is None or root != wanted.state_root:
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN,
            f"manifest {manifest.policy_version} needs policy {wanted.policy_version} as its base; the given weights differ",
        )
    if {name: (old.dtype, old.shape) for name, old in base.items()} != {
        entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors
    }:
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"manifest {manifest.policy_version}: its base has different tensors")
    return base


def root_of_table(tensors: Iterable[TensorEntry]) -> str:
    """Compute the state root of a tensor table."""
    return state_root((entry.name, entry.dtype, entry.shape, entry.digest) for entry in tensors)


def check_root(manifest: Manifest) -> None:
    """Check that the tensor table hashes to the state root. Raises RemoteError(CHAIN_BROKEN)."""
    if root_of_table(manifest.tensors) != manifest.state_root:
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN,
            f"manifest {manifest.policy_version}: the state root does not match the tensor table",
        )
