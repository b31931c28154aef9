"""The writer's side of what gateways forward: the same endpoints, without the work that a gateway has done.

A gateway has read the request, verified its signature and its schema. The writer checks everything that depends on its state:
role, epoch, time, nonce and rates, so that a request works once, at whichever gateway it is sent again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from prime_node.coordinator.api.body_checks import BodyChecks
from prime_node.coordinator.api.requests import sender_of
from prime_node.coordinator.api.routes import ServedEndpoint
from prime_node.ports.web import BodyAdmission, BodyShare, CallerBounds, Importance, Request, Response, Sender
from prime_node.ports.writer_link import ADMIT, SHED, ForwardedAnswer, ForwardedCall
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

_NAMES, _NUMBER = re.compile(r"\{(\w+)\}"), re.compile(r"[0-9]{1,15}")
"""Names of the parameters in a path, and a number of bytes."""
_Kind = Literal["STRANGERS", "HEARTBEATS", "NEW_WORK", "FINISHED_WORK", "ALWAYS"]
_COUNTS = TypeAdapter(dict[_Kind, Annotated[int, Field(strict=True, ge=0, le=limits.COUNT_MAX)]])
"""What a gateway has refused, by importance."""
Overload = Callable[[str, Callable[[], Sender | None]], RemoteError | None]
"""Function that returns the error for a path and a sender, if the coordinator refuses them for load now."""


class ForwardedCalls:
    """Answers to the calls of gateways."""

    def __init__(
        self, served: Sequence[ServedEndpoint], bodies: BodyChecks, bounds: CallerBounds, overload: Overload
    ) -> None:
        """`overload` refuses calls for load; `bounds.refused` gets the number of requests that a gateway has refused."""
        self._served = {endpoint.endpoint.path: endpoint for endpoint in served}
        self._bodies, self._bounds, self._overload = bodies, bounds, overload

    async def answer(self, call: ForwardedCall) -> ForwardedAnswer:
        """Answer one call. Raise RemoteError."""
        if call.path == SHED:
            return self._note_refused(call)
        if call.path == ADMIT:
            return self._admit(call)
        endpoint = self._served.get(call.path)
        if endpoint is None:
            raise RemoteError(ErrorCode.NOT_FOUND, f"this coordinator has no endpoint {call.path[:100]}")
        if set(call.params) != set(_NAMES.findall(call.path)) or (endpoint.endpoint.message and not call.signer):
            raise _malformed()
        self._require_room(call)
        vouched: list[Sender | None] = []
        response = await endpoint.handle(_request_of(call, vouched), call)
        return ForwardedAnswer(response, vouched[-1] if vouched else None, is_vouched=bool(vouched))

    def _require_room(self, call: ForwardedCall) -> None:
        def sender() -> Sender | None:
            key = call.signer or call.claimant
            return sender_of(key, run=self._bodies.gate.run, state=self._bodies.decisions.state)

        if (error := self._overload(call.path, sender)) is not None:
            raise error

    def _admit(self, call: ForwardedCall) -> ForwardedAnswer:
        """Decide on a body that the gateway has not read yet."""
        served, size = self._served.get(call.params.get("path", "")), call.params.get("num_bytes", "")
        vouched: list[Sender | None] = []
        if served is None or (caller := served.endpoint.caller) is None or not _NUMBER.fullmatch(size):
            raise _malformed()
        admission = self._bodies.admit_claim(
            _request_of(call, vouched),
            int(size),
            action=served.endpoint.action,
            caller=caller,
            signer=call.signer,
        )
        response = Response(admission_to_json(admission))
        return ForwardedAnswer(response, vouched[-1] if vouched else None, is_vouched=bool(vouched))

    def _note_refused(self, call: ForwardedCall) -> ForwardedAnswer:
        try:
            counted = _COUNTS.validate_json(call.body)
        except ValueError:
            raise _malformed() from None
        for name, count in counted.items():
            self._bounds.refused(Importance[name], count)
        return ForwardedAnswer(Response(status=204))


def _malformed() -> RemoteError:
    return RemoteError(ErrorCode.MALFORMED, "a call that no gateway makes")


def _request_of(call: ForwardedCall, vouched: list[Sender | None]) -> Request:
    return Request(
        params=call.params,
        body=call.body,
        headers=call.headers,
        remote=call.address,
        vouch=vouched.append,
        query=call.query,
    )


def admission_to_json(admission: BodyAdmission) -> bytes:
    """Return the admission of a body as JSON, for a gateway."""
    shares = [[share.name, share.bytes_max, share.bodies_max] for share in admission.shares]
    return json.dumps({"digest": admission.digest, "shares": shares}).encode()


def admission_of_json(data: bytes) -> BodyAdmission:
    """Return the admission in a writer's answer."""
    found = json.loads(data)
    return BodyAdmission(tuple(BodyShare(*share) for share in found["shares"]), found["digest"])
