"""Asking the coordinator until it answers: a trainer waits for days if it must, and says for what."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import PeerError

log = logging.getLogger(__name__)

T = TypeVar("T")
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 15.0
SAY_AGAIN_S = 30.0
"""While the reason stays the same, it is logged this often."""


async def ask_until_answered(call: Callable[[], Awaitable[T]], *, what: str, clock: Clock) -> T:
    """The answer of `call`, tried again with growing pauses while nobody answers or the answer says "later".

    Any other PeerError is an answer and is raised. There is no deadline: the caller is cancelled where it should end.
    """
    pause_s = PAUSE_S_MIN
    since_s = clock.monotonic_s()
    said_s: float | None = None
    while True:
        try:
            answer = await call()
        except Unreachable as error:
            reason = f"coordinator unreachable: {error}"
        except PeerError as error:
            if not error.is_transient:
                raise
            reason = f"coordinator says {error}"
            pause_s = max(pause_s, error.retry_after_s or 0.0)
        else:
            if said_s is not None:
                log.info("%s: answered after %.0f s", what, clock.monotonic_s() - since_s)
            return answer
        now_s = clock.monotonic_s()
        if said_s is None or now_s - said_s >= SAY_AGAIN_S:
            log.warning("%s: %s; trying for %.0f s, next in %.1f s", what, reason, now_s - since_s, pause_s)
            said_s = now_s
        await clock.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
