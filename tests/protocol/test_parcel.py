from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX, ParcelHeader, open_parcel, pack_parcel

Raises = Callable[..., RemoteError]
KEY = SigningKey(b"\x21" * 32)
BODY = b"some bulk bytes"
HEADER = ParcelHeader(body_digest=digest_of(BODY), body_bytes=len(BODY))
PARCEL = pack_parcel(HEADER, BODY, PayloadType.BLOB, KEY)
ENVELOPE_BYTES = int.from_bytes(PARCEL[4:8], "big")


def receive(data: bytes, *, body_bytes_max: int = 100) -> bytes:
    parcel = open_parcel(data, body_bytes_max=body_bytes_max)
    header = parse_json(parcel.envelope.verify(PayloadType.BLOB, trusted=[KEY.key_id]), ParcelHeader)
    return bytes(parcel.check_body(header))


def framed(envelope: bytes, body: bytes = b"") -> bytes:
    return b"PRP1" + len(envelope).to_bytes(4, "big") + envelope + body


def test_a_parcel_survives_the_wire() -> None:
    assert receive(PARCEL) == BODY
    assert PARCEL[:4] == b"PRP1"
    assert PARCEL[8 + ENVELOPE_BYTES :] == BODY


def test_an_empty_body_is_a_body() -> None:
    header = ParcelHeader(body_digest=digest_of(b""), body_bytes=0)
    assert receive(pack_parcel(header, b"", PayloadType.BLOB, KEY)) == b""


def test_every_flipped_bit_of_the_body_is_noticed(raises: Raises) -> None:
    for i in range(8 + ENVELOPE_BYTES, len(PARCEL)):
        tampered = PARCEL[:i] + bytes([PARCEL[i] ^ 1]) + PARCEL[i + 1 :]
        raises(ErrorCode.DIGEST_MISMATCH, receive, tampered)


@pytest.mark.parametrize("body", [b"", BODY[:-1], BODY + b"x", BODY[::-1], BODY * 2])
def test_another_body_is_noticed(body: bytes, raises: Raises) -> None:
    raises(ErrorCode.DIGEST_MISMATCH, receive, PARCEL[: 8 + ENVELOPE_BYTES] + body)


def test_a_right_digest_with_a_wrong_length_is_noticed(raises: Raises) -> None:
    header = ParcelHeader(body_digest=digest_of(BODY), body_bytes=len(BODY) + 1)
    raises(ErrorCode.DIGEST_MISMATCH, receive, framed(seal(header, PayloadType.BLOB, KEY).to_bytes(), BODY))


@pytest.mark.parametrize("data", [b"", b"PRP1", PARCEL[:7], b"PRP2" + PARCEL[4:], b"prp1" + PARCEL[4:], b"\0" * 50])
def test_what_does_not_begin_like_a_parcel_is_none(data: bytes, raises: Raises) -> None:
    raises(ErrorCode.MALFORMED, open_parcel, data, body_bytes_max=100)


def test_a_parcel_that_ends_inside_its_header_is_refused(raises: Raises) -> None:
    for end in range(8, 8 + ENVELOPE_BYTES):
        raises(ErrorCode.MALFORMED, open_parcel, PARCEL[:end], body_bytes_max=100)


def test_a_declared_header_length_is_bounded_before_it_is_used(raises: Raises) -> None:
    raises(ErrorCode.TOO_LARGE, open_parcel, b"PRP1\xff\xff\xff\xff", body_bytes_max=100)
    raises(ErrorCode.TOO_LARGE, open_parcel, framed(b"x" * PARCEL_OVERHEAD_BYTES_MAX), body_bytes_max=100)


def test_a_header_payload_has_its_own_limit(raises: Raises) -> None:
    fits = seal(b" " * limits.PARCEL_HEADER_BYTES_MAX, PayloadType.BLOB, KEY).to_bytes()
    assert len(framed(fits)) <= PARCEL_OVERHEAD_BYTES_MAX
    open_parcel(framed(fits), body_bytes_max=100)
    over = seal(b" " * (limits.PARCEL_HEADER_BYTES_MAX + 1), PayloadType.BLOB, KEY).to_bytes()
    raises(ErrorCode.TOO_LARGE, open_parcel, framed(over), body_bytes_max=100)


def test_a_body_over_its_limit_is_refused(raises: Raises) -> None:
    assert receive(PARCEL, body_bytes_max=len(BODY)) == BODY
    error = raises(ErrorCode.TOO_LARGE, receive, PARCEL, body_bytes_max=len(BODY) - 1)
    assert isinstance(error, LimitExceeded)


def test_a_parcel_of_another_kind_is_refused(raises: Raises) -> None:
    raises(ErrorCode.WRONG_PAYLOAD_TYPE, receive, pack_parcel(HEADER, BODY, PayloadType.ROLLOUT, KEY))


@given(st.integers(0, len(PARCEL) - 1), st.integers(0, 255))
def test_a_changed_byte_changes_nothing_or_is_refused(place: int, value: int) -> None:
    with suppress(RemoteError):
        assert receive(PARCEL[:place] + bytes([value]) + PARCEL[place + 1 :]) == BODY


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_politely(data: bytes) -> None:
    for prefix in (b"", b"PRP1", b"PRP1\0\0\0"):
        with pytest.raises(RemoteError):
            receive(prefix + data)
