"""Tickets, tokens, lists and answers between peers: valid ones are accepted, and any one change is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest
from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, ROOT, make_run

from prime_protocol.envelope import PayloadType, WireModel, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.peers import (
    TOKEN_AGE_S_MAX,
    PeerAnswer,
    PeerList,
    PeerRecord,
    PeerTicket,
    PeerToken,
    PeerUpdate,
    authorization,
    check_answer,
    check_authorization,
    open_peer_list,
)

RUN = make_run()
OTHER_RUN = make_run(name="other")
NOW_MS = 1_000_000_000
NONCE = "ab" * 16


def text(model: WireModel, kind: PayloadType, *keys: SigningKey) -> str:
    return seal(model, kind, *keys).to_bytes().decode()


def ticket(
    *, peer: str = ANNA.key_id, run: str = RUN.digest, expires_at_ms: int = NOW_MS + 1, key: SigningKey = COORDINATOR
) -> str:
    return text(PeerTicket(run=run, peer=peer, expires_at_ms=expires_at_ms), PayloadType.PEER_TICKET, key)


def header(**changes: object) -> str:
    """Return what ANNA presents to BEN, with `changes`."""
    shown: dict[str, object] = {
        "ticket": ticket(),
        "audience": BEN.key_id,
        "run": RUN.digest,
        "key": ANNA,
        "now_ms": NOW_MS,
    }
    return authorization(**(shown | changes))  # type: ignore[arg-type]


def refused(shown: str) -> ErrorCode:
    with pytest.raises(RemoteError) as caught:
        check_authorization(shown, BEN.key_id, RUN, now_ms=NOW_MS)
    return caught.value.code


def test_a_member_is_known_by_its_ticket() -> None:
    assert check_authorization(header(), BEN.key_id, RUN, now_ms=NOW_MS) == ANNA.key_id


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ticket": ticket(key=ROOT)}, ErrorCode.BAD_SIGNATURE),
        ({"ticket": ticket(key=ANNA)}, ErrorCode.BAD_SIGNATURE),
        ({"ticket": ticket(run=OTHER_RUN.digest)}, ErrorCode.WRONG_RUN),
        ({"ticket": ticket(expires_at_ms=NOW_MS - 1)}, ErrorCode.EXPIRED),
        ({"ticket": ticket(peer=BEN.key_id)}, ErrorCode.BAD_SIGNATURE),
        ({"key": BEN}, ErrorCode.BAD_SIGNATURE),
        ({"run": OTHER_RUN.digest}, ErrorCode.WRONG_RUN),
        ({"audience": ANNA.key_id}, ErrorCode.WRONG_ROLE),
        ({"now_ms": NOW_MS - round(TOKEN_AGE_S_MAX * 1_000) - 1}, ErrorCode.EXPIRED),
        ({"now_ms": NOW_MS + round(TOKEN_AGE_S_MAX * 1_000) + 1}, ErrorCode.EXPIRED),
    ],
)
def test_each_lie_about_who_is_a_member_is_refused(changes: dict[str, object], code: ErrorCode) -> None:
    assert refused(header(**changes)) is code


@pytest.mark.parametrize("shown", ["", "Prime", "Prime x", "Prime a.b.c", "Prime !!!!.!!!!", "Bearer " + "e30=.e30="])
def test_what_is_no_authorization_is_malformed(shown: str) -> None:
    assert refused(shown) is ErrorCode.MALFORMED


def test_a_ticket_with_one_changed_byte_is_refused() -> None:
    scheme, _, rest = header().partition(" ")
    first, second = rest.split(".")
    raw = bytearray(base64.b64decode(first))
    place = raw.index(b'"payload":"') + 20
    raw[place] = ord("A") if raw[place] != ord("A") else ord("B")
    assert refused(f"{scheme} {base64.b64encode(raw).decode()}.{second}") is ErrorCode.BAD_SIGNATURE


def test_an_authorization_that_is_too_long_is_refused() -> None:
    long = base64.b64encode(b" " * 5_000).decode()
    assert refused(f"Prime {long}.{long}") is ErrorCode.TOO_LARGE


def test_a_list_counts_when_the_coordinator_signed_it_for_this_run() -> None:
    listed = PeerList(
        run=RUN.digest, issued_at_ms=1, peers=(PeerRecord(peer=ANNA.key_id, urls=("http://192.0.2.1:80",)),)
    )
    assert open_peer_list(text(listed, PayloadType.PEER_LIST, COORDINATOR), RUN) == listed
    for other, run in ((ANNA, RUN), (COORDINATOR, OTHER_RUN)):
        with pytest.raises(RemoteError) as caught:
            open_peer_list(text(listed, PayloadType.PEER_LIST, other), run)
        assert caught.value.code is (ErrorCode.WRONG_RUN if other is COORDINATOR else ErrorCode.BAD_SIGNATURE)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org:80",
        "https://192.0.2.1:80",
        "http://192.0.2.1:80/x",
        "http://192.0.2.1",
        "http://a@192.0.2.1:1",
    ],
)
def test_an_address_is_an_ip_address_and_a_port_and_nothing_else(url: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        PeerRecord(peer=ANNA.key_id, urls=(url,))


Make = Callable[[], bytes]


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: seal(PeerAnswer(run=RUN.digest, nonce=NONCE), PayloadType.PEER_ANSWER, BEN), ErrorCode.BAD_SIGNATURE),
        (lambda: seal(PeerAnswer(run=RUN.digest, nonce="cd" * 16), PayloadType.PEER_ANSWER, ANNA), ErrorCode.REPLAYED),
        (lambda: seal(PeerAnswer(run=OTHER_RUN.digest, nonce=NONCE), PayloadType.PEER_ANSWER, ANNA), ErrorCode.REPLAYED),
        (
            lambda: seal(PeerToken(run=RUN.digest, audience=BEN.key_id, issued_at_ms=0), PayloadType.PEER_TOKEN, ANNA),
            ErrorCode.WRONG_PAYLOAD_TYPE,
        ),
    ],
)  # fmt: skip
def test_a_dial_back_believes_only_the_answer_of_the_peer_itself(make: Callable[[], object], code: ErrorCode) -> None:
    with pytest.raises(RemoteError) as caught:
        check_answer(make().to_bytes(), ANNA.key_id, RUN.digest, NONCE)  # type: ignore[attr-defined]
    assert caught.value.code is code
    right = seal(PeerAnswer(run=RUN.digest, nonce=NONCE), PayloadType.PEER_ANSWER, ANNA)
    check_answer(right.to_bytes(), ANNA.key_id, RUN.digest, NONCE)


@pytest.mark.parametrize(
    "line",
    [b"{}x", b'{"head": -2}', b'{"pieces": {"ab": []}}', b'{"pieces": {"' + b"0" * 64 + b'": [[1]]}}', b'{"cursor": -1}'],
)  # fmt: skip
def test_news_that_make_no_sense_are_a_peers_fault(line: bytes) -> None:
    with pytest.raises(RemoteError):
        parse_json(line, PeerUpdate)
