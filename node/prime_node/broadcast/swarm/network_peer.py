"""Links between peers over the peer network (libp2p), for peers that HTTP does not reach.

See SPEC.md, section "Peers over HTTP". The questions and answers are those of HTTP, one request each: a path, and of the
headers only the range. The link identifies the asker, and the asker's ticket proves membership in the run. A request carries
no stream, so notifications are requested with the cursor of the last ones, and the answer waits until there are some.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from pydantic import Field

from prime_node.broadcast.swarm.have_set import KEEP_ALIVE_S
from prime_node.broadcast.swarm.serving import PeerService
from prime_node.ports.peer_network import DeferredAnswer, PeerAddress, PeerNetwork
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import Handler, Request, Response, Route
from prime_protocol import limits
from prime_protocol.assignment import Count
from prime_protocol.envelope import Envelope, WireModel, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.limits import Limits
from prime_protocol.peers import PeerRecord, PeerUpdate

PROTOCOL = "checkpoints"
LINK_S_MAX = 40.0
"""Timeout in seconds for a link to a peer, hole punching included."""


class PeerQuestion(WireModel):
    """One request to a peer. Example: {"path": "/v1/blobs/ab..", "start": 0, "end": 65536}."""

    path: str = Field(max_length=200)
    start: Count | None = None
    end: Count | None = None
    """End of a blob's range, with `start`."""
    cursor: Count = 0
    """Cursor of the last notifications; 0 asks for everything."""
    head: int = Field(default=-1, ge=-1, le=limits.STEP_MAX)
    """Newest policy of the last notifications."""
    authorization: str | None = Field(default=None, max_length=2 * limits.PEER_TICKET_BYTES_MAX)


def serve_over(network: PeerNetwork, service: PeerService) -> None:
    """Answer other peers' questions over the network. Call before the network starts."""
    serve_routes(network, service.routes(), service)


def serve_routes(network: PeerNetwork, routes: Sequence[Route], service: PeerService | None = None) -> None:
    """Serve routes as `serve_over` does, for a host without a PeerService: the coordinator."""
    paths = [(re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", r.path)), r.handler) for r in routes]

    async def answer(peer: KeyId, payload: bytes) -> bytes | DeferredAnswer:
        question = parse_json(payload, PeerQuestion)
        handler, params = _find(paths, question.path)
        headers = {} if question.authorization is None else {"authorization": question.authorization}
        if question.start is not None and question.end is not None:
            headers["range"] = f"bytes={question.start}-{question.end - 1}"
        link = network.link_to(peer)
        request = Request(
            params=params, body=b"", headers=headers, remote=link.hosts[0] if link and link.hosts else peer
        )
        if service is not None:
            if service.member(request) not in (None, peer):
                raise RemoteError(ErrorCode.BAD_SIGNATURE, "this ticket belongs to another key")
            if question.path == "/v1/have":
                return await service.updates_since(request, question.cursor, question.head)
        response = await handler(request)
        try:
            body = response.body if isinstance(response.body, bytes) else await _whole(response)
        except BaseException:
            if response.after is not None:
                response.after()
            raise
        return body if response.after is None else DeferredAnswer(body, response.after)

    network.serve(PROTOCOL, answer, request_bytes_max=limits.PEER_QUESTION_BYTES_MAX)


async def _whole(response: Response) -> bytes:
    """Return an answer's whole body. It is held in memory, so it has a tighter bound. Raises LimitExceeded."""
    assert not isinstance(response.body, bytes)
    num_bytes = int(response.headers["Content-Length"])
    if num_bytes > limits.PEER_RANGE_BYTES_MAX:
        raise LimitExceeded("peer_range_bytes_max", num_bytes, limits.PEER_RANGE_BYTES_MAX)
    return b"".join([data async for data in response.body])


def _find(paths: list[tuple[re.Pattern[str], Handler]], path: str) -> tuple[Handler, Mapping[str, str]]:
    for pattern, handler in paths:
        if found := pattern.fullmatch(path):
            return handler, found.groupdict()
    raise RemoteError(ErrorCode.NOT_FOUND, f"no path {path}")


class NetworkPeer:
    """Implementation of ports.swarm.PeerLink."""

    def __init__(
        self, network: PeerNetwork, record: PeerRecord, *, bounds: Limits, authorization: Callable[[], str | None]
    ) -> None:
        self._network = network
        self.address = PeerAddress(record.peer, record.addresses)
        self._bounds = bounds
        self._authorization = authorization

    async def run_spec(self) -> Envelope:
        """Fetch the RunSpec. Raises RemoteError or Unreachable."""
        return open_envelope(await self.ask("/v1/run", limits.ENVELOPE_BYTES_MAX))

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        """Fetch the peer's newest manifest, or None. Raises RemoteError or Unreachable."""
        body = await self.ask("/v1/head", limits.ENVELOPE_BYTES_MAX)
        return open_envelope(body) if body else None

    async def manifest(self, policy_version: int) -> Envelope:
        """Fetch a manifest. Raises RemoteError or Unreachable."""
        return open_envelope(await self.ask(f"/v1/manifests/{policy_version}", limits.ENVELOPE_BYTES_MAX))

    async def timestamp(self) -> Envelope:
        """Fetch the coordinator's timestamp that the peer holds. Raises RemoteError or Unreachable."""
        return open_envelope(await self.ask("/v1/timestamp", limits.ENVELOPE_BYTES_MAX))

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Fetch bytes [start, end) of a blob, unverified. Raises RemoteError or Unreachable."""
        if end is not None and end <= start:
            return b""
        bytes_max = self._bounds.blob_bytes_max if end is None else end - start
        if end is None:
            return (await self.ask(f"/v1/blobs/{digest}", bytes_max))[start:]
        return await self.ask(f"/v1/blobs/{digest}", bytes_max, start=start, end=end)

    async def updates(self) -> AsyncIterator[PeerUpdate]:
        """Yield what the peer has: everything first, then changes. Raises RemoteError or Unreachable."""
        updates = PeerUpdate()
        while True:
            question = PeerQuestion(path="/v1/have", cursor=updates.cursor, head=updates.head)
            body = await self._request(question, limits.PEER_UPDATE_BYTES_MAX, wait_s=KEEP_ALIVE_S)
            updates = parse_json(body, PeerUpdate)
            yield updates

    async def peers(self) -> str:
        """Fetch the signed list of peers that the peer holds. Raises RemoteError or Unreachable."""
        body = await self.ask("/v1/peers", limits.PEER_LIST_BYTES_MAX)
        try:
            return body.decode()
        except UnicodeDecodeError:
            raise RemoteError(ErrorCode.MALFORMED, "a list of peers must be text") from None

    async def prepare(self) -> None:
        """Do nothing: the link exists already, since notifications came over it."""

    async def close(self) -> None:
        """Do nothing: the network keeps links that it may need again."""

    async def ask(self, path: str, bytes_max: int, *, start: int | None = None, end: int | None = None) -> bytes:
        """Request a path of the peer's interface, or a range of bytes of it."""
        return await self._request(PeerQuestion(path=path, start=start, end=end), bytes_max)

    async def _request(self, question: PeerQuestion, bytes_max: int, *, wait_s: float = 0.0) -> bytes:
        await self._need_direct_link()
        asked = question.model_copy(update={"authorization": self._authorization()})
        return await self._network.request(
            self.address.peer,
            PROTOCOL,
            asked.model_dump_json(exclude_none=True).encode(),
            timeout_s=limits.PEER_ANSWER_S_MAX + wait_s,
            reply_bytes_max=bytes_max,
        )

    async def _need_direct_link(self) -> None:
        """Connect directly if needed.

        Raises Unreachable if there is only a relayed link: relays carry short messages, not blobs.
        """
        linked = self._network.link_to(self.address.peer)
        if linked is None or not linked.is_direct:
            linked = await self._network.connect(self.address, timeout_s=LINK_S_MAX)
        if not linked.is_direct:
            raise Unreachable(f"{self.address.peer} is reachable only through a relay")
