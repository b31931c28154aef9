"""Rollout bundles: what a worker signs and uploads for one lease.

A bundle is a parcel. Its header (RolloutHeader) names the lease, the policy and the body's digest. Its body is
zstd(safetensors) with these tensors, for N completions with T tokens in total:

    token_ids   int32   [T]     tokens of all completions, concatenated in the lease's order of groups and seeds
    logprobs    float32 [T]     nats, log-probability of each token under the policy and temperature that sampled it
    lengths     int32   [N]     tokens of each completion, at least 1
    finish      uint8   [N]     FinishReason
    slots       int64   [N]     slot of the lease's group that each completion belongs to
    seeds       int64   [N]     assigned seed that each completion used
    spans       int32   [S, 3]  (completion, policy_version, num_tokens): which policy sampled which tokens, in order
    proofs      uint8   [C, 258] only if the run asks for them: one per started 32 tokens of each completion (proof.py)
    turns       int32   [N, 3]  only if environments answer: a completion is then one turn of a rollout (turns.py)
    context     int32   [P]     tokens of those environments

The order of checks is fixed: framing, signature, schema, digest of the body, declared size, bounded decompression, then
the shapes and values of the tensors. All later code works with `Rollouts`, whose invariants `parse_body` has checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Count, Lease, Name, Step
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.limits import Limits
from prime_protocol.parcel import ParcelHeader
from prime_protocol.proof import PROOF_BYTES, num_proofs, parse_proofs
from prime_protocol.tensor_file import pack_tensors, unpack_tensors

CLASS_PART_CHARS_MAX = 60
"""Maximum characters of each part of a calibration class, so that the whole class fits a Name."""


class FinishReason(IntEnum):
    """Reason why a completion ended."""

    STOP = 0
    """Stop token sampled; it is the completion's last token."""
    LENGTH = 1
    """Length limit reached without a stop token."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion. Example: Completion((104, 105, 257), (-0.1, -0.7, -0.01), FinishReason.STOP)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token in nats, under the policy that sampled it, at the run's temperature, without the noise."""
    finish: FinishReason
    spans: tuple[tuple[int, int], ...] = ()
    """Pairs (policy version, number of tokens) in order. Empty: the lease's policy sampled all tokens."""
    proofs: bytes = b""
    """Concatenated hidden-state proofs (proof.py). Empty if the run does not ask for them."""


class EngineInfo(WireModel):
    """Software that sampled, for calibration.

    Example: EngineInfo(name="transformers", version="5.19.0", dtype="fp32", device="cpu").
    """

    name: Name
    version: Name
    dtype: Name
    device: Name
    seeded: bool = Field(default=True, exclude_if=lambda seeded: seeded)
    """Whether the engine chooses tokens by the assigned randomness. Omitted from the wire if True."""

    @property
    def calibration_class(self) -> str:
        """Class under which calibration files the engine's honest errors. Example: "transformers/fp32/cpu"."""
        return "/".join(part[:CLASS_PART_CHARS_MAX] for part in (self.name, self.dtype, self.device))


class RolloutHeader(ParcelHeader):
    """Signed header of a bundle."""

    run: Digest
    worker: KeyId
    lease_id: Digest
    step: Step
    policy_version: Step
    policy_digest: Digest
    num_rollouts: int = Field(ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    decompressed_bytes: int = Field(ge=1, le=limits.COUNT_MAX)
    """Size of the tensor file inside the body. It is declared so that a server can reject it before decompressing."""
    engine: EngineInfo
    created_at_ms: Count
    lease_digest: Digest | None = Field(default=None, exclude_if=lambda digest: digest is None)
    """Digest of the lease's payload as its worker got it. It shows later which lease the bundle answers."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Parsed body: N completions, T tokens in total. Self-consistent; not compared with any lease yet."""

    token_ids_T: npt.NDArray[np.int32]  # [T]
    logprobs_T: npt.NDArray[np.float32]  # [T] nats
    lengths_N: npt.NDArray[np.int32]  # [N] each >= 1, sum T
    finish_N: npt.NDArray[np.uint8]  # [N] FinishReason
    slots_N: npt.NDArray[np.int64]  # [N]
    seeds_N: npt.NDArray[np.int64]  # [N]
    spans_S3: npt.NDArray[np.int32]  # [S, 3] (completion, policy_version, num_tokens)
    proofs_CB: npt.NDArray[np.uint8] | None = None  # [C, 258], their number and ranges checked
    turns_N3: npt.NDArray[np.int32] | None = None  # [N, 3] (rollout, kept, new); turns.py
    context_P: npt.NDArray[np.int32] | None = None  # [P]

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts; a rollout of several turns has several completions."""
        return len(self) if self.turns_N3 is None else int(self.turns_N3[-1, 0]) + 1

    @property
    def rollout_numbers(self) -> npt.NDArray[np.int64]:
        """Rollout that each completion is a turn of, [N]."""
        return np.arange(len(self)) if self.turns_N3 is None else self.turns_N3[:, 0].astype(np.int64)

    @property
    def context(self) -> list[int]:
        """New prompt tokens of all turns, concatenated."""
        return [] if self.context_P is None else self.context_P.tolist()

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens, T."""
        return len(self.token_ids_T)

    def completion(self, index: int) -> Completion:
        """Return the completion at `index`. Use `completions` to get all of them."""
        return self._completion(index, end=int(self.lengths_N[: index + 1].sum(dtype=np.int64)))

    def completions(self) -> list[Completion]:
        """Return all completions in order."""
        ends = self.lengths_N.cumsum(dtype=np.int64).tolist()
        return [self._completion(index, end=end) for index, end in enumerate(ends)]

    def _completion(self, index: int, *, end: int) -> Completion:
        part = slice(end - int(self.lengths_N[index]), end)
        return Completion(
            tuple(self.token_ids_T[part].tolist()),
            tuple(self.logprobs_T[part].tolist()),
            FinishReason(int(self.finish_N[index])),
        )


def rollouts_for(lease: Lease, completions: Sequence[Completion]) -> Rollouts:
    """Return what an honest worker uploads: its completions in the lease's order."""
    assert len(completions) == lease.num_rollouts
    return replace(
        recorded(lease, completions),
        slots_N=np.array([group.slot for group in lease.groups for _ in group.seeds], dtype=np.int64),
        seeds_N=np.array([seed for group in lease.groups for seed in group.seeds], dtype=np.int64),
    )


def recorded(lease: Lease, completions: Sequence[Completion]) -> Rollouts:
    """Return the completions as Rollouts, with slots and seeds set to 0."""
    lengths = np.array([len(completion.token_ids) for completion in completions], dtype=np.int32)
    spans = [
        (index, version, num_tokens)
        for index, completion in enumerate(completions)
        for version, num_tokens in completion.spans or ((lease.policy_version, len(completion.token_ids)),)
    ]
    proofs = b"".join(completion.proofs for completion in completions)
    return Rollouts(
        token_ids_T=np.array([token for c in completions for token in c.token_ids], dtype=np.int32),
        logprobs_T=np.array([logprob for c in completions for logprob in c.logprobs], dtype=np.float32),
        lengths_N=lengths,
        finish_N=np.array([c.finish for c in completions], dtype=np.uint8),
        slots_N=np.zeros(len(completions), np.int64),
        seeds_N=np.zeros(len(completions), np.int64),
        spans_S3=np.array(spans, dtype=np.int32),
        proofs_CB=np.frombuffer(proofs, np.uint8).reshape(-1, PROOF_BYTES) if proofs else None,
    )


def pack_body(rollouts: Rollouts) -> tuple[bytes, int]:
    """Compress the body. Return it and its size before compression."""
    tensors: dict[str, npt.NDArray[Any] | None] = {
        "token_ids": rollouts.token_ids_T,
        "logprobs": rollouts.logprobs_T,
        "lengths": rollouts.lengths_N,
        "finish": rollouts.finish_N,
        "slots": rollouts.slots_N,
        "seeds": rollouts.seeds_N,
        "spans": rollouts.spans_S3,
        "proofs": rollouts.proofs_CB,
        "turns": rollouts.turns_N3,
        "context": rollouts.context_P,
    }
    raw = pack_tensors({name: tensor for name, tensor in tensors.items() if tensor is not None})
    return zstandard.ZstdCompressor(level=3).compress(raw), len(raw)


def body_bytes_max(
    *, num_rollouts: int, completion_tokens_max: int, turns_max: int = 1, context_tokens_max: int = 0
) -> int:
    """Return an upper bound on any bundle's size before compression: no span is shorter than a token.

    `context_tokens_max` is the limit of one turn.
    """
    per_token = 4 + 4 + 12  # token id, logprob, span
    per_completion = (
        4 + 1 + 8 + 8 + PROOF_BYTES * num_proofs([completion_tokens_max])
    )  # length, finish, slot, seed, proofs
    per_turn = 12 + 4 * context_tokens_max if turns_max > 1 else 0
    per_answer = per_completion + per_turn + completion_tokens_max * per_token
    return limits.TENSOR_HEADER_BYTES_MAX + num_rollouts * turns_max * per_answer


def parse_body(header: RolloutHeader, body: bytes | memoryview, bounds: Limits) -> Rollouts:
    """Decompress and check a body whose digest has been compared with the header's. Raises RemoteError."""
    if header.decompressed_bytes > bounds.rollout_decompressed_bytes_max:
        raise LimitExceeded(
            "rollout_decompressed_bytes_max",
            header.decompressed_bytes,
            bounds.rollout_decompressed_bytes_max,
            code=ErrorCode.DECOMPRESSED_TOO_LARGE,
        )
    tensors = unpack_tensors(decompress_body(body, size=header.decompressed_bytes), BODY_LAYOUT, optional=BODY_OPTIONAL)
    rollouts = Rollouts(*(tensors.get(name) for name in BODY_LAYOUT))  # type: ignore[arg-type]  # the others are there
    _check_consistent(rollouts, header, bounds)
    return rollouts


def decompress_body(body: bytes | memoryview, *, size: int) -> bytes:
    """Decompress a body that is exactly one zstd frame of `size` bytes. Raises RemoteError.

    zstandard obeys the size that a frame declares, not `max_output_size`: a declared tebibyte raises MemoryError. It
    also stops silently at the end of the first frame. So the frame must declare its size, which is compared first, and
    trailing bytes are an error. The caller must have bounded `size`.
    """
    try:
        declared = zstandard.frame_content_size(body)
        if declared > size:
            raise LimitExceeded("decompressed_bytes", declared, size, code=ErrorCode.DECOMPRESSED_TOO_LARGE)
        if declared < size:  # -1 if the frame declares no size
            raise RemoteError(ErrorCode.MALFORMED, f"the frame must declare the {size} bytes that the header declares")
        decompressor = zstandard.ZstdDecompressor(max_window_size=limits.ZSTD_WINDOW_BYTES_MAX)
        return decompressor.decompress(body, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise RemoteError(ErrorCode.MALFORMED, f"the body is not one zstd frame: {str(error)[:100]}") from None


BODY_LAYOUT = {
    "token_ids": ("I32", 1),
    "logprobs": ("F32", 1),
    "lengths": ("I32", 1),
    "finish": ("U8", 1),
    "slots": ("I64", 1),
    "seeds": ("I64", 1),
    "spans": ("I32", 2),
    "proofs": ("U8", 2),
    "turns": ("I32", 2),
    "context": ("I32", 1),
}
"""Tensor name -> (safetensors dtype, rank), in the order of the fields of `Rollouts`."""
BODY_OPTIONAL = frozenset({"proofs", "turns", "context"})


def _check_consistent(rollouts: Rollouts, header: RolloutHeader, bounds: Limits) -> None:
    """Check shapes and values that hold for any bundle of any lease."""
    tokens = len(rollouts.token_ids_T)
    num = header.num_rollouts if rollouts.turns_N3 is None else len(rollouts.lengths_N)
    for name in ("lengths_N", "finish_N", "slots_N", "seeds_N"):
        if len(getattr(rollouts, name)) != num:
            raise RemoteError(ErrorCode.MALFORMED, f"{name[:-2]} has {len(getattr(rollouts, name))} entries, not {num}")
    if len(rollouts.logprobs_T) != tokens:
        raise RemoteError(ErrorCode.MALFORMED, f"{len(rollouts.logprobs_T)} logprobs for {tokens} tokens")
    lengths = rollouts.lengths_N.astype(np.int64)
    if lengths.min() < 1 or lengths.sum() != tokens:
        raise RemoteError(ErrorCode.MALFORMED, "lengths must be at least 1 and add up to the number of tokens")
    if lengths.max() > bounds.completion_tokens_max:
        raise LimitExceeded("completion_tokens_max", int(lengths.max()), bounds.completion_tokens_max)
    if rollouts.finish_N.max() > max(FinishReason):
        raise RemoteError(ErrorCode.MALFORMED, "unknown finish reason")
    if not np.isfinite(rollouts.logprobs_T).all() or rollouts.logprobs_T.max() > 1e-4:
        raise RemoteError(ErrorCode.MALFORMED, "a logprob is not finite or is above 0")
    if rollouts.token_ids_T.min() < 0:
        raise RemoteError(ErrorCode.MALFORMED, "a token id is negative")
    _check_spans(rollouts.spans_S3.astype(np.int64), lengths)  # differences of int32 would wrap
    if rollouts.proofs_CB is not None:
        parse_proofs(rollouts.proofs_CB, lengths.tolist())
    check_turn_rows(rollouts, header.num_rollouts)


def _check_spans(spans_S3: npt.NDArray[np.int64], lengths_N: npt.NDArray[np.int64]) -> None:
    num = len(lengths_N)
    if spans_S3.shape[1] != 3 or spans_S3[:, 1].min() < 0 or spans_S3[:, 2].min() < 1:
        raise RemoteError(ErrorCode.MALFORMED, "spans are rows (completion, policy_version, num_tokens)")
    of_S = spans_S3[:, 0]
    if of_S.min() < 0 or of_S.max() >= num or (np.diff(of_S) < 0).any():
        raise RemoteError(ErrorCode.MALFORMED, "spans name their completions in order")
    covered_N = np.zeros(num, np.int64)
    np.add.at(covered_N, of_S, spans_S3[:, 2])
    if not np.array_equal(covered_N, lengths_N):
        raise RemoteError(ErrorCode.MALFORMED, "the spans of a completion must cover its tokens exactly")


def check_turn_rows(rollouts: Rollouts, num_rollouts: int) -> None:
    """Check the tensors `turns` and `context` (turns.py), as far as this is possible without the lease."""
    if rollouts.turns_N3 is None:
        if rollouts.context_P is not None:
            raise RemoteError(ErrorCode.MALFORMED, "context without turns")
        return
    rows, context = rollouts.turns_N3.astype(np.int64), rollouts.context_P
    if rows.shape != (len(rollouts), 3) or rows.min() < 0:
        raise RemoteError(ErrorCode.MALFORMED, "turns are rows (rollout, kept, new), one for each completion")
    steps = np.diff(rows[:, 0], prepend=-1, append=num_rollouts)
    if steps[0] != 1 or steps[-1] != 1 or not np.isin(steps, (0, 1)).all():
        raise RemoteError(ErrorCode.MALFORMED, "turns name every rollout, in order")
    if rows[:, 2].sum() != (0 if context is None else len(context)):
        raise RemoteError(ErrorCode.MALFORMED, "the new tokens of the turns must be those of context")
    if context is not None and context.min() < 0:
        raise RemoteError(ErrorCode.MALFORMED, "a token id of context is negative")
