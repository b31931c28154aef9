"""Paths that a peer serves: those of a coordinator's public half, so that one client can read both.

All content proves itself by a digest or a signature, so strangers may read too, as far as members leave room. The list of peers
is for members of the run only: those that show a ticket (prime_protocol/peers.py).

    GET /v1/run  /v1/keys/{version}  /v1/timestamp                                 for all
    GET /v1/head  /v1/manifests/{policy_version}  /v1/blobs/{digest}  /v1/have      for all
    GET /v1/peers                                                                  for members
    GET /v1/identity                                                               for the coordinator's dial-back
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prime_node.broadcast.swarm.have_set import (
    KEEP_ALIVE_S,
    HaveBroadcast,
    HaveChange,
    HaveSet,
    encode_update,
    rest_s,
)
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.piece_sets import PieceSet
from prime_node.broadcast.swarm.uplink import PACE_BYTES, Uplink
from prime_node.fair_places import has_place
from prime_node.inside import open_regular, place, read_regular
from prime_node.ports.clock import Clock
from prime_node.ports.documents import TIMESTAMP_NAME, amendment_name, key_ring_name
from prime_node.ports.web import Handler, Request, Response, Route, parse_range
from prime_protocol import limits
from prime_protocol.addresses import network_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import KeyId, SigningKey
from prime_protocol.peers import PeerAnswer, check_authorization
from prime_protocol.run_spec import PinnedRun

STRANGERS = "strangers"
"""Name under which the uplink counts all requests without a ticket as one peer."""
CHECKED_AGAIN_S = 60.0
"""Seconds after which an authorization is verified again, so that it ends soon after it expires."""
READ_BYTES_MAX = PACE_BYTES
"""Bytes of one answer in memory at a time; no piece is longer."""


@dataclass
class PeerService:
    """Service that answers from `parts` and `files` what `have_set` lists."""

    run: PinnedRun
    key: SigningKey
    have_set: HaveSet
    parts: PartStore
    uplink: Uplink
    clock: Clock
    manifest: Callable[[int], Envelope | None]
    """Function that returns a verified manifest by policy version, or None if it is not held."""
    peer_list: Callable[[str], str | None] = lambda asker: None
    """Function that returns the newest list of peers, as the coordinator signed it."""
    met: Callable[[KeyId], None] = lambda peer: None
    """Callback for members of the run that ask for notifications."""
    heard_of: Callable[[KeyId], Mapping[str, PieceSet]] = lambda peer: {}
    """Function that returns what a member has announced, by encoding. Notifications of the same pieces can wait."""
    folder: Path | None = None
    """Role's folder: the run's configuration and tokenizer in `model`, verified key rings, amendments and
    timestamp in `trust`."""
    _members: dict[tuple[int, str], tuple[str, int]] = field(default_factory=dict)
    """Verified authorizations, each with the key ring in force then."""
    listeners: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Open notification streams, by listener and its network."""
    _is_closing: bool = False

    def __post_init__(self) -> None:
        self._broadcasting = HaveBroadcast(self.have_set, self.clock)

    def routes(self) -> list[Route]:
        """Return the routes to register with the web server."""
        gets: list[tuple[str, Handler]] = [
            ("/v1/run", self._run),
            ("/v1/head", self._head),
            ("/v1/manifests/{policy_version}", self._manifest),
            ("/v1/blobs/{digest}", self._blob),
            ("/v1/keys/{version}", self._key_ring),
            ("/v1/calibrations/{version}", self._calibration),
            ("/v1/timestamp", self._timestamp),
            ("/v1/have", self.have),
            ("/v1/peers", self._peers),
            ("/v1/identity", self._identity),
        ]
        return [Route("GET", path, handler, is_bulk=handler == self._blob) for path, handler in gets]

    def close(self) -> None:
        """End open notification streams."""
        self._is_closing = True
        self.have_set.tell()
        self._broadcasting.close()

    def member(self, request: Request) -> str | None:
        """Return the key that a request's ticket names; None for a stranger. Raises RemoteError for an invalid ticket."""
        header = request.headers.get("authorization")
        if header is None:
            return None
        if len(header) > 2 * limits.PEER_TICKET_BYTES_MAX:
            raise LimitExceeded("authorization chars", len(header), 2 * limits.PEER_TICKET_BYTES_MAX)
        held = (self.run.keys.version, header)
        now_ms = self.clock.now_ms()
        known, checked_at_ms = self._members.get(held, ("", 0))
        if not 0 <= now_ms - checked_at_ms < CHECKED_AGAIN_S * 1_000:
            known = check_authorization(header, self.key.key_id, self.run, now_ms=now_ms)
            if len(self._members) >= limits.PEER_TOKENS_MAX:
                self._members.clear()
            self._members[held] = known, now_ms
        return known

    # For all callers

    async def _run(self, request: Request) -> Response:
        return Response(self.run.envelope.to_bytes())

    async def _head(self, request: Request) -> Response:
        envelope = self.manifest(self.have_set.head)
        if envelope is None:
            return Response(status=204)
        tag = {"ETag": f'"{envelope.digest}"'}
        if envelope.digest in request.headers.get("if-none-match", ""):
            return Response(status=304, headers=tag)
        return Response(envelope.to_bytes(), headers=tag)

    async def _manifest(self, request: Request) -> Response:
        number = request.params["policy_version"]
        envelope = self.manifest(int(number)) if re.fullmatch(r"[0-9]{1,10}", number) else None
        if envelope is None:
            raise RemoteError(ErrorCode.NOT_FOUND, f"this peer does not have manifest {number[:20]}")
        return Response(envelope.to_bytes())

    async def _key_ring(self, request: Request) -> Response:
        version = request.params["version"]
        if not re.fullmatch(r"[0-9]{1,4}", version):
            raise RemoteError(ErrorCode.NOT_FOUND, "the version of a key ring must be a number")
        return await self._statement(key_ring_name(int(version)))

    async def _calibration(self, request: Request) -> Response:
        version = request.params["version"]
        if not re.fullmatch(r"[0-9]{1,4}", version):
            raise RemoteError(ErrorCode.NOT_FOUND, "the version of a calibration must be a number")
        return await self._statement(amendment_name(int(version)))

    async def _timestamp(self, request: Request) -> Response:
        return await self._statement(TIMESTAMP_NAME)

    async def _statement(self, name: str) -> Response:
        """Return a file that trust.py has verified and written."""
        try:
            return Response(await asyncio.to_thread(read_regular, place(self.folder or Path(), f"trust/{name}")))
        except OSError:
            raise RemoteError(ErrorCode.NOT_FOUND, f"this peer does not have {name}") from None

    async def _blob(self, request: Request) -> Response:
        digest = request.params["digest"]
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise RemoteError(ErrorCode.NOT_FOUND, "the name of a blob must be 64 hex digits")
        size = self.have_set.size(digest) or self.parts.size(digest)
        file = None if size else self._model_file(digest)
        if file is not None:
            size = file.stat().st_size
        if not size:
            raise RemoteError(ErrorCode.NOT_FOUND, f"this peer does not have blob {digest}")
        wanted = request.headers.get("range")
        start, end = parse_range(wanted, size) if wanted else (0, size)
        if end - start > self.run.spec.limits.blob_bytes_max:
            raise LimitExceeded("blob_bytes_max", end - start, self.run.spec.limits.blob_bytes_max)
        whole = file is not None or self.parts.has(digest)
        if not whole and not self.have_set.has_range(digest, start, end):
            raise RemoteError(ErrorCode.NOT_FOUND, f"this peer does not have these bytes of blob {digest}")
        headers = {"Accept-Ranges": "bytes", "Content-Length": str(end - start)}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        member = self.member(request)
        network = "" if member is None else network_of(request.remote)
        give_back = await self.uplink.slot(
            member or STRANGERS, end - start, is_member=member is not None, network=network
        )
        body: bytes | AsyncIterator[bytes]
        try:
            is_short = end - start <= READ_BYTES_MAX
            body = await self._read(digest, start, end, file) if is_short else self._in_turn(digest, start, end, file)
        except BaseException:
            give_back()
            raise
        return Response(body, 206 if wanted else 200, "application/octet-stream", headers, after=give_back)

    async def _in_turn(self, digest: str, start: int, end: int, file: Path | None) -> AsyncIterator[bytes]:
        """Yield a blob in blocks of READ_BYTES_MAX. The rest stays on disk, however slow the reader is."""
        for begin in range(start, end, READ_BYTES_MAX):
            until = min(begin + READ_BYTES_MAX, end)
            if begin > start:  # the slot included the first block
                await self.uplink.pace(until - begin)
            yield await self._read(digest, begin, until, file)

    async def _read(self, digest: str, start: int, end: int, file: Path | None) -> bytes:
        """Return bytes of a blob. Raises RemoteError(NOT_FOUND) if the blob is removed meanwhile."""
        if file is None and (cached := self.parts.get_cached(digest, start, end)) is not None:
            return cached

        def read() -> bytes | None:
            if file is None:
                return self.parts.get(digest, start, end)
            with os.fdopen(open_regular(file, os.O_RDONLY), "rb") as opened:
                opened.seek(start)
                return opened.read(end - start)

        data = await asyncio.to_thread(read)
        if data is None or len(data) != end - start:
            if file is None and self.parts.has(digest):
                self.parts.drop(digest)
                self.have_set.lose(digest)
            raise RemoteError(ErrorCode.NOT_FOUND, f"blob {digest} has just been removed")
        return data

    def _model_file(self, digest: str) -> Path | None:
        for file in self.run.spec.model_files:
            if file.digest == digest and self.folder is not None:
                path = place(self.folder, f"model/{file.name}")
                return path if path.is_file() and not path.is_symlink() else None
        return None

    # Notifications

    async def have(self, request: Request) -> Response:
        """Answer with a stream of changes to the have-set, unless too many listen already."""
        listener, network = self._listener(request)
        each_max = limits.PEER_STRANGERS_LISTENING_MAX if listener == STRANGERS else limits.PEER_LISTENERS_EACH_MAX
        self._check_room(listener, network, each_max)
        return Response(self._lines(listener, network), content_type="application/x-ndjson")

    def _listener(self, request: Request) -> tuple[str, str]:
        """Return the listener and its network.

        All strangers together count as one listener. They may listen because a newcomer has no ticket while the coordinator
        is unreachable.
        """
        member = self.member(request)
        if member is None:
            return STRANGERS, STRANGERS
        self.met(member)
        return member, network_of(request.remote)

    def _check_room(self, listener: str, network: str, each_max: int) -> None:
        """Raise RemoteError if the listener, its network or all together have as many streams as they may."""
        hears = sum(num for (who, _), num in self.listeners.items() if who == listener)
        in_network = sum(1 for who, where in self.listeners if where == network and who != listener)
        most, share = limits.PEER_LISTENERS_MAX, limits.PEER_LISTENERS_NETWORK_MAX
        if hears >= each_max or not has_place(in_network, len(self.listeners), most=most, share=share):
            raise RemoteError(ErrorCode.UNAVAILABLE, "too many listeners at this peer already", retry_after_s=10.0)

    @contextlib.contextmanager
    def _listening(self, listener: str, network: str) -> Iterator[None]:
        self.listeners[listener, network] += 1
        try:
            yield
        finally:
            self.listeners[listener, network] -= 1
            if not self.listeners[listener, network]:
                del self.listeners[listener, network]

    async def _lines(self, listener: str, network: str) -> AsyncIterator[bytes]:
        with self._listening(listener, network):
            has = functools.partial(self.heard_of, listener)
            async with contextlib.aclosing(self._broadcasting.lines(has)) as lines:
                async for line in lines:
                    yield line

    async def updates_since(self, request: Request, cursor: int, head: int) -> bytes:
        """Return one line of notifications, for a link without streams. It waits until there are some that the asker lacks."""
        listener, network = self._listener(request)
        if not cursor:
            return encode_update(self.have_set.updates(0))
        is_stranger = listener == STRANGERS
        each_max = limits.PEER_STRANGERS_LISTENING_MAX if is_stranger else limits.PEER_REQUESTS_MAX
        self._check_room(listener, network, each_max)
        with self._listening(listener, network):
            return encode_update(await self.fresh(listener, cursor, head))

    async def fresh(self, member: str, cursor: int, head: int) -> HaveChange:
        """Wait, KEEP_ALIVE_S at most, until the listener lacks a piece or the head; then return all changes."""
        await self.clock.sleep(rest_s(len(self.listeners)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_ALIVE_S):
                while not self._is_closing:
                    updates = self.have_set.updates(cursor)
                    if updates.has_more or updates.is_news(head, self.heard_of(member)):
                        return updates
                    await self.have_set.changed(updates)
        return self.have_set.updates(cursor)

    # For members

    async def _peers(self, request: Request) -> Response:
        member = self.member(request)
        if member is None:
            raise RemoteError(ErrorCode.BAD_SIGNATURE, "only members of the run may ask this: send a ticket")
        self.met(member)
        text = self.peer_list(request.remote)
        return Response(status=204) if text is None else Response(text.encode())

    # For the coordinator

    async def _identity(self, request: Request) -> Response:
        nonce = request.headers.get("prime-nonce", "")
        if not re.fullmatch(r"[0-9a-f]{32}", nonce):
            raise RemoteError(ErrorCode.MALFORMED, "a challenge must be 32 hex digits in the header Prime-Nonce")
        return Response(
            seal(PeerAnswer(run=self.run.digest, nonce=nonce), PayloadType.PEER_ANSWER, self.key).to_bytes()
        )
