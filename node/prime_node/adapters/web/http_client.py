"""The coordinator over HTTP, for workers, validators and the trainer: one method for each endpoint. SPEC.md, section "HTTP"."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from prime_node.adapters.web.direct_upload import put_directly
from prime_node.adapters.web.http_answers import sensible
from prime_node.adapters.web.http_exchange import HttpExchange
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX, open_parcel, pack_logprobs, pack_parcel
from prime_protocol.replies import (
    CheckTask,
    HeartbeatReply,
    HoldingReply,
    JoinReply,
    NotYet,
    PeersReply,
    ReceiptList,
    Standing,
    UploadReply,
    UploadUrl,
)
from prime_protocol.requests import (
    AdminRequest,
    BatchRequest,
    BlobHeader,
    BundleRequest,
    CheckRequest,
    CheckResultRequest,
    HeartbeatRequest,
    HoldingRequest,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    PeersRequest,
    ReceiptsRequest,
    ReturnLeaseRequest,
    RevokeRequest,
    UploadUrlRequest,
)
from prime_protocol.rollout import RolloutHeader

log = logging.getLogger(__name__)

_TAG = re.compile(r'(W/)?"[!#-~]{1,100}"')
"""Tag of a head. It is sent back, also to the run's other addresses: one that a server refuses would hide each later head."""
WHOLE_S = 600.0
"""Time for which bundles are sent to the coordinator itself after a direct upload has failed."""


class HttpClient(HttpExchange):
    """Implementation of WorkerPort, ValidatorPort, PublishPort, BatchPort, ReplaySource and LedgerSource."""

    direct_bytes_min = 2**20
    """Size from which the body of a bundle is offered to the coordinator's bucket: a smaller one is not worth two requests."""
    _whole_until_s = -math.inf

    # Public: the source of checkpoints

    async def run_spec(self) -> Envelope:
        return await self._statement("/v1/run", limits.RUN_SPEC_BYTES_MAX)

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        sent = {"If-None-Match": self._head[0]} if self._head else {}
        if wait_s >= 1.0:
            sent["Prefer"] = f"wait={int(wait_s)}"
        status, body, headers = await self._exchange("GET", "/v1/head", headers=sent, wait_s=wait_s)
        if status == 204:
            return None
        if status == 304 and self._head:
            return self._head[1]
        envelope = open_envelope(body)
        tag = headers.get("ETag", "")
        self._head = (tag, envelope) if _TAG.fullmatch(tag) else None
        return envelope

    async def manifest(self, policy_version: int) -> Envelope:
        _, body, _ = await self._exchange("GET", f"/v1/manifests/{policy_version}")
        return open_envelope(body)

    async def public_batch(self, step: int, part: int) -> Envelope:
        _, body, _ = await self._exchange("GET", f"/v1/batches/{step}/{part}", bytes_max=limits.WORK_BYTES_MAX)
        return open_envelope(body, bytes_max=limits.WORK_BYTES_MAX)

    async def key_ring(self, version: int) -> Envelope:
        return await self._statement(f"/v1/keys/{version}", limits.KEY_RING_BYTES_MAX)

    async def calibration(self, version: int) -> Envelope:
        return await self._statement(f"/v1/calibrations/{version}", limits.CALIBRATION_BYTES_MAX)

    async def timestamp(self) -> Envelope:
        return await self._statement("/v1/timestamp", limits.TIMESTAMP_BYTES_MAX)

    async def ledger_head(self) -> Envelope:
        return await self._statement("/v1/ledger", limits.LEDGER_LINE_BYTES_MAX)

    async def ledger(self, start: int) -> list[bytes]:
        _, body, _ = await self._exchange("GET", f"/v1/ledger/{start}", bytes_max=limits.LEDGER_PAGE_BYTES_MAX)
        return body.splitlines()

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        wanted = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        if end is not None and end <= start:
            return b""
        bytes_max = self.bounds.blob_bytes_max if end is None else end - start
        status, body = await self._get_blob(f"/v1/blobs/{digest}", wanted, bytes_max)
        if wanted and status != 206 and not (start == 0 and end == len(body)):
            raise RemoteError(ErrorCode.BAD_RANGE, f"{self.url} ignores byte ranges")
        return body

    async def _get_blob(self, path: str, headers: Mapping[str, str], bytes_max: int) -> tuple[int, bytes]:
        status, body, _ = await self._exchange("GET", path, headers=headers, bytes_max=bytes_max)
        return status, body

    async def unsigned(self, path: str, *, bytes_max: int) -> tuple[bytes, Mapping[str, str]]:
        """Fetch an unsigned answer, such as the status: body and headers."""
        _, body, headers = await self._exchange("GET", path, bytes_max=bytes_max)
        return body, headers

    # Worker

    async def join(self, request: JoinRequest) -> JoinReply:
        return await self._ask_for(JoinReply, request)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        return await self._ask_for(HeartbeatReply, request)

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        return await self._ask_for_envelope(request, wait_s=request.wait_s)

    async def return_lease(self, request: ReturnLeaseRequest) -> None:
        await self._ask(request)

    async def upload(self, parcel: bytes) -> UploadReply:
        sent = await self._put_body(parcel)
        if sent is not None:
            try:
                _, body = await self._post("rollouts", lambda: sent)
                return sensible(body, UploadReply)
            except RemoteError as error:
                if error.is_transient:
                    raise
                self._upload_whole(error)
        _, body = await self._post("rollouts", lambda: parcel)
        return sensible(body, UploadReply)

    async def _put_body(self, parcel: bytes) -> bytes | None:
        """Put a large body where the coordinator says. Return the parcel without it; None if the parcel is to be sent whole."""
        if len(parcel) < self.direct_bytes_min or self._clock.monotonic_s() < self._whole_until_s:
            return None
        opened = open_parcel(parcel, body_bytes_max=len(parcel))
        body = bytes(opened.body)
        lease_id = parse_json(opened.envelope.payload, RolloutHeader).lease_id
        sha256 = await asyncio.to_thread(lambda: hashlib.sha256(body).digest())
        request = UploadUrlRequest(lease_id=lease_id, body_bytes=len(body), body_sha256=sha256.hex())
        try:
            url = (await self._ask_for(UploadUrl, request)).url
        except RemoteError as error:  # the whole parcel gets an answer of its own
            if error.code is ErrorCode.NOT_FOUND:
                self._upload_whole(error)
            return None
        try:
            await put_directly(url, body, sha256, near=self.hosts, needs_tls=self.needs_tls, stall_s=self._stall_s)
        except Unreachable as error:
            self._upload_whole(error)
            return None
        return parcel[: len(parcel) - len(body)]

    def _upload_whole(self, error: Exception) -> None:
        """Send parcels whole for a while."""
        log.debug("bundles are sent to the coordinator itself: %s", error)
        self._whole_until_s = self._clock.monotonic_s() + WHOLE_S

    async def receipts(self, request: ReceiptsRequest) -> ReceiptList:
        return await self._ask_for(ReceiptList, request)

    async def leave(self, request: LeaveRequest) -> None:
        await self._ask(request)

    async def revoke(self, request: RevokeRequest) -> None:
        """End the work of a machine; this client's key is its person's."""
        await self._ask(request)

    async def standing(self, key: str) -> Standing:
        body, _ = await self.unsigned(f"/v1/standing/{key}", bytes_max=limits.STANDING_BYTES_MAX)
        return sensible(body, Standing)

    # Validator

    async def check(self, request: CheckRequest) -> CheckTask | NotYet:
        status, body = await self._ask(request, wait_s=request.wait_s, bytes_max=limits.WORK_BYTES_MAX)
        return sensible(body, NotYet) if status == 202 else sensible(body, CheckTask)

    async def holding(self, request: HoldingRequest) -> HoldingReply:
        return await self._ask_for(HoldingReply, request)

    async def bundle(self, request: BundleRequest) -> bytes:
        _, body = await self._ask(request, bytes_max=self.bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX)
        if digest_of(body) != request.bundle:
            raise RemoteError(ErrorCode.DIGEST_MISMATCH, f"{self.url} sent another bundle than {request.bundle[:12]}")
        return body

    async def put_logprobs(self, bundle: str, logprobs_T: npt.NDArray[np.float32]) -> str:
        parcel = pack_logprobs(logprobs_T, run=self._run, bundle=bundle, key=self._signing_key())
        await self._post("logprobs", lambda: parcel)
        return digest_of(parcel)

    async def check_result(self, request: CheckResultRequest) -> None:
        await self._ask(request)

    # Trainer

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        return await self._ask_for_envelope(request, wait_s=request.wait_s)

    async def put_blob(self, data: bytes, *, seeded: bool = True) -> str:
        digest = digest_of(data)

        def parcel() -> bytes:
            header = BlobHeader(
                body_digest=digest,
                body_bytes=len(data),
                run=self._run,
                issued_at_ms=self._clock.now_ms(),
                epoch=self.epoch,
            )
            return pack_parcel(header, data, PayloadType.BLOB, self._signing_key())

        await self._post("blobs", parcel)
        return digest

    async def publish(self, manifest: Envelope) -> None:
        await self._post("manifests", manifest.to_bytes)

    # Peers

    async def find_peers(self, request: PeersRequest) -> PeersReply:
        return await self._ask_for(PeersReply, request)

    # Operator

    async def admin(self, request: AdminRequest) -> None:
        """Give an order of the operator. Raises RemoteError if it is refused."""
        await self._ask(request)

    async def add_key_ring(self, ring: Envelope) -> None:
        """Upload a key ring. Idempotent for the newest ring."""
        await self._post("keys", ring.to_bytes)

    async def add_amendment(self, amendment: Envelope) -> None:
        """Upload an amendment of the calibration. Idempotent for the newest one."""
        await self._post("calibrations", amendment.to_bytes)
