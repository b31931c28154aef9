"""The trainer's whole state at one policy, as it is published for re-execution. SPEC.md, section 25.

A state is an index and some parts. The parts, one after another, are the raw little-endian bytes of all tensors in the order of
the index. A manifest commits to the state by the digest of the index. Index and parts are public blobs.
"""

from __future__ import annotations

from math import prod

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Count, Name, Step
from prime_protocol.codec import DTYPES
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import WireModel, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import PartEntry


class TrainingTensor(WireModel):
    """One tensor of a training state: a master weight, a running mean, a value of the reference policy, ..."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...] = Field(max_length=limits.TENSOR_RANK_MAX)

    @property
    def num_bytes(self) -> int:
        """Return the size of its raw bytes. `dtype` is known."""
        return prod(self.shape) * DTYPES[self.dtype]


class TrainingState(WireModel):
    """Index of a training state: its JSON text is a public blob, whose digest the manifest names."""

    run: Digest
    policy_version: Step
    progress: str = Field(max_length=limits.PROGRESS_CHARS_MAX)
    """The trainer's counters and coefficients as JSON text, in the form of the trainer's own software."""
    tensors: tuple[TrainingTensor, ...] = Field(min_length=1, max_length=limits.CHUNKS_MAX)
    parts: tuple[PartEntry, ...] = Field(min_length=1, max_length=limits.CHUNKS_MAX)


def open_training_state(data: bytes, *, digest: str, run: str, policy_version: int) -> TrainingState:
    """Check an index against the digest that a manifest names. Raises RemoteError.

    (1) digest; (2) schema; (3) it is of this run and policy; (4) names are unique, types known; (5) the parts
    hold exactly the tensors.
    """
    if digest_of(data) != digest:  # (1)
        raise RemoteError(ErrorCode.DIGEST_MISMATCH, f"policy {policy_version}: its training state has other bytes")
    state = parse_json(data, TrainingState)  # (2)
    here = f"training state {state.policy_version}"
    if (state.run, state.policy_version) != (run, policy_version):  # (3)
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN, f"{here} of run {state.run[:12]} is committed to by policy {policy_version}"
        )
    if len({tensor.name for tensor in state.tensors}) != len(state.tensors):  # (4)
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{here}: two tensors have the same name")
    for tensor in state.tensors:
        if tensor.dtype not in DTYPES:
            raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{here}: tensor {tensor.name} has unknown type {tensor.dtype}")
    held, stored = sum(tensor.num_bytes for tensor in state.tensors), sum(part.size for part in state.parts)
    if held != stored:  # (5)
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"{here}: its tensors have {held} bytes, its parts {stored}")
    return state
