"""How roles reach the coordinator, and where checkpoints come from.

All methods raise PeerError for an answer that is an error or makes no sense, and Unreachable where there was no answer: the
caller decides how long to try again. Nothing here is retried inside.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from prime_protocol.envelope import Envelope
from prime_protocol.messages import (
    BatchRequest,
    BundleRequest,
    CheckRequest,
    CheckResultRequest,
    CheckTask,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    NotYet,
    ReceiptList,
    ReceiptsRequest,
    ReturnLeaseRequest,
    UploadReply,
)


class Unreachable(Exception):
    """No answer: refused, cut, timed out. Try again later; nothing is known about whether the request was carried out."""


class CheckpointSource(Protocol):
    """Where signed manifests and their bytes come from: a coordinator, a mirror, a folder. Nothing in it is trusted."""

    async def run_spec(self) -> Envelope: ...

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        """The newest manifest that the source knows; None before the first. Cheap: may be polled each second.

        A source that can, holds the question for up to `wait_s` while it has nothing newer than what it answered last.
        """
        ...

    async def manifest(self, policy_version: int) -> Envelope:
        """Raises PeerError(NOT_FOUND)."""
        ...

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of a blob, unverified: the caller compares digests. Raises PeerError(NOT_FOUND)."""
        ...


class TimestampSource(Protocol):
    """Who shows what is said to be the newest policy. Nothing in it is trusted."""

    async def timestamp(self) -> Envelope:
        """The newest one that the source has. Raises PeerError(NOT_FOUND)."""
        ...


class StatementSource(TimestampSource, Protocol):
    """Where a run's signed words about itself come from. Nothing in it is trusted."""

    async def key_ring(self, version: int) -> Envelope:
        """Version 1 or above. Raises PeerError(NOT_FOUND) where there is none yet."""
        ...


class LedgerSource(Protocol):
    """Where a run's ledger comes from (prime_protocol/ledger.py). Nothing in it is trusted."""

    async def ledger_head(self) -> Envelope:
        """Signed by the coordinator. Lines that it speaks of are there from then on."""
        ...

    async def ledger(self, start: int) -> list[bytes]:
        """Lines from line `start` on, as many as come at once; none beyond the end. To be read in order."""
        ...


class PublicSource(CheckpointSource, StatementSource, Protocol):
    """All that a run shows to everyone."""


class WorkerPort(CheckpointSource, Protocol):
    """What a worker asks of a coordinator. Requests are signed by the adapter with the worker's key and a fresh nonce."""

    async def join(self, request: JoinRequest) -> JoinReply: ...

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply: ...

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        """A signed lease, not verified yet."""
        ...

    async def return_lease(self, request: ReturnLeaseRequest) -> None: ...

    async def upload(self, parcel: bytes) -> UploadReply:
        """Idempotent by the parcel's digest: sending it again gives the same answer."""
        ...

    async def receipts(self, request: ReceiptsRequest) -> ReceiptList: ...

    async def leave(self, request: LeaveRequest) -> None: ...


class ValidatorPort(CheckpointSource, Protocol):
    """What a validator asks of a coordinator."""

    async def check(self, request: CheckRequest) -> CheckTask | NotYet: ...

    async def bundle(self, request: BundleRequest) -> bytes: ...

    async def put_logprobs(self, bundle: str, logprobs_T: npt.NDArray[np.float32]) -> str:
        """Store this validator's logprobs [T] of a bundle, signed, for the trainer. Idempotent; returns their digest."""
        ...

    async def check_result(self, request: CheckResultRequest) -> None:
        """Idempotent: the first verdict on a bundle stands."""
        ...


class TrainerPort(CheckpointSource, Protocol):
    """What the trainer asks of a coordinator."""

    async def batch(self, request: BatchRequest) -> Envelope | NotYet: ...

    async def bundle(self, request: BundleRequest) -> bytes: ...

    async def put_blob(self, data: bytes) -> str:
        """Store a checkpoint part or a model file. Idempotent; returns the digest."""
        ...

    async def publish(self, manifest: Envelope) -> None:
        """Make a manifest the head. All its blobs must be there. Idempotent for the same manifest."""
        ...
