"""The coordinator's HTTP endpoints as one table. SPEC.md, section "HTTP".

Every answer waits until its content is durable, and is given only during the coordinator's term (`Decisions.answerable`). Every
error is an ErrorBody. An internal fault is INTERNAL, shows no details and is logged with its endpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from prime_node.carrier import carrier
from prime_node.coordinator.api.admission import WorkerAdmission
from prime_node.coordinator.api.amendments import CalibrationIntake
from prime_node.coordinator.api.blobs import BlobReader
from prime_node.coordinator.api.body_checks import BodyChecks
from prime_node.coordinator.api.bundles import BundleStorage
from prime_node.coordinator.api.clock_readings import read_clocks
from prime_node.coordinator.api.direct_uploads import DirectUploads
from prime_node.coordinator.api.documents import PublicDocuments
from prime_node.coordinator.api.intake import BundleIntake
from prime_node.coordinator.api.judging import CheckTasks, Judging
from prime_node.coordinator.api.leasing import Leasing
from prime_node.coordinator.api.operating import OperatorActions
from prime_node.coordinator.api.page import PagePages
from prime_node.coordinator.api.peer_discovery import PeerDiscovery
from prime_node.coordinator.api.persons import PersonRules
from prime_node.coordinator.api.publishing import BlobIntake, ManifestIntake
from prime_node.coordinator.api.receipts import ReceiptLists
from prime_node.coordinator.api.requests import ROLES_OF, Caller, RequestGate
from prime_node.coordinator.api.statements import KeyRings, LedgerSigner, TimestampSigner
from prime_node.coordinator.api.status import StatusPages
from prime_node.coordinator.api.training import TrainerBatches
from prime_node.coordinator.decisions import Decisions
from prime_node.ports.clock import Clock
from prime_node.ports.metrics import Metrics
from prime_node.ports.web import Admit, Handler, Importance, Request, Response, Route
from prime_node.ports.writer_link import ForwardedCall, HeldParcel
from prime_node.traces import received_context
from prime_protocol import limits, requests
from prime_protocol.body_claim import REQUEST_HEADER
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, LimitExceeded, LocalError, RemoteError
from prime_protocol.limits import Limits
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX
from prime_protocol.replies import NotYet
from prime_protocol.requests import UploadUrlRequest

log = logging.getLogger(__name__)

HEALTH_PATH, HEARTBEAT_PATH, LEASE_PATH, UPLOAD_PATH = "/healthz", "/v1/heartbeat", "/v1/lease", "/v1/rollouts"
READY_PATH = "/readyz"
"""Answered with 200 by a coordinator that leads, with 503 by a standby: for load balancers."""
STORAGE_RETRY_S = 5.0
"""Time after which a client may repeat a request whose disk or storage service failed."""
Answer = BaseModel | Envelope | bytes | dict[str, Any] | Response | None
"""Result of an endpoint. A dict is unsigned JSON; None is an answer without content."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """Handlers of the endpoints. The table picks one for each; none of them knows another through this."""

    leasing: Leasing
    admission: WorkerAdmission
    persons: PersonRules
    intake: BundleIntake
    direct: DirectUploads
    receipts: ReceiptLists
    check_tasks: CheckTasks
    judging: Judging
    bundles: BundleStorage
    batches: TrainerBatches
    blobs_in: BlobIntake
    manifests_in: ManifestIntake
    keys: KeyRings
    calibrations: CalibrationIntake
    timestamps: TimestampSigner
    ledger: LedgerSigner
    documents: PublicDocuments
    blobs: BlobReader
    discovery: PeerDiscovery
    operator: OperatorActions
    status: StatusPages
    page: PagePages
    bodies: BodyChecks


@carrier(frozen=True, slots=True)
class ApiCall:
    """One request to an endpoint."""

    http: Request
    signer: str = ""
    """Key that signed it, where the endpoint takes a signed message."""
    message: Any = None
    """The verified message."""
    paid_by: str = ""
    """Key whose rate is charged already; empty if none was."""
    parcel: HeldParcel | None = None
    """Bundle that a gateway holds; the body is its header then, which `signer` has signed."""


PAGE_PATHS = ("/", "/page/{name}")
"""Paths of the files without which the page shows nothing."""


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """A row of the table."""

    path: str
    answer: Callable[[Handlers, ApiCall], Awaitable[Answer]]
    caller: Caller | None = None
    """Role that may POST to it; None: anyone may GET it."""
    message: type[Any] | None = None
    """Signed message that it takes; None: its handler verifies the body itself."""
    body_bytes_max: Callable[[Limits], int] = lambda bounds: limits.REQUEST_BYTES_MAX

    @property
    def action(self) -> str:
        """Name of an endpoint that takes POST, as its callers sign it."""
        return self.path.removeprefix("/v1/")

    def route(self, handler: Handler, admit: Admit | None, bounds: Limits) -> Route:
        """Return its route."""
        if self.caller is None:
            importance = Importance.ALWAYS if self.path in (HEALTH_PATH, READY_PATH) else Importance.NEW_WORK
            return Route("GET", self.path, handler, importance=importance, is_page_file=self.path in PAGE_PATHS)
        return Route("POST", self.path, handler, self.body_bytes_max(bounds), admit, importance=_importance_of(self))


def _rollout_parcel(bounds: Limits) -> int:
    return bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX


def _signed(
    name: str,
    caller: Caller,
    message: type[Any],
    handler: Callable[[Handlers], Callable[[str, Any], Awaitable[Answer]]],
) -> ApiEndpoint:
    """Return the row of a signed message, whose handler needs the signer and the message alone."""
    return ApiEndpoint(f"/v1/{name}", lambda on, call: handler(on)(call.signer, call.message), caller, message)


async def _upload(on: Handlers, call: ApiCall) -> Answer:
    body, address = call.http.body, call.http.remote
    if call.parcel is not None:
        return await on.intake.upload_held(call.signer, body, call.parcel, address=address, paid_by=call.paid_by)
    return await on.intake.upload(body, address=address, paid_by=call.paid_by)


ENDPOINTS: tuple[ApiEndpoint, ...] = (
    # workers
    ApiEndpoint(
        "/v1/join",
        lambda on, call: on.admission.admit_worker(call.signer, call.message, address=call.http.remote),
        Caller.ANYONE,
        requests.JoinRequest,
    ),
    _signed("revoke", Caller.ANYONE, requests.RevokeRequest, lambda on: on.persons.revoke),
    _signed("heartbeat", Caller.WORKER, requests.HeartbeatRequest, lambda on: on.leasing.take_heartbeat),
    _signed("lease", Caller.WORKER, requests.LeaseRequest, lambda on: on.leasing.lease),
    _signed("return_lease", Caller.WORKER, requests.ReturnLeaseRequest, lambda on: on.leasing.return_lease),
    _signed("leave", Caller.WORKER, requests.LeaveRequest, lambda on: on.leasing.take_leave),
    _signed("receipts", Caller.KNOWN, requests.ReceiptsRequest, lambda on: on.receipts.receipts),
    _signed("upload_url", Caller.WORKER, UploadUrlRequest, lambda on: on.direct.upload_url),
    ApiEndpoint(
        UPLOAD_PATH,
        lambda on, call: _upload(on, call),
        Caller.WORKER,
        body_bytes_max=_rollout_parcel,
    ),
    # validators, and those that read the same bundles
    _signed("check", Caller.VALIDATOR, requests.CheckRequest, lambda on: on.check_tasks.next_check_task),
    _signed("holding", Caller.VALIDATOR, requests.HoldingRequest, lambda on: on.check_tasks.take_holding),
    _signed("check_result", Caller.VALIDATOR, requests.CheckResultRequest, lambda on: on.judging.check_result),
    _signed("bundle", Caller.READERS, requests.BundleRequest, lambda on: on.bundles.read),
    ApiEndpoint(
        "/v1/logprobs",
        lambda on, call: on.bundles.put_logprobs(call.http.body, address=call.http.remote),
        Caller.VALIDATOR,
        body_bytes_max=_rollout_parcel,
    ),
    # the trainer
    _signed("batch", Caller.TRAINER, requests.BatchRequest, lambda on: on.batches.batch),
    ApiEndpoint(
        "/v1/blobs",
        lambda on, call: on.blobs_in.put_blob(call.http.body, address=call.http.remote),
        Caller.TRAINER,
        body_bytes_max=lambda bounds: bounds.blob_bytes_max + PARCEL_OVERHEAD_BYTES_MAX,
    ),
    ApiEndpoint(
        "/v1/manifests",
        lambda on, call: on.manifests_in.publish(call.http.body, address=call.http.remote),
        Caller.TRAINER,
        body_bytes_max=lambda bounds: limits.ENVELOPE_BYTES_MAX,
    ),
    # the root, the operator, peers
    ApiEndpoint(
        "/v1/keys",
        lambda on, call: on.keys.take_key_ring(call.http.body, address=call.http.remote),
        Caller.ANYONE,
        body_bytes_max=lambda bounds: 2 * limits.KEY_RING_BYTES_MAX,
    ),
    ApiEndpoint(
        "/v1/calibrations",
        lambda on, call: on.calibrations.take_amendment(call.http.body, address=call.http.remote),
        Caller.ANYONE,
        body_bytes_max=lambda bounds: 2 * limits.CALIBRATION_BYTES_MAX,
    ),
    _signed("admin", Caller.OPERATOR, requests.AdminRequest, lambda on: on.operator.admin),
    ApiEndpoint(
        "/v1/peers",
        lambda on, call: on.discovery.find_peers(call.signer, call.message, call.http),
        Caller.ANYONE,
        requests.PeersRequest,
    ),
    # anyone
    ApiEndpoint("/v1/run", lambda on, call: on.documents.run_spec()),
    ApiEndpoint("/v1/head", lambda on, call: on.documents.head(call.http)),
    ApiEndpoint("/v1/manifests/{policy_version}", lambda on, call: on.documents.manifest(call.http)),
    ApiEndpoint("/v1/batches/{step}/{part}", lambda on, call: on.documents.batch(call.http)),
    ApiEndpoint("/v1/keys/{version}", lambda on, call: on.documents.key_ring(call.http)),
    ApiEndpoint("/v1/calibrations/{version}", lambda on, call: on.documents.calibration(call.http)),
    ApiEndpoint("/v1/timestamp", lambda on, call: on.timestamps.timestamp()),
    ApiEndpoint("/v1/ledger", lambda on, call: on.ledger.ledger_head()),
    ApiEndpoint("/v1/ledger/{start}", lambda on, call: on.documents.ledger_lines(call.http)),
    ApiEndpoint("/v1/blobs/{digest}", lambda on, call: on.blobs.blob(call.http)),
    ApiEndpoint("/v1/status", lambda on, call: on.status.status()),
    ApiEndpoint("/v1/history", lambda on, call: on.page.history(call.http)),
    ApiEndpoint("/v1/events", lambda on, call: on.page.events(call.http)),
    ApiEndpoint("/v1/roster", lambda on, call: on.page.roster(call.http)),
    ApiEndpoint("/v1/evidence/{name}", lambda on, call: on.page.evidence(call.http)),
    ApiEndpoint("/v1/standing/{key}", lambda on, call: on.status.standing(call.http)),
    ApiEndpoint("/v1/workers/{ending}", lambda on, call: on.status.workers(call.http)),
    ApiEndpoint(HEALTH_PATH, lambda on, call: on.status.health()),
    ApiEndpoint(READY_PATH, lambda on, call: on.status.health()),
    ApiEndpoint("/metrics", lambda on, call: on.status.metrics()),
)

PAGE_ENDPOINTS: tuple[ApiEndpoint, ...] = (
    ApiEndpoint("/", lambda on, call: on.page.index(call.http)),
    ApiEndpoint("/page/{name}", lambda on, call: on.page.file(call.http)),
    ApiEndpoint("/v1/live", lambda on, call: on.page.live(call.http)),
)
"""What only browsers ask for. The stream of live changes has no end, so it is none of the endpoints above."""


def serve_endpoints(
    on: Handlers, gate: RequestGate, decisions: Decisions, clock: Clock, metrics: Metrics
) -> list[ServedEndpoint]:
    """Return the endpoints of one coordinator."""
    return [ServedEndpoint(each, on, gate, decisions, clock, metrics) for each in (*ENDPOINTS, *PAGE_ENDPOINTS)]


@dataclass(frozen=True, slots=True)
class ServedEndpoint:
    """One endpoint of a running coordinator."""

    endpoint: ApiEndpoint
    on: Handlers
    gate: RequestGate
    decisions: Decisions
    clock: Clock
    metrics: Metrics

    def route(self) -> Route:
        """Return its route."""
        endpoint, admit = self.endpoint, None
        if endpoint.caller is not None:
            admit = self.on.bodies.admits(endpoint.action, endpoint.caller)
        return endpoint.route(self.handle, admit, self.gate.run.spec.limits)

    async def handle(self, request: Request, forwarded: ForwardedCall | None = None) -> Response:
        """Answer a request: resolve the caller's address, make the answer durable, and hide internal errors.

        `forwarded` is what a gateway has verified of it.
        """
        path, outcome, response = self.endpoint.path, "ok", None
        if forwarded is None:
            address = self.on.bodies.callers.address_of(request)
            if address != request.remote:
                request = replace(request, remote=address)
        try:
            with received_context(request.headers):
                response = response_of(await self.endpoint.answer(self.on, self._call(request, forwarded)))
            await self.decisions.answerable()
        except RemoteError as error:
            outcome = error.code
            raise
        except Exception as error:
            fault = self.fault_for(error, request.remote)
            outcome = fault.code
            raise fault from error
        finally:
            if outcome != "ok" and response is not None and response.after is not None:
                response.after()  # it is never sent
            self.metrics.add("prime_requests_total", endpoint=path, outcome=outcome)
        return response

    def fault_for(self, error: Exception, remote: str) -> RemoteError:
        """Log an error of this coordinator, and return what the caller gets in its place."""
        # Of the disk or of the storage service, which may recover, or a damaged row.
        if isinstance(error, OSError | LocalError):
            log.error("%s from %s: the storage failed: %s", self.endpoint.path, remote, error)
            return RemoteError(ErrorCode.UNAVAILABLE, "the coordinator's storage failed", retry_after_s=STORAGE_RETRY_S)
        log.error("%s from %s failed", self.endpoint.path, remote, exc_info=error)
        return RemoteError(ErrorCode.INTERNAL, "the coordinator failed; the error is in its log")

    def _call(self, request: Request, forwarded: ForwardedCall | None) -> ApiCall:
        """Return a request with its verified message, where its endpoint takes one. Raise RemoteError."""
        kind, caller, state, bodies = self.endpoint.message, self.endpoint.caller, self.decisions.state, self.on.bodies
        if caller is None:
            return ApiCall(request)
        paid_by = bodies.paid_by(request) if forwarded is None else bodies.paid_by_key(forwarded.claimant)
        if kind is None:
            signer, parcel = ("", None) if forwarded is None else (forwarded.signer, forwarded.parcel)
            return ApiCall(request, signer, paid_by=paid_by, parcel=parcel)
        try:
            now, address = read_clocks(self.clock), request.remote
            if forwarded is not None:
                admitted = self.gate.admit_verified(
                    *(forwarded.signer, request.body),
                    kind=kind,
                    caller=caller,
                    state=state,
                    address=address,
                    now=now,
                    paid_by=paid_by,
                )
            else:
                admitted = self.gate.admit(
                    sent_request(request),
                    kind=kind,
                    caller=caller,
                    state=state,
                    address=address,
                    now=now,
                    paid_by=paid_by,
                )
        except RemoteError:
            request.vouch(None)
            raise
        request.vouch(admitted.sender)
        return ApiCall(request, admitted.signer, admitted.message)


def _importance_of(endpoint: ApiEndpoint) -> Importance:
    """Return the kind of an endpoint's signed requests."""
    if endpoint.path == HEARTBEAT_PATH:
        return Importance.HEARTBEATS
    is_upload = endpoint.message in (None, UploadUrlRequest) and endpoint.caller is Caller.WORKER
    is_role = endpoint.caller in ROLES_OF and endpoint.caller is not Caller.READERS
    return Importance.FINISHED_WORK if is_upload or is_role else Importance.NEW_WORK


def sent_request(request: Request) -> bytes:
    """Return a signed request from the header Prime-Request or the body. Raise RemoteError."""
    header = request.headers.get(REQUEST_HEADER.lower())
    if header is None:
        return request.body
    if request.body:
        raise RemoteError(
            ErrorCode.MALFORMED, f"send the request in the header {REQUEST_HEADER} or in the body, not in both"
        )
    sent = header.encode("utf-8", "replace")
    if len(sent) > limits.HEADER_ENVELOPE_BYTES_MAX:
        raise LimitExceeded("HEADER_ENVELOPE_BYTES_MAX", len(sent), limits.HEADER_ENVELOPE_BYTES_MAX)
    return sent


def response_of(answer: Answer) -> Response:
    """Return the response that carries an answer."""
    match answer:
        case None:
            return Response(status=204)
        case Response():
            return answer
        case bytes():
            return Response(answer, content_type="application/octet-stream")
        case Envelope():
            return Response(answer.to_bytes())
        case NotYet():
            return Response(answer.model_dump_json().encode(), status=202)
        case BaseModel():
            return Response(answer.model_dump_json().encode())
        case dict():
            return Response(json.dumps(answer, separators=(",", ":")).encode())
