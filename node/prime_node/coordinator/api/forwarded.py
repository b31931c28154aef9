"""The writer's side of what gateways forward: the same endpoints, without the work that a gateway has done.

A gateway has read the request, verified its signature and its schema. The writer checks everything that depends on its state:
role, epoch, time, nonce and rates, so that a request works once, at whichever gateway it is sent again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import to_json

from prime_node.coordinator.api.body_checks import BodyChecks
from prime_node.coordinator.api.clock_readings import read_clocks
from prime_node.coordinator.api.requests import Caller, sender_of
from prime_node.coordinator.api.routes import HEARTBEAT_PATH, ServedEndpoint
from prime_node.coordinator.decisions import Decisions
from prime_node.ports.web import BodyAdmission, BodyShare, CallerBounds, Importance, Request, Response, Sender
from prime_node.ports.writer_link import ADMIT, BEATS, SHED, ForwardedAnswer, ForwardedCall, fault_head, fault_of
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import HeartbeatRequest, Stamped

_NAMES, _NUMBER = re.compile(r"\{(\w+)\}"), re.compile(r"[0-9]{1,15}")
"""Names of the parameters in a path, and a number of bytes."""
_COUNTS = TypeAdapter(dict[str, Annotated[int, Field(strict=True, ge=0, le=limits.COUNT_MAX)]])
"""What a gateway has refused, by the name of its importance."""
BEATS_MAX = 64
"""Heartbeats in one call."""
_Short = Annotated[str, StringConstraints(max_length=256)]
_BEATS = TypeAdapter(Annotated[list[tuple[_Short, _Short, Stamped]], Field(max_length=BEATS_MAX)])
"""Signer, address and signed payload of each heartbeat: one parser reads all of them."""
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

    def answer(self, call: ForwardedCall) -> ForwardedAnswer | Awaitable[ForwardedAnswer]:
        """Answer one call, at once if there is nothing to wait for. Raise RemoteError."""
        if call.path == SHED:
            return self._note_refused(call)
        if call.path == ADMIT:
            return self._admit(call)
        if call.path == BEATS:
            answer, decisions = self._take_heartbeats(call), self._bodies.decisions
            return answer if decisions.is_answerable() else _once_durable(answer, decisions)
        return self._of_endpoint(call)

    async def _of_endpoint(self, call: ForwardedCall) -> ForwardedAnswer:
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

    def _take_heartbeats(self, call: ForwardedCall) -> ForwardedAnswer:
        """Answer several heartbeats: the clocks, the journal and the metrics are looked at once for all of them."""
        served, answers, outcomes = self._served[HEARTBEAT_PATH], list[object](), Counter[str]()
        state, gate, now, leasing = served.decisions.state, served.gate, read_clocks(served.clock), served.on.leasing
        signer = ""

        def sender() -> Sender | None:
            return sender_of(signer, run=gate.run, state=state)

        try:
            beats = _BEATS.validate_json(call.body)
        except ValidationError:  # the gateway then sends them one by one: each gets its own error
            raise _malformed() from None
        for signer, address, stamped in beats:
            if (error := self._overload(HEARTBEAT_PATH, sender)) is not None:
                answers.append(fault_head(error))
                continue
            outcome = "ok"
            try:
                admitted = gate.admit_verified(
                    *(signer, stamped),
                    kind=HeartbeatRequest,
                    caller=Caller.WORKER,
                    state=state,
                    address=address,
                    now=now,
                )
                assert isinstance(admitted.message, HeartbeatRequest)
                reply = leasing.answer_heartbeat(signer, admitted.message)
                answers.append((admitted.sender is not None and admitted.sender.is_role, reply.body))
            except Exception as fault:  # noqa: BLE001 (the other heartbeats of the call have no part in it)
                answered = fault if isinstance(fault, RemoteError) else served.fault_for(fault, address)
                outcome = answered.code
                answers.append(fault_head(answered))
            outcomes[outcome] += 1
        for outcome, count in outcomes.items():
            served.metrics.add("prime_requests_total", count, endpoint=HEARTBEAT_PATH, outcome=outcome)
        return ForwardedAnswer(Response(to_json(answers)))

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
        if not counted.keys() <= Importance.__members__.keys():
            raise _malformed()
        for name, count in counted.items():
            self._bounds.refused(Importance[name], count)
        return ForwardedAnswer(Response(status=204))


async def _once_durable(answer: ForwardedAnswer, decisions: Decisions) -> ForwardedAnswer:
    await decisions.answerable()
    return answer


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


def heartbeats_to_bytes(beats: Sequence[ForwardedCall]) -> bytes:
    """Return several heartbeats, whose payloads are JSON, as the body of one call."""
    rows = (b"[%b,%b,%b]" % (to_json(beat.signer), to_json(beat.address), beat.body) for beat in beats)
    return b"[%b]" % b",".join(rows)


def heartbeat_answers_of(answer: ForwardedAnswer, beats: Sequence[ForwardedCall]) -> list[ForwardedAnswer | Exception]:
    """Return the answer to each heartbeat, or the error."""
    assert isinstance(answer.response.body, bytes)
    return [
        fault_of(found)
        if isinstance(found, dict)
        else ForwardedAnswer(Response(found[1].encode()), Sender(beat.signer, is_role=found[0]), is_vouched=True)
        for beat, found in zip(beats, json.loads(answer.response.body), strict=True)
    ]


def admission_to_json(admission: BodyAdmission) -> bytes:
    """Return the admission of a body as JSON, for a gateway."""
    shares = [[share.name, share.bytes_max, share.bodies_max] for share in admission.shares]
    return json.dumps({"digest": admission.digest, "shares": shares}).encode()


def admission_of_json(data: bytes) -> BodyAdmission:
    """Return the admission in a writer's answer."""
    found = json.loads(data)
    return BodyAdmission(tuple(BodyShare(*share) for share in found["shares"]), found["digest"])
