"""Golden vectors of answers to heartbeats, which are not signed. See make_vectors.py."""

from __future__ import annotations

import json
from typing import Any

from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode
from prime_protocol.replies import HeartbeatReply
from vectors.folder import Case, Folder, fields

LEASES = tuple(digest_of(name) for name in (b"lease 1", b"lease 2"))


def answers(folder: Folder) -> None:
    """One answer without cancelled leases, as older workers get it, one with two, and bad ones."""
    plain = HeartbeatReply(step=6, head=7, draining=True, notice="the operator drains the run")
    cancelling = HeartbeatReply(step=7, head=7, cancelled=LEASES)
    bad: dict[str, tuple[dict[str, Any], ErrorCode]] = {
        "an unknown field": ({"more": 1}, ErrorCode.UNKNOWN_FIELD),
        "not a digest": ({"cancelled": ["lease 1"]}, ErrorCode.WRONG_TYPE),
        "no list": ({"cancelled": LEASES[0]}, ErrorCode.WRONG_TYPE),
        "too many leases": ({"cancelled": [LEASES[0]] * 1_025}, ErrorCode.WRONG_TYPE),
        "a step beyond all": ({"step": limits.STEP_MAX + 1}, ErrorCode.WRONG_TYPE),
    }
    cases: list[Case] = [
        {"name": name, "text": reply.model_dump_json(), "expect": fields(reply)}
        for name, reply in (("nothing cancelled", plain), ("two leases cancelled", cancelling))
    ]
    for name, (change, code) in bad.items():
        cases.append({"name": name, "text": json.dumps({**fields(cancelling), **change}), "error": code})
    folder.cases("heartbeat_reply", cases)
