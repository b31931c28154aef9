"""Golden vectors of delegations and standings. See make_vectors.py."""

from __future__ import annotations

import json
from typing import Any

from prime_protocol import limits
from prime_protocol.delegation import Delegation
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.replies import MachineStanding, Standing
from vectors.folder import COORDINATOR, NOW_MS, STRANGER, WORKER, Case, Folder, fields

E = ErrorCode
PERSON = SigningKey(bytes([7]) * 32)
DAY_MS = 86_400_000


def delegations(folder: Folder, run: Envelope) -> None:
    good = Delegation(
        person=PERSON.key_id,
        machine=WORKER.key_id,
        issued_at_ms=NOW_MS - DAY_MS,
        expires_at_ms=NOW_MS + 89 * DAY_MS,
    )
    here = good.model_copy(update={"run": run.digest})

    def text(delegation: Delegation, key: SigningKey = PERSON, kind: PayloadType = PayloadType.DELEGATION) -> str:
        return seal(delegation, kind, key).to_base64()

    def altered(**changes: object) -> str:
        return seal(json.dumps(fields(good) | changes).encode(), PayloadType.DELEGATION, PERSON).to_base64()

    two = seal(good, PayloadType.DELEGATION, PERSON, STRANGER).to_base64()
    longest_ms = int(limits.DELEGATION_LIFETIME_S_MAX * 1_000)
    cases: list[tuple[str, str, int, Delegation | ErrorCode]] = [
        ("for all runs", text(good), NOW_MS, good),
        ("for this run", text(here), NOW_MS, here),
        ("at its last moment", text(good), good.expires_at_ms, good),
        ("expired", text(good), good.expires_at_ms + 1, E.EXPIRED),
        ("issued by a clock two minutes ahead", text(good), good.issued_at_ms - 120_000, good),
        ("issued in the future", text(good), good.issued_at_ms - 120_001, E.EXPIRED),
        ("for another run", text(good.model_copy(update={"run": "00" * 32})), NOW_MS, E.WRONG_RUN),
        (
            "for another machine",
            text(good.model_copy(update={"machine": STRANGER.key_id})),
            NOW_MS,
            E.WRONG_ROLE,
        ),
        ("by the machine itself", text(good, WORKER), NOW_MS, E.BAD_SIGNATURE),
        ("by the coordinator", text(good, COORDINATOR), NOW_MS, E.BAD_SIGNATURE),
        ("by two keys", two, NOW_MS, E.BAD_SIGNATURE),
        ("another kind of envelope", text(good, PERSON, PayloadType.INVITE), NOW_MS, E.WRONG_PAYLOAD_TYPE),
        ("a key that authorises itself", altered(machine=PERSON.key_id), NOW_MS, E.WRONG_TYPE),
        ("longer than 400 days", altered(expires_at_ms=good.issued_at_ms + longest_ms + 1), NOW_MS, E.WRONG_TYPE),
        ("an end before its begin", altered(expires_at_ms=good.issued_at_ms), NOW_MS, E.WRONG_TYPE),
        ("an unknown field", altered(more=1), NOW_MS, E.UNKNOWN_FIELD),
        ("cut short", text(good)[:-8], NOW_MS, E.MALFORMED),
        ("too long", "A" * 2_052, NOW_MS, E.TOO_LARGE),
    ]
    folder.cases(
        "delegation",
        [
            {"name": name, "text": shown, "machine": WORKER.key_id, "run": run.digest, "now_ms": now_ms}
            | ({"error": found} if isinstance(found, ErrorCode) else {"expect": fields(found)})
            for name, shown, now_ms, found in cases
        ],
    )


def standings(folder: Folder) -> None:
    machine = MachineStanding(worker=WORKER.key_id, name="a rig", state="idle", accepted=640, refused=3, tokens=7_040)
    found = Standing(
        contributor=PERSON.key_id, rank=3, contributors=41, tokens=7_040, all_tokens=281_600, machines=(machine,)
    )
    bad: dict[str, tuple[dict[str, Any], ErrorCode]] = {
        "a place before the first": ({"rank": 0}, E.WRONG_TYPE),
        "too many machines": ({"machines": [fields(machine)] * 257}, E.WRONG_TYPE),
        "an unknown field": ({"more": 1}, E.UNKNOWN_FIELD),
    }
    cases: list[Case] = [{"name": "a person", "text": found.model_dump_json(), "expect": fields(found)}]
    none = found.model_copy(update={"contributor": WORKER.key_id, "rank": None, "tokens": 0})
    cases.append(
        {"name": "a worker without an accepted bundle", "text": none.model_dump_json(), "expect": fields(none)}
    )
    cases += [
        {"name": name, "text": json.dumps(fields(found) | change), "error": code}
        for name, (change, code) in bad.items()
    ]
    folder.cases("standing", cases)
