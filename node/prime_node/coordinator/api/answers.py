"""From what a handler returns to an HTTP response."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from prime_node.ports.web import Response
from prime_protocol.envelope import Envelope
from prime_protocol.messages import NotYet

Answer = BaseModel | Envelope | bytes | dict[str, Any] | Response | None
"""Result of an endpoint. A dict is unsigned JSON; None is an answer without content."""


def response_of(answer: Answer) -> Response:
    """Return the response that carries an answer."""
    match answer:
        case None:
            return Response(status=204)
        case Response():
            return answer
        case bytes():
            return Response(answer, content_type="application/octet-stream")
        case Envelope():
            return Response(answer.to_bytes())
        case NotYet():
            return Response(answer.model_dump_json().encode(), status=202)
        case BaseModel():
            return Response(answer.model_dump_json().encode())
        case dict():
            return Response(json.dumps(answer, separators=(",", ":")).encode())
