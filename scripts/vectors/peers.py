"""Golden vectors of authorizations and lists of peers, and of the division of an encoding into pieces. See make_vectors.py."""

from __future__ import annotations

from prime_protocol.chunk_index import pack_index
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.peers import PeerList, PeerRecord, PeerTicket, authorization
from vectors.folder import COORDINATOR, NOW_MS, STRANGER, VALIDATOR, WORKER, Case, Folder, fields

E = ErrorCode
HOUR_MS = 3_600_000


def peers(folder: Folder, run: Envelope) -> None:
    """WORKER shows its ticket to VALIDATOR; the coordinator lists WORKER; three encodings are cut."""
    _authorizations(folder, run)
    _lists(folder, run)
    _pieces(folder)


def _authorizations(folder: Folder, run: Envelope) -> None:
    def header(
        *,
        ticket_of: str = run.digest,
        signer: SigningKey = COORDINATOR,
        peer: SigningKey = WORKER,
        shown_by: SigningKey = WORKER,
        left_ms: int = HOUR_MS,
        age_ms: int = 0,
        token_of: str = run.digest,
        audience: SigningKey = VALIDATOR,
    ) -> str:
        ticket = PeerTicket(run=ticket_of, peer=peer.key_id, expires_at_ms=NOW_MS + left_ms)
        text = seal(ticket, PayloadType.PEER_TICKET, signer).to_bytes().decode()
        return authorization(text, audience.key_id, token_of, shown_by, now_ms=NOW_MS - age_ms)

    shared = {"run_spec": "run_spec.envelope", "me": VALIDATOR.key_id, "now_ms": NOW_MS}
    bad = [
        ("another scheme", header().replace("Prime", "Basic"), E.MALFORMED),
        ("a ticket alone", header().partition(".")[0], E.MALFORMED),
        ("a ticket that nobody of the run signed", header(signer=STRANGER), E.BAD_SIGNATURE),
        ("a ticket of another run", header(ticket_of=digest_of(b"other")), E.WRONG_RUN),
        ("a ticket that has expired", header(left_ms=-1), E.EXPIRED),
        ("somebody else's ticket", header(shown_by=STRANGER), E.BAD_SIGNATURE),
        ("a token of another run", header(token_of=digest_of(b"other")), E.WRONG_RUN),
        ("a token for another peer", header(audience=STRANGER), E.WRONG_ROLE),
        ("a token that is too old", header(age_ms=HOUR_MS + 1), E.EXPIRED),
    ]
    cases: list[Case] = [shared | {"name": "a member", "header": header(), "expect": WORKER.key_id}]
    cases += [shared | {"name": name, "header": shown, "error": code} for name, shown, code in bad]
    folder.cases("authorization", cases)


def _lists(folder: Folder, run: Envelope) -> None:
    record = PeerRecord(
        peer=WORKER.key_id,
        urls=("http://192.0.2.7:8410", "http://[2001:db8::7]:8410"),
        addresses=("/ip4/192.0.2.7/tcp/4001",),
    )
    listed = PeerList(run=run.digest, issued_at_ms=NOW_MS, peers=(record,))

    def text(shown: PeerList, key: SigningKey) -> str:
        return seal(shown, PayloadType.PEER_LIST, key).to_bytes().decode()

    other = listed.model_copy(update={"run": digest_of(b"other")})
    shared = {"run_spec": "run_spec.envelope"}
    folder.cases(
        "peer_list",
        [
            shared | {"name": "one peer", "list": text(listed, COORDINATOR), "expect": fields(listed)},
            shared | {"name": "signed by a stranger", "list": text(listed, STRANGER), "error": E.BAD_SIGNATURE},
            shared | {"name": "of another run", "list": text(other, COORDINATOR), "error": E.WRONG_RUN},
        ],
    )


def _pieces(folder: Folder) -> None:
    """Sizes of chunks by part -> [part, start, end, first chunk, last chunk] of every piece. No bytes are needed for it."""
    cases: list[Case] = []
    for name, parts, expect in (
        ("small chunks share a piece", [[30_000] * 5, [70_000, 1]], [[0, 0, 90_000, 0, 3], [0, 90_000, 150_000, 3, 5],
                                                                       [1, 0, 70_000, 5, 6], [1, 70_000, 70_001, 6, 7]]),
        ("a large encoding has larger pieces", [[10**8, 10**8], [50_000] * 5],
         [[0, 0, 10**8, 0, 1], [0, 10**8, 2 * 10**8, 1, 2], [1, 0, 200_000, 2, 6], [1, 200_000, 250_000, 6, 7]]),
        ("pieces have a largest size", [[2**31 - 1], [600_000] * 3],
         [[0, 0, 2**31 - 1, 0, 1], [1, 0, 1_200_000, 1, 3], [1, 1_200_000, 1_800_000, 3, 4]]),
    ):  # fmt: skip
        index = pack_index((size, 1, digest_of(b"chunk")) for part in parts for size in part)
        cases.append({"name": name, "hex": index.hex(), "parts": [sum(part) for part in parts], "expect": expect})
    folder.cases("pieces", cases)
