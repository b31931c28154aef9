"""Common rules of a server's replies, for all code that writes one to a connection."""

from __future__ import annotations

import json

from prime_node.ports.web import Response
from prime_protocol.errors import RemoteError

BODY_GRACE_S = 20.0
BODY_BYTES_PER_S_MIN = 16 * 2**10
"""Speed at which a body may be sent after the grace. Only a modem is slower."""


def explanation(error: RemoteError) -> Response:
    """Return the reply to an error: its status, and an ErrorBody."""
    body: dict[str, object] = {"code": str(error.code), "detail": error.detail[:2_000]}
    headers = {}
    if error.retry_after_s is not None:
        body["retry_after_s"] = error.retry_after_s
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.epoch:
        body["epoch"] = error.epoch
    return Response(json.dumps(body).encode(), error.http_status, headers=headers)


def send_s_max(response: Response) -> float:
    """Return the seconds that a body of known length may take; an iterator's length is in its headers."""
    num_bytes = len(response.body) if isinstance(response.body, bytes) else int(response.headers["Content-Length"])
    return BODY_GRACE_S + num_bytes / BODY_BYTES_PER_S_MIN
