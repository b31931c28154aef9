"""Golden vectors of invitations. See make_vectors.py."""

from __future__ import annotations

from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.invite import Invite
from vectors.folder import COORDINATOR, NOW_MS, ROOT, TRAINER, Case, Folder, fields

E = ErrorCode


def invites(folder: Folder, run: Envelope) -> None:
    good = Invite(run=run.digest, invite="0123456789abcdef" * 2, keys_max=3, expires_at_ms=NOW_MS)
    foreign = good.model_copy(update={"run": "00" * 32})

    def text(invite: Invite, key: SigningKey, kind: PayloadType = PayloadType.INVITE) -> str:
        return seal(invite, kind, key).to_base64()

    cases: list[tuple[str, str, int, ErrorCode | None]] = [
        ("by the coordinator", text(good, COORDINATOR), NOW_MS, None),
        ("by the root", text(good, ROOT), NOW_MS, None),
        ("by the trainer", text(good, TRAINER), NOW_MS, E.BAD_SIGNATURE),
        ("expired", text(good, COORDINATOR), NOW_MS + 1, E.EXPIRED),
        ("to another run", text(foreign, COORDINATOR), NOW_MS, E.WRONG_RUN),
        ("another kind of envelope", text(good, COORDINATOR, PayloadType.LEASE), NOW_MS, E.WRONG_PAYLOAD_TYPE),
        ("cut short", text(good, COORDINATOR)[:-8], NOW_MS, E.MALFORMED),
        ("no base64", "please let me in", NOW_MS, E.MALFORMED),
        ("too long", "A" * 4_100, NOW_MS, E.TOO_LARGE),
    ]
    base: Case = {"run_spec": "run_spec.envelope"}
    folder.cases(
        "invite",
        [
            base
            | {"name": name, "text": shown, "now_ms": now_ms}
            | ({"expect": fields(good)} if code is None else {"error": code})
            for name, shown, now_ms, code in cases
        ],
    )
