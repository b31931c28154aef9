"""Heartbeats of a gateway, several to one call: a call costs the writer five times as much as a heartbeat in it.

Waiting: a heartbeat waits for HOLD_S at most, or until its call is FULL, then for the writer's answer to the call. A writer of
another release, which does not know the call or what is in it, gets them one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prime_node.coordinator.api.forwarded import heartbeat_answers_of, heartbeats_to_bytes
from prime_node.ports.writer_link import BEATS, ForwardedAnswer, ForwardedCall, WriterLink
from prime_protocol.errors import ErrorCode, RemoteError

HOLD_S = 0.005
"""Time for which a heartbeat waits for others."""
FULL = 8
"""Heartbeats of a call that is sent at once."""
_Waiting = tuple[ForwardedCall, asyncio.Future[ForwardedAnswer]]


class HeartbeatCalls:
    """Calls with heartbeats."""

    def __init__(self, link: WriterLink) -> None:
        self._link = link
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, beat: ForwardedCall) -> ForwardedAnswer:
        """Forward one heartbeat with others. Raises RemoteError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ForwardedAnswer] = loop.create_future()
        self._waiting.append((beat, answer))
        if len(self._waiting) == 1:
            self._timer = loop.call_later(HOLD_S, self._send)
        elif len(self._waiting) == FULL:
            self._send()
        return await answer

    def _send(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        waiting, self._waiting = self._waiting, []
        sent = asyncio.ensure_future(self._carry(waiting))
        self._sent.add(sent)
        sent.add_done_callback(self._sent.discard)

    async def _carry(self, waiting: Sequence[_Waiting]) -> None:
        answers: Sequence[ForwardedAnswer | BaseException]
        beats = [beat for beat, _ in waiting]
        try:
            answer = await self._link.ask(ForwardedCall(BEATS, body=heartbeats_to_bytes(beats)))
            answers = heartbeat_answers_of(answer, beats)
        except Exception as error:  # noqa: BLE001 (it belongs to those who wait)
            answers = [error] * len(waiting)
            if isinstance(error, RemoteError) and error.code in (ErrorCode.NOT_FOUND, ErrorCode.MALFORMED):
                answers = await asyncio.gather(*map(self._link.ask, beats), return_exceptions=True)
        for (_, future), found in zip(waiting, answers, strict=True):
            if future.done():  # its caller has left
                continue
            if isinstance(found, BaseException):
                future.set_exception(found)
            else:
                future.set_result(found)
