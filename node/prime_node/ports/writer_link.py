"""The link between gateways and the writer: the coordinator that decides. Both belong to the operator.

A gateway has verified what it forwards. The writer takes its word for signatures and for strict JSON; it checks schemas, and all
that its state decides, itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from prime_node.carrier import carrier
from prime_node.ports.web import Response, Sender
from prime_protocol.errors import ErrorCode, RemoteError

ADMIT, BEATS, SHED = "admit", "heartbeats", "shed"
"""Calls that are none of the endpoints: may a body be read, several heartbeats, and what was refused for load."""


@carrier(frozen=True, slots=True)
class HeldParcel:
    """A parcel that a gateway holds and has verified: signature, framing, and that its body is the signed one."""

    digest: str
    """Digest of the whole parcel, which names its bundle."""
    num_bytes: int
    """Length of the whole parcel."""
    signature: bytes
    """The call's signer's, over the call's body: the parcel's header."""
    fetch: Callable[[], Awaitable[bytes]]
    """Function that makes it durable where the writer reads bundles, and then returns b""; or returns the parcel for the writer
    to store. Raises RemoteError or OSError."""
    is_stored: bool = False
    """Whether `fetch` has made it durable already, so that the writer need not ask for it."""


@carrier(frozen=True, slots=True)
class ForwardedCall:
    """One request that a gateway forwards."""

    path: str
    """Path of its endpoint, as in the table of endpoints, or ADMIT or SHED."""
    address: str = ""
    """Address of the caller, by the gateway's knowledge of its proxies."""
    signer: str = ""
    """Key whose signature over `body` the gateway has verified; empty where the endpoint verifies the body itself."""
    params: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    """Payload of the signed message, of the body's claim or of the held parcel's header; or the body as it came."""
    claimant: str = ""
    """Key whose claim to the body was admitted before it was read; its rate is charged already."""
    parcel: HeldParcel | None = None
    """Bundle whose bytes stay at the gateway until the writer takes it."""


@carrier(frozen=True, slots=True)
class ForwardedAnswer:
    """The writer's answer, and the sender that it vouches for."""

    response: Response
    sender: Sender | None = None
    is_vouched: bool = False
    """Whether the writer has named the sender, None for a stranger."""


AnswerCall = Callable[[ForwardedCall], ForwardedAnswer | Awaitable[ForwardedAnswer]]
"""Writer's side: the answer, or what to wait for. Both raise RemoteError. An answer at once costs no task."""


class WriterLink(Protocol):
    """Gateway's side of the link."""

    async def ask(self, call: ForwardedCall) -> ForwardedAnswer:
        """Forward a request. Raises RemoteError: UNAVAILABLE while there is no writer, and what the writer raises."""

    async def keep(self) -> None:
        """Keep the link open, to the first of its addresses at which a writer answers. Runs until it is cancelled."""


class GatewayListener(Protocol):
    """Writer's side of the link."""

    async def start(
        self,
        answer: AnswerCall,
        *,
        address: tuple[str, int],
        secret: bytes,
        run: str,
        body_bytes_max: int,
        may_send: Callable[[], bool] | None,
    ) -> int:
        """Listen, and return the port. Only gateways that know the secret of this run are heard, and no body that is longer.

        Raises LocalError.
        """

    async def stop(self) -> None:
        """End all links."""


Addresses = Sequence[tuple[str, int]]


def fault_head(error: RemoteError) -> dict[str, object]:
    """Return an error as the link carries it."""
    return {
        "code": str(error.code),
        "detail": error.detail[:2_000],
        "retry_after_s": error.retry_after_s,
        "epoch": error.epoch,
    }


def fault_of(head: Mapping[str, Any]) -> RemoteError:
    """Return the error that the link has carried."""
    is_known = head["code"] in set(ErrorCode)
    return RemoteError(
        ErrorCode(head["code"]) if is_known else ErrorCode.INTERNAL,  # else the coordinator's is a newer release
        head["detail"],
        retry_after_s=head.get("retry_after_s"),
        epoch=head.get("epoch") or "",
    )
