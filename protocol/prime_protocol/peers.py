"""Messages between peers, and the coordinator's statements about them. SPEC.md, section "Peers over HTTP".

Digests verify all bytes between peers, so a connection needs no trust. Three things are signed. The first is the
coordinator's list of peers (so that it cannot direct a swarm at a victim). The second is its ticket (this key belongs to
the run, until a time). The third is the token with which a key presents a ticket to one peer (so that this peer cannot
present it to others).
"""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import Field, field_validator

from prime_protocol import limits
from prime_protocol.assignment import Count
from prime_protocol.digest import Digest
from prime_protocol.envelope import Envelope, PayloadType, WireModel, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId, SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import PinnedRun

Url = Annotated[str, Field(max_length=200, pattern=r"^http://(?:[0-9.]{7,15}|\[[0-9a-f:.]{2,45}\]):[0-9]{1,5}$")]
"""HTTP address of a peer, numeric: peers' names are never resolved."""
Multiaddr = Annotated[str, Field(max_length=limits.PEER_ADDRESS_CHARS_MAX, pattern=r"^/[ -~]+$")]
EnvelopeText = Annotated[str, Field(max_length=limits.PEER_TEXT_CHARS_MAX)]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Run = Annotated[tuple[Count, ...], Field(min_length=2, max_length=2)]
"""Range of pieces [start, end)."""

TOKEN_AGE_S_MAX = 3_600.0
"""Maximum age of a token; clocks may differ by as much."""


class PeerRecord(WireModel):
    """Addresses of a peer. They prove nothing about its key; everything it sends is verified."""

    peer: KeyId
    urls: tuple[Url, ...] = Field(default=(), max_length=limits.PEER_ADDRESSES_MAX)
    addresses: tuple[Multiaddr, ...] = Field(default=(), max_length=limits.PEER_ADDRESSES_MAX)


class PeerList(WireModel):
    """Coordinator's list of some peers of the run (envelope type PEER_LIST). Peers pass it on unchanged."""

    run: Digest
    issued_at_ms: Count
    peers: tuple[PeerRecord, ...] = Field(max_length=limits.PEERS_MAX)


class PeerTicket(WireModel):
    """Coordinator's statement that this key belongs to the run (envelope type PEER_TICKET)."""

    run: Digest
    peer: KeyId
    expires_at_ms: Count


class PeerToken(WireModel):
    """Proof that a peer holds its ticket's key, signed by that key for one other peer (envelope type PEER_TOKEN)."""

    run: Digest
    audience: KeyId
    """Peer that the ticket is presented to."""
    issued_at_ms: Count


class PeerAnswer(WireModel):
    """Answer of a peer to the challenge of a dial-back, signed by it (envelope type PEER_ANSWER)."""

    run: Digest
    nonce: Nonce


class PeerUpdate(WireModel):
    """Changes in what a peer has since its last notification.

    Example: {"cursor": 7, "head": 41, "pieces": {"ab..": [[0, 12]]}}.
    """

    cursor: Count = 0
    """Cursor for the next request."""
    head: int = Field(default=-1, ge=-1, le=limits.STEP_MAX)
    """Newest policy whose manifest it has verified and serves."""
    pieces: dict[Digest, Annotated[tuple[Run, ...], Field(max_length=limits.PEER_UPDATE_RUNS_MAX)]] = Field(
        default_factory=dict, max_length=limits.PEER_UPDATE_ENCODINGS_MAX
    )
    """Pieces by encoding, named by its index's digest. Runs of an encoding ascend and do not overlap."""

    @field_validator("pieces")
    @classmethod
    def _check_runs(cls, pieces: dict[str, tuple[tuple[int, ...], ...]]) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Check the line before a receiver builds any set of it."""
        if sum(map(len, pieces.values())) > limits.PEER_UPDATE_RUNS_MAX:
            raise ValueError(f"a line has at most {limits.PEER_UPDATE_RUNS_MAX} runs of pieces")
        for ranges in pieces.values():
            last = 0
            for start, end in ranges:
                if not last <= start < end <= limits.CHUNKS_MAX:
                    raise ValueError(f"a run of pieces from {start} to {end} after {last}")
                last = end
        return pieces


def open_peer_list(text: str, run: PinnedRun) -> PeerList:
    """Verify a list of peers and parse it. Raises RemoteError."""
    envelope = open_envelope(text.encode(), bytes_max=limits.PEER_LIST_BYTES_MAX)
    listed = parse_json(run.keys.verify(envelope, PayloadType.PEER_LIST, Role.COORDINATOR), PeerList)
    if listed.run != run.digest:
        raise RemoteError(ErrorCode.WRONG_RUN, f"the list of peers belongs to run {listed.run[:12]}")
    return listed


def authorization(ticket: str, audience: KeyId, run: str, key: SigningKey, *, now_ms: int) -> str:
    """Return the `Authorization` header with which a key presents its ticket to a peer."""
    token = seal(PeerToken(run=run, audience=audience, issued_at_ms=now_ms), PayloadType.PEER_TOKEN, key)
    both = (base64.b64encode(part).decode() for part in (ticket.encode(), token.to_bytes()))
    return "Prime " + ".".join(both)


def check_authorization(header: str, me: KeyId, run: PinnedRun, *, now_ms: int) -> KeyId:
    """Return the key that presents the header. Raises RemoteError.

    (1) framing; (2) the run's coordinator signed the ticket; (3) it is of this run and has not expired; (4) the
    ticket's key signed the token; (5) the token is of this run, for me, and recent.
    """
    try:
        scheme, _, rest = header.partition(" ")
        first, second = (base64.b64decode(part, validate=True) for part in rest.split("."))
    except ValueError:
        raise RemoteError(
            ErrorCode.MALFORMED, "an authorization must be `Prime <ticket>.<token>`, both in base64"
        ) from None
    if scheme != "Prime":
        raise RemoteError(ErrorCode.MALFORMED, "the authorization scheme is not Prime")
    signed_ticket, signed_token = (_open_small(part) for part in (first, second))  # (1)
    payload = run.keys.verify(signed_ticket, PayloadType.PEER_TICKET, Role.COORDINATOR)  # (2)
    ticket = parse_json(payload, PeerTicket)
    if ticket.run != run.digest:  # (3)
        raise RemoteError(ErrorCode.WRONG_RUN, f"the ticket belongs to run {ticket.run[:12]}")
    if ticket.expires_at_ms < now_ms:  # (3)
        raise RemoteError(ErrorCode.EXPIRED, "the ticket has expired; ask the coordinator for a new one")
    token = parse_json(signed_token.verify(PayloadType.PEER_TOKEN, trusted=(ticket.peer,)), PeerToken)  # (4)
    if token.run != run.digest:  # (5)
        raise RemoteError(ErrorCode.WRONG_RUN, f"the token belongs to run {token.run[:12]}")
    if token.audience != me:
        raise RemoteError(ErrorCode.WRONG_ROLE, f"the token is for {token.audience}, not for {me}")
    if abs(now_ms - token.issued_at_ms) > TOKEN_AGE_S_MAX * 1_000:
        raise RemoteError(ErrorCode.EXPIRED, "the token is too old or too far ahead; check the clock")
    return ticket.peer


def check_answer(data: bytes, peer: KeyId, run: str, nonce: str) -> None:
    """Check that a dial-back has reached the intended peer. Raises RemoteError."""
    payload = _open_small(data).verify(PayloadType.PEER_ANSWER, trusted=(peer,))
    answer = parse_json(payload, PeerAnswer)
    if (answer.run, answer.nonce) != (run, nonce):
        raise RemoteError(ErrorCode.REPLAYED, "the answer belongs to another challenge")


def _open_small(data: bytes) -> Envelope:
    return open_envelope(data, bytes_max=limits.PEER_TICKET_BYTES_MAX)
