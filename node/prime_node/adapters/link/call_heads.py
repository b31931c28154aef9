"""The heads of calls and of answers on the link. A stolen gateway sends anything, so those of calls are checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from prime_node.adapters.link.sealed_frames import PACKET_BYTES_MAX, LinkFrame
from prime_node.ports.writer_link import ForwardedAnswer, ForwardedCall, HeldParcel
from prime_protocol import limits
from prime_protocol.digest import Digest
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId

ADDRESS_CHARS_MAX = 256
_Signed = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
_Parcel = Annotated[tuple[Digest, Annotated[int, Field(gt=0, le=PACKET_BYTES_MAX)], _Signed], Field(strict=False)]
"""Digest, length and signature of the parcel that the gateway holds: an array in JSON, which the tuple's strictness refuses."""
_Texts = Annotated[dict[str, str], Field(max_length=limits.HTTP_HEADER_LINES_MAX)]
"""Few, so that they take little more memory than their bytes, for which a call counts."""


class CallHead(BaseModel):
    """Head of a call's frame. What it holds becomes part of the run's state and of names: a stolen gateway sends anything."""

    model_config = ConfigDict(strict=True)

    path: str
    address: str = Field(default="", max_length=ADDRESS_CHARS_MAX)
    signer: Literal[""] | KeyId = ""
    params: _Texts = Field(default_factory=dict)  # pydantic makes deep copies of a default {}
    query: _Texts = Field(default_factory=dict)
    headers: _Texts = Field(default_factory=dict)
    claimant: Literal[""] | KeyId = ""
    parcel: _Parcel | None = None
    stored: bool = False


def call_of(frame: LinkFrame, want: Callable[[int], Awaitable[bytes]]) -> ForwardedCall:
    """Return the call in a frame. `want` fetches the parcel of a call. Raises RemoteError(MALFORMED)."""
    try:
        head = vars(CallHead.model_validate(frame.head))
    except ValidationError:
        raise RemoteError(ErrorCode.MALFORMED, "a call of a gateway whose head is not valid") from None
    is_stored = head.pop("stored")
    if head["parcel"] is not None:
        digest, num_bytes, signature = head["parcel"]
        fetch = _nothing if is_stored else partial(want, frame.call)
        head["parcel"] = HeldParcel(digest, num_bytes, bytes.fromhex(signature), fetch, is_stored)
    return ForwardedCall(**head, body=frame.body)


async def _nothing() -> bytes:
    return b""


def answer_head(answer: ForwardedAnswer) -> dict[str, object]:
    """Return the head of an answer's frame."""
    response = answer.response
    head: dict[str, object] = {"status": response.status, "type": response.content_type}
    if response.headers:
        head["headers"] = dict(response.headers)
    if answer.is_vouched:
        head["sender"] = None if answer.sender is None else [answer.sender.key, answer.sender.is_role]
    return head
