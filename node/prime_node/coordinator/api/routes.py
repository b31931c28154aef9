"""The coordinator's HTTP endpoints as a table. SPEC.md, section "HTTP".

Every answer waits until its content is durable (`journal.synced`). Every error is an ErrorBody. An internal fault is INTERNAL,
shows no details and is logged with its endpoint.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from prime_node.coordinator.api import (
    admission,
    finding,
    intake,
    judging,
    leasing,
    operating,
    publishing,
    receipts,
    statements,
    status,
    training,
)
from prime_node.coordinator.api.bodies import admits, paid_by
from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.api.publishing import ManifestIntake
from prime_node.coordinator.api.requests import Caller, RequestGate, sender_of
from prime_node.coordinator.api.spared import Spared
from prime_node.coordinator.core import Core
from prime_node.coordinator.state.effects import Topic
from prime_node.ports.byte_ranges import parse_range
from prime_node.ports.web import Handler, Request, Response, Route
from prime_protocol import limits, messages
from prime_protocol.body_claim import REQUEST_HEADER
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.messages import NotYet
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX

log = logging.getLogger(__name__)

BLOB_CHUNK_BYTES = 2**20
"""Bytes read from disk and sent at once."""

HEAD_WAIT_S_MAX = 30.0
"""Maximum time that a reader of /v1/head may wait for the next one."""

Answer = BaseModel | Envelope | bytes | None
Action = Callable[[Core, str, Any], Awaitable[Answer]]

_ACTIONS: tuple[tuple[str, Caller, type[Any], Action], ...] = (
    ("heartbeat", Caller.WORKER, messages.HeartbeatRequest, leasing.take_heartbeat),
    ("lease", Caller.WORKER, messages.LeaseRequest, leasing.lease),
    ("return_lease", Caller.WORKER, messages.ReturnLeaseRequest, leasing.return_lease),
    ("leave", Caller.WORKER, messages.LeaveRequest, leasing.take_leave),
    ("receipts", Caller.KNOWN, messages.ReceiptsRequest, receipts.receipts),
    ("check", Caller.VALIDATOR, messages.CheckRequest, judging.next_check_task),
    ("check_result", Caller.VALIDATOR, messages.CheckResultRequest, judging.check_result),
    ("batch", Caller.TRAINER, messages.BatchRequest, training.batch),
    ("bundle", Caller.JUDGES, messages.BundleRequest, judging.bundle),
    ("admin", Caller.OPERATOR, messages.AdminRequest, operating.admin),
)


def make_routes(core: Core, gate: RequestGate) -> list[Route]:
    """Return all endpoints of one coordinator."""
    bounds, publisher = core.run.spec.limits, ManifestIntake(core)

    async def upload(request: Request) -> Response:
        core.metrics.add("prime_upload_bytes_total", len(request.body))
        payer = paid_by(core, request)
        return _respond(await intake.upload(core, gate, request.body, address=request.remote, paid_by=payer))

    async def put_blob(request: Request) -> Response:
        digest = await publishing.put_blob(core, gate, request.body, address=request.remote)
        return _json({"digest": digest})

    async def put_logprobs(request: Request) -> Response:
        digest = await judging.put_logprobs(core, gate, request.body, address=request.remote)
        return _json({"digest": digest})

    async def take_keys(request: Request) -> Response:
        await statements.take_key_ring(core, gate, request.body, address=request.remote)
        return _respond(None)

    async def publish(request: Request) -> Response:
        await publisher.publish(gate, request.body, address=request.remote)
        return _respond(None)

    def admitted(request: Request, kind: type[Any]) -> tuple[str, Any]:
        return _admitted(core, gate, request, kind, Caller.ANYONE)

    async def join(request: Request) -> Response:
        return _respond(
            await admission.admit_worker(core, *admitted(request, messages.JoinRequest), address=request.remote)
        )

    async def find_peers(request: Request) -> Response:
        address = finding.announced_from(core, request)
        return _respond(await finding.find_peers(core, *admitted(request, messages.PeersRequest), address=address))

    posts: list[tuple[str, Caller, Handler, int]] = [
        (name, caller, _signed(core, gate, kind, caller, handler), limits.REQUEST_BYTES_MAX)
        for name, caller, kind, handler in _ACTIONS
    ]
    posts += [
        ("rollouts", Caller.WORKER, upload, bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX),
        ("blobs", Caller.TRAINER, put_blob, bounds.blob_bytes_max + PARCEL_OVERHEAD_BYTES_MAX),
        ("logprobs", Caller.VALIDATOR, put_logprobs, bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX),
        ("manifests", Caller.TRAINER, publish, limits.ENVELOPE_BYTES_MAX),
        ("keys", Caller.ANYONE, take_keys, 2 * limits.KEY_RING_BYTES_MAX),
        ("join", Caller.ANYONE, join, limits.REQUEST_BYTES_MAX),
        ("peers", Caller.ANYONE, find_peers, limits.REQUEST_BYTES_MAX),
    ]
    callers = Callers(proxies=core.config.behind, trusted=core.config.trusted)
    routes = [Route("GET", path, _guarded(core, path, handler, callers)) for path, handler in _public(core, gate)]
    for name, caller, handler, size in posts:
        admit = admits(core, gate, callers, action=name, caller=caller)
        routes.append(Route("POST", f"/v1/{name}", _guarded(core, f"/v1/{name}", handler, callers), size, admit))
    return routes


def _signed(core: Core, gate: RequestGate, kind: type[Any], caller: Caller, handler: Action) -> Handler:
    async def handle(request: Request) -> Response:
        return _respond(await handler(core, *_admitted(core, gate, request, kind, caller)))

    return handle


def _admitted(core: Core, gate: RequestGate, request: Request, kind: type[Any], caller: Caller) -> tuple[str, Any]:
    try:
        signer, asked = gate.admit(
            _sent(request),
            kind=kind,
            caller=caller,
            state=core.state,
            address=request.remote,
            now_ms=core.clock.now_ms(),
            now_s=core.clock.monotonic_s(),
            paid_by=paid_by(core, request),
        )
    except PeerError:
        request.vouch(None)
        raise
    request.vouch(sender_of(signer, run=core.run, state=core.state))
    return signer, asked


def _sent(request: Request) -> bytes:
    """Return a signed request from the header Prime-Request or the body. Raise PeerError."""
    header = request.headers.get(REQUEST_HEADER.lower())
    if header is None:
        return request.body
    if request.body:
        raise PeerError(ErrorCode.MALFORMED, f"a request is in the header {REQUEST_HEADER} or in the body, not in both")
    sent = header.encode("utf-8", "replace")
    if len(sent) > limits.HEADER_ENVELOPE_BYTES_MAX:
        raise LimitExceeded("HEADER_ENVELOPE_BYTES_MAX", len(sent), limits.HEADER_ENVELOPE_BYTES_MAX)
    return sent


def _guarded(core: Core, path: str, handler: Handler, callers: Callers) -> Handler:
    """Wrap an endpoint: resolve the caller's address, make the answer durable, and hide internal errors."""

    async def handle(request: Request) -> Response:
        outcome, request = "ok", replace(request, remote=callers.address_of(request))
        try:
            response = await handler(request)
            await core.journal.synced()
        except PeerError as error:
            outcome = error.code
            raise
        except Exception as error:
            outcome = ErrorCode.INTERNAL
            log.exception("%s from %s failed", path, request.remote)
            raise PeerError(ErrorCode.INTERNAL, "a fault of the coordinator; the operator can see it") from error
        finally:
            core.metrics.add("prime_requests_total", endpoint=path, outcome=outcome)
        return response

    return handle


def _public(core: Core, gate: RequestGate) -> list[tuple[str, Handler]]:
    async def run(request: Request) -> Response:
        return _respond(core.run.envelope)

    async def head(request: Request) -> Response:
        seen = request.headers.get("if-none-match", "")
        shown = await core.news.until(
            Topic.HEAD,
            lambda: core.head,
            is_worth_waiting=lambda head: head is None or head.digest in seen,
            wait_s=preferred_wait_s(request.headers.get("prefer", "")),
        )
        if shown is None:
            return Response(status=204)
        tag = {"ETag": f'"{shown.digest}"'}
        if shown.digest in seen:
            return Response(status=304, headers=tag)
        return Response(shown.envelope.to_bytes(), headers=tag)

    async def manifest(request: Request) -> Response:
        return _respond(await publishing.read_manifest(core, _number(request.params["policy_version"])))

    async def keys(request: Request) -> Response:
        return _respond(await statements.read_key_ring(core, _number(request.params["version"])))

    async def timestamp(request: Request) -> Response:
        return _respond(await statements.timestamp(core))

    async def ledger_head(request: Request) -> Response:
        return _respond(await statements.ledger_head(core))

    async def ledger(request: Request) -> Response:
        lines = await statements.ledger_lines(core, _number(request.params["start"]))
        return Response(lines, content_type="application/jsonl")

    async def blob(request: Request) -> Response:
        return await _blob(core, request)

    async def healthz(request: Request) -> Response:
        epoch = gate.epochs.present(now_ms=core.clock.now_ms(), now_s=core.clock.monotonic_s())
        return _json({"ok": True, "run": core.run.digest, "epoch": epoch})

    told = Spared(lambda: _json(status.status_of_run(core)), core.clock)
    measured = Spared(lambda: _measured(core), core.clock)

    async def show_status(request: Request) -> Response:
        return told.get()

    async def named(request: Request) -> Response:
        return _json(status.named(core, request.params["ending"]))

    async def metrics(request: Request) -> Response:
        return measured.get()

    return [
        ("/v1/run", run),
        ("/v1/head", head),
        ("/v1/manifests/{policy_version}", manifest),
        ("/v1/keys/{version}", keys),
        ("/v1/timestamp", timestamp),
        ("/v1/ledger", ledger_head),
        ("/v1/ledger/{start}", ledger),
        ("/v1/blobs/{digest}", blob),
        ("/v1/status", show_status),
        ("/v1/workers/{ending}", named),
        ("/healthz", healthz),
        ("/metrics", metrics),
    ]


def _measured(core: Core) -> Response:
    status.set_gauges(core)
    body, content_type = core.metrics.exposition()
    return Response(body, content_type=content_type)


def _number(text: str) -> int:
    """Return a version from a path. Raise PeerError(NOT_FOUND)."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise PeerError(ErrorCode.NOT_FOUND, "a version is a number")
    return int(text)


async def _blob(core: Core, request: Request) -> Response:
    """Return a public blob or a range of it. Uploaded bundles are stored elsewhere and cannot be reached here."""
    digest = request.params["digest"]
    if not core.config.serve_chunks and all(file.digest != digest for file in core.run.spec.model_files):
        raise PeerError(
            ErrorCode.NOT_FOUND, "this coordinator gives no chunks: ask peers, the trainer's seeder or a mirror"
        )
    try:
        size = await core.public.size(digest)
    except KeyError:
        raise PeerError(ErrorCode.NOT_FOUND, f"no blob {digest[:64]}") from None
    wanted = request.headers.get("range")
    start, end = parse_range(wanted, size) if wanted else (0, size)
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "public, max-age=31536000, immutable",
        "Content-Length": str(end - start),
        "ETag": f'"{digest}"',
    }
    if wanted:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    body: bytes | AsyncIterator[bytes] = _chunks(core, digest, start, end)
    if end - start <= BLOB_CHUNK_BYTES:
        body = await core.public.get(digest, start=start, end=end)
    return Response(body, 206 if wanted else 200, "application/octet-stream", headers)


async def _chunks(core: Core, digest: str, start: int, end: int) -> AsyncIterator[bytes]:
    for offset in range(start, end, BLOB_CHUNK_BYTES):
        yield await core.public.get(digest, start=offset, end=min(end, offset + BLOB_CHUNK_BYTES))


def preferred_wait_s(text: str) -> float:
    """Return the seconds of `Prefer: wait=10` (RFC 7240), within HEAD_WAIT_S_MAX; 0 if it is absent or invalid."""
    found = re.search(r"(?:^|[,;\s])wait=([0-9]{1,6})(?:$|[,;\s])", text)
    return min(float(found[1]), HEAD_WAIT_S_MAX) if found else 0.0


def _respond(answer: Answer) -> Response:
    if answer is None:
        return Response(status=204)
    if isinstance(answer, bytes):
        return Response(answer, content_type="application/octet-stream")
    if isinstance(answer, Envelope):
        return Response(answer.to_bytes())
    return Response(answer.model_dump_json().encode(), status=202 if isinstance(answer, NotYet) else 200)


def _json(value: dict[str, Any]) -> Response:
    return Response(json.dumps(value, separators=(",", ":")).encode())
