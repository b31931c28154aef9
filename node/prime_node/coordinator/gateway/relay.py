"""The routes of a gateway: everything that needs no state of the run is done here, and the rest is asked of the writer.

    connections, request heads, slow senders and readers, overload      the web server, as at a coordinator
    size, framing, signature, schema, run                               here
    role, epoch, time, nonce, rates, and every decision                 the writer

A gateway has nothing to lose. It remembers which keys the writer has vouched for, for its own limits. Faulty signatures take the
time that strangers share. Equal requests for public documents that wait at the same time are one request to the writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from prime_node.coordinator.api.blobs import BlobReader
from prime_node.coordinator.api.body_checks import member_shares
from prime_node.coordinator.api.callers import HEADER as FORWARDED_FOR_HEADER
from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.api.forwarded import admission_of_json
from prime_node.coordinator.api.page import live_answer, live_since
from prime_node.coordinator.api.requests import verify_request
from prime_node.coordinator.api.routes import (
    ENDPOINTS,
    HEARTBEAT_PATH,
    LEASE_PATH,
    PAGE_ENDPOINTS,
    STORAGE_RETRY_S,
    UPLOAD_PATH,
    ApiEndpoint,
    sent_request,
)
from prime_node.coordinator.gateway.heartbeats import HeartbeatCalls
from prime_node.coordinator.gateway.known_leases import KnownLeases
from prime_node.coordinator.page.live_feed import LiveFrames
from prime_node.ports.blobs import Blobs
from prime_node.ports.clock import Clock
from prime_node.ports.web import BodyAdmission, Importance, Request, Response, Route, Sender
from prime_node.ports.writer_link import ADMIT, SHED, ForwardedAnswer, ForwardedCall, HeldParcel, WriterLink
from prime_node.traces import HEADER as TRACE_HEADER
from prime_protocol import limits
from prime_protocol.body_claim import CLAIM_HEADER, open_claim, read_claim
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.parcel import open_parcel
from prime_protocol.rollout import RolloutHeader
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

FORWARDED_HEADERS = ("accept-encoding", "if-none-match", "last-event-id", "prefer", "range")
"""Headers that an endpoint may read."""
UNSIGNED_HEADERS = (TRACE_HEADER, FORWARDED_FOR_HEADER)
"""Headers of signed requests. The second one says whether a peer's address is its own (peer_discovery.py)."""
SENDERS_REMEMBERED = 65_536
BLOB_PATH = "/v1/blobs/{digest}"
SAY_SHED_S = 1.0
"""Seconds between two reports of what was refused for load."""


class KnownSenders:
    """Keys that the writer has vouched for: for an overloaded gateway, they are no strangers."""

    def __init__(self) -> None:
        self._senders: OrderedDict[str, Sender] = OrderedDict()

    def add(self, signer: str, sender: Sender | None) -> None:
        """Remember what the writer said of a key."""
        self._senders.pop(signer, None)
        if sender is not None:
            self._senders[signer] = sender
            if len(self._senders) > SENDERS_REMEMBERED:
                self._senders.popitem(last=False)

    def get(self, signer: str) -> Sender | None:
        """Return the sender of a key; None for a stranger's."""
        return self._senders.get(signer)

    def claimed(self, signed: bytes) -> Sender | None:
        """Return the sender that a request's header names, unverified."""
        try:
            signer = open_envelope(signed, bytes_max=limits.HEADER_ENVELOPE_BYTES_MAX).sole_signer()
        except RemoteError:
            return None
        return self.get(signer)


@dataclass(slots=True)
class GatewayRelay:
    """A gateway's answers. `blobs` reads public blobs where they are shared; None: the writer has them."""

    run: PinnedRun
    link: WriterLink
    callers: Callers
    clock: Clock
    blobs: BlobReader | None = None
    bundles: Blobs | None = None
    """Bundles, where gateways can store them; None: the writer stores them."""
    senders: KnownSenders = field(default_factory=KnownSenders)
    shed: Counter[str] = field(default_factory=Counter)
    """Requests refused for load that the writer does not know of, by importance."""
    leases: KnownLeases = field(init=False)
    live: LiveRelay = field(init=False)
    _beats: HeartbeatCalls = field(init=False)
    _waiting: dict[tuple[object, ...], asyncio.Task[ForwardedAnswer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live = LiveRelay(self.link, self.clock)
        self.leases = KnownLeases(self.run)
        self._beats = HeartbeatCalls(self.link)

    def routes(self) -> list[Route]:
        """Return the routes of the gateway: those of a coordinator."""
        return [self._route(endpoint) for endpoint in (*ENDPOINTS, *PAGE_ENDPOINTS)]

    def note_refused(self, importance: Importance, count: int = 1) -> None:
        """Count requests that were refused for load."""
        self.shed[importance.name] += count

    async def report_refused(self) -> None:
        """Tell the writer from time to time what was refused: workers whose heartbeats are refused are not silent."""
        while True:
            await self.clock.sleep(SAY_SHED_S)
            if self.shed:
                counted = json.dumps(self.shed).encode()
                self.shed.clear()
                try:
                    await self.link.ask(ForwardedCall(SHED, body=counted))
                except RemoteError:
                    self.shed.update(json.loads(counted))

    def _route(self, endpoint: ApiEndpoint) -> Route:
        async def handle(request: Request) -> Response:
            return await self._handle(endpoint, request)

        async def admit(request: Request, num_bytes: int) -> BodyAdmission:
            return await self._admit(endpoint, request, num_bytes)

        return endpoint.route(handle, admit, self.run.spec.limits)

    async def _handle(self, endpoint: ApiEndpoint, request: Request) -> Response:
        address = self.callers.address_of(request)
        if endpoint.caller is None:
            return await self._read(endpoint, request, address)
        call = self._call(endpoint, request, address)
        if endpoint.message is not None:
            signer, payload = verify_request(sent_request(request), endpoint.message, self.run)
            headers = _only(request.headers, UNSIGNED_HEADERS)
            call = replace(call, signer=signer, body=payload, headers=headers)
        elif endpoint.path == UPLOAD_PATH:
            call = await self._upload(call)
        try:
            answer = await (self._beats if endpoint.path == HEARTBEAT_PATH else self.link).ask(call)
        except RemoteError as error:
            if endpoint.message is not None and not error.is_transient:
                request.vouch(None)  # a busy or absent writer has not judged the sender
            raise
        self._vouch(request, call.signer, answer)
        if endpoint.path == LEASE_PATH and self.bundles is not None:
            self.leases.add(call.signer, answer.response)
        elif endpoint.path == UPLOAD_PATH:
            self.leases.note(call.signer, answer.response)
        return answer.response

    async def _upload(self, call: ForwardedCall) -> ForwardedCall:
        """Return an upload's call. The bundle stays here until the writer takes it, or is stored. Raise RemoteError."""
        parcel = call.body
        opened = open_parcel(parcel, body_bytes_max=self.run.spec.limits.rollout_bytes_max)
        signer = opened.envelope.sole_signer()
        header = parse_json(opened.envelope.verify(PayloadType.ROLLOUT, trusted=(signer,)), RolloutHeader)
        if header.body_bytes and not opened.body:  # it is in a bucket, and the writer knows of which lease
            return replace(call, signer=signer)
        opened.check_body(header)
        digest = digest_of(parcel)

        async def fetch() -> bytes:
            if self.bundles is None:
                return parcel
            await self.bundles.put(parcel, digest=digest)
            return b""

        is_stored = False
        if self.bundles is not None and self.leases.may_store(signer, header):
            with contextlib.suppress(OSError):  # then the writer asks for it, and hears what is wrong
                await fetch()
                is_stored = True
        held = HeldParcel(digest, len(parcel), opened.envelope.signatures[0].signature, fetch, is_stored)
        return replace(call, signer=signer, body=opened.envelope.payload, parcel=held)

    async def _read(self, endpoint: ApiEndpoint, request: Request, address: str) -> Response:
        """Answer a request for a public document."""
        if self.blobs is not None and endpoint.path == BLOB_PATH:
            try:
                return await self.blobs.blob(request)
            except OSError as error:
                log.error("%s: the storage failed: %s", endpoint.path, error)
                raise RemoteError(
                    ErrorCode.UNAVAILABLE, "the gateway's storage failed", retry_after_s=STORAGE_RETRY_S
                ) from error
        if endpoint.path == LIVE_PATH:
            since = live_since(request)
            self.live.begin_at(since)
            return live_answer(self.live, since, self.callers.network_of(address))
        call = self._call(endpoint, request, address)
        key = (call.path, *(tuple(sorted(part.items())) for part in (call.params, call.query, call.headers)))
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = asyncio.ensure_future(self.link.ask(call))
            self._waiting[key] = waiting
            waiting.add_done_callback(lambda done: self._answered(key, done))
            answer = await asyncio.shield(waiting)
            return answer.response
        answer = await asyncio.shield(waiting)
        if not isinstance(answer.response.body, bytes):  # a stream has one reader
            answer = await self.link.ask(call)
        return answer.response

    def _answered(self, key: tuple[object, ...], done: asyncio.Task[ForwardedAnswer]) -> None:
        self._waiting.pop(key, None)
        if not done.cancelled():
            done.exception()  # those who wait for it raise it; if all of them have left, it is no news

    async def _admit(self, endpoint: ApiEndpoint, request: Request, num_bytes: int) -> BodyAdmission:
        """Ask the writer whether a body may be read. Raise RemoteError."""
        address, signer, payload = self.callers.address_of(request), "", b""
        header = request.headers.get(CLAIM_HEADER.lower())
        if header is not None:
            envelope = open_claim(header)
            signer, payload = envelope.sole_signer(), envelope.payload
            claim = read_claim(envelope, signer, action=endpoint.action, body_bytes=num_bytes)
            sender = self.senders.get(signer) if endpoint.path == UPLOAD_PATH and claim.run == self.run.digest else None
            if sender is not None and self.leases.admits(envelope, claim.issued_at_ms, self.clock.now_ms()):
                request.vouch(sender)
                network = self.callers.network_of(address)
                return BodyAdmission(
                    member_shares(signer, network, self.run.spec.limits, self.callers), claim.body_digest
                )
        answer = await self.link.ask(
            ForwardedCall(
                ADMIT,
                address=address,
                signer=signer,
                params={"path": endpoint.path, "num_bytes": str(num_bytes)},
                body=payload,
            )
        )
        self._vouch(request, signer, answer)
        if not isinstance(answer.response.body, bytes):
            raise RemoteError(ErrorCode.INTERNAL, "the coordinator's answer to its gateway is not valid")
        return admission_of_json(answer.response.body)

    def _call(self, endpoint: ApiEndpoint, request: Request, address: str) -> ForwardedCall:
        headers = FORWARDED_HEADERS if endpoint.caller is None else (TRACE_HEADER,)
        # Without a body it was not checked.
        header = request.headers.get(CLAIM_HEADER.lower()) if request.body else None
        claim = None if header is None else open_claim(header)
        return ForwardedCall(
            endpoint.path,
            address=address,
            params=request.params,
            query=request.query,
            headers=_only(request.headers, headers),
            body=request.body,
            claimant="" if claim is None or self.leases.has_admitted(claim) else claim.sole_signer(),
        )

    def _vouch(self, request: Request, signer: str, answer: ForwardedAnswer) -> None:
        if answer.is_vouched:
            request.vouch(answer.sender)
            self.senders.add(signer, answer.sender)


def _only(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


LIVE_PATH = "/v1/live"
RETRY_S = 1.0
"""Pause before the next stream, when one has ended or was refused."""
END = b"\n\n"
_VERSION = re.compile(rb"id: ([0-9]{1,15})\n")


class LiveRelay(LiveFrames):
    """Live changes of the page: one stream from the writer for all viewers of a gateway, and none without a viewer."""

    def __init__(self, link: WriterLink, clock: Clock) -> None:
        super().__init__(0)
        self._link, self._clock = link, clock

    def begin_at(self, version: int) -> None:
        """Begin with the version of the first viewer; the stream of the writer is asked for what comes after it."""
        if not self.num_viewers:
            self._frames.clear()
            self._version = version

    async def follow(self) -> None:
        """Read the writer's stream, and begin another when it ends, until it is cancelled."""
        while True:
            try:
                await self._read_one()
            except RemoteError as error:
                log.debug("the stream of live changes: %s", error)
            except Exception:  # nothing awaits this task, and every viewer depends on it
                log.exception("the stream of live changes")
            await self._clock.sleep(RETRY_S)

    async def _read_one(self) -> None:
        call = ForwardedCall(LIVE_PATH, address="gateway", query={"since": str(self._version)})
        response = (await self._link.ask(call)).response
        held = b""
        try:
            if isinstance(response.body, bytes):
                return
            async for piece in response.body:
                *events, held = (held + piece).split(END)
                for event in events:
                    self._take(event + END)
        finally:
            if response.after is not None:
                response.after()

    def _take(self, event: bytes) -> None:
        if found := _VERSION.match(event):
            self.add(int(found[1]), event)
        elif event.startswith(b"event: reset"):  # the writer has restarted, or this gateway was too slow
            self._frames.clear()
            self._version = 0
            self._wake()
