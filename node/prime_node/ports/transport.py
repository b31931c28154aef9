"""Ports to the coordinator, and sources of checkpoints.

All methods raise RemoteError for an error or an invalid answer, and Unreachable if there was no answer. Nothing is
retried internally: the caller decides how long to retry.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from prime_protocol.envelope import Envelope
from prime_protocol.replies import (
    CheckTask,
    HeartbeatReply,
    HoldingReply,
    JoinReply,
    NotYet,
    ReceiptList,
    Standing,
    UploadReply,
)
from prime_protocol.requests import (
    BatchRequest,
    BundleRequest,
    CheckRequest,
    CheckResultRequest,
    HeartbeatRequest,
    HoldingRequest,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    ReceiptsRequest,
    ReturnLeaseRequest,
)

THROUGH = "through the proxy"
"""Words before the name of a proxy in the text of an Unreachable."""


class Unreachable(Exception):
    """No answer: refused, cut or timed out. The caller may retry later; whether the request was carried out is unknown."""


class CheckpointSource(Protocol):
    """Untrusted source of signed manifests and their bytes: a coordinator, a mirror or a folder."""

    async def run_spec(self) -> Envelope:
        """Return the signed RunSpec."""

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        """Return the newest manifest that the source knows; None before the first.

        Cheap: may be polled each second. A source that supports long polling holds the request for up to `wait_s` while
        it has nothing newer than its last answer.
        """

    async def manifest(self, policy_version: int) -> Envelope:
        """Return the signed manifest of a policy. Raises RemoteError(NOT_FOUND)."""

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes [start, end) of a blob, unverified: the caller compares digests. Raises RemoteError(NOT_FOUND)."""


class TimestampSource(Protocol):
    """Untrusted source of the signed timestamp, which names the newest policy."""

    async def timestamp(self) -> Envelope:
        """Return the newest timestamp that the source has. Raises RemoteError(NOT_FOUND)."""

    async def manifest(self, policy_version: int) -> Envelope:
        """Return the manifest of a policy, as CheckpointSource does."""


class StatementSource(TimestampSource, Protocol):
    """Untrusted source of a run's signed statements."""

    async def key_ring(self, version: int) -> Envelope:
        """Return key ring `version`, 1 or above. Raises RemoteError(NOT_FOUND) if there is none yet."""

    async def calibration(self, version: int) -> Envelope:
        """Return amendment `version` of the calibration, 1 or above. Raises RemoteError(NOT_FOUND) if there is none yet."""


class LedgerSource(Protocol):
    """Untrusted source of a run's ledger (prime_protocol/ledger.py)."""

    async def ledger_head(self) -> Envelope:
        """Return the head that the coordinator signed. The lines that it covers are available from then on."""

    async def ledger(self, start: int) -> list[bytes]:
        """Return lines from line `start` on, one page at a time, empty beyond the end. Read them in order."""


class PublicSource(CheckpointSource, StatementSource, Protocol):
    """Public data of a run."""


class ReplaySource(PublicSource, Protocol):
    """Public data of a run, with what its steps were computed from."""

    async def public_batch(self, step: int, part: int) -> Envelope:
        """Return a signed batch of a step whose policy is published. Raises RemoteError(NOT_FOUND)."""

    async def bundle(self, request: BundleRequest) -> bytes:
        """Return a bundle, or a validator's logprobs of one, that only auditors may read: unverified."""


class WorkerPort(CheckpointSource, Protocol):
    """A worker's requests to a coordinator. The adapter signs them with the worker's key and a fresh nonce."""

    async def join(self, request: JoinRequest) -> JoinReply:
        """Join the run, or join it again."""

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Report that the worker is alive; the reply holds the run's progress."""

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        """Request a lease; the answer is signed and not verified yet."""

    async def return_lease(self, request: ReturnLeaseRequest) -> None:
        """Hand back a lease that will not be fulfilled."""

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload a parcel. Idempotent by the parcel's digest: a repeated upload gets the same answer."""

    async def receipts(self, request: ReceiptsRequest) -> ReceiptList:
        """Return the worker's signed receipts from a cursor on."""

    async def leave(self, request: LeaveRequest) -> None:
        """Leave the run."""

    async def standing(self, key: str) -> Standing:
        """Return the standing of a worker or a person, unsigned. Raises RemoteError(NOT_FOUND)."""


class ValidatorPort(CheckpointSource, Protocol):
    """A validator's requests to a coordinator."""

    async def check(self, request: CheckRequest) -> CheckTask | NotYet:
        """Request a bundle to verify; NotYet if there is none."""

    async def holding(self, request: HoldingRequest) -> HoldingReply:
        """List the bundles that this validator still has; the answer names those that it has lost."""

    async def bundle(self, request: BundleRequest) -> bytes:
        """Return an uploaded bundle's bytes. Raises RemoteError(DIGEST_MISMATCH) if they are damaged."""

    async def put_logprobs(self, bundle: str, logprobs_T: npt.NDArray[np.float32]) -> str:
        """Store this validator's signed logprobs [T] of a bundle for the trainer. Idempotent; returns their digest."""

    async def check_result(self, request: CheckResultRequest) -> None:
        """Report a verdict. Idempotent: the first verdict on a bundle is final."""


class PublishPort(CheckpointSource, Protocol):
    """Requests of a publisher of policies to a coordinator."""

    async def put_blob(self, data: bytes, *, seeded: bool = True) -> str:
        """Store a public blob. Idempotent; returns the digest. `seeded`: it is part of a policy, which peers fetch."""

    async def publish(self, manifest: Envelope) -> None:
        """Make a manifest the head. All its blobs must be stored. Idempotent for the same manifest."""


class BatchPort(Protocol):
    """Source of what steps are trained on."""

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        """Request the signed batch of a step; NotYet if it is incomplete."""

    async def bundle(self, request: BundleRequest) -> bytes:
        """Return an accepted bundle's bytes. Raises RemoteError(DIGEST_MISMATCH) if they are damaged."""
