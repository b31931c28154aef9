from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from prime_protocol import limits
from prime_protocol.envelope import (
    Envelope,
    PayloadType,
    Signature,
    WireModel,
    load_json,
    open_envelope,
    parse_json,
    pre_authentication_encoding,
    seal,
)
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey

Raises = Callable[..., RemoteError]
KEY, OTHER, THIRD = (SigningKey(bytes([i]) * 32) for i in (11, 12, 13))
LEASE, RECEIPT = PayloadType.LEASE, PayloadType.RECEIPT


class Message(WireModel):
    number: int = Field(ge=0, le=10)
    share: float = 0.0
    text: str = ""
    kind: PayloadType = PayloadType.LEASE
    items: tuple[int, ...] = Field(default=(), max_length=4)
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)


def sealed(*keys: SigningKey) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(seal(b'{"number":1}', LEASE, *(keys or (KEY,))).to_bytes())
    return fields


# Framing


def test_an_envelope_survives_the_wire() -> None:
    envelope = seal(Message(number=3), LEASE, KEY, OTHER)
    assert open_envelope(envelope.to_bytes()) == envelope


def test_the_signed_bytes_are_those_of_the_dsse_specification() -> None:
    """The example of DSSE's protocol.md."""
    encoded = pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_the_lengths_in_the_signed_bytes_count_bytes_not_characters() -> None:
    assert pre_authentication_encoding("é", "é".encode()) == b"DSSEv1 2 \xc3\xa9 2 \xc3\xa9"


def test_an_envelope_over_its_limit_is_refused_before_it_is_read(raises: Raises) -> None:
    raises(ErrorCode.TOO_LARGE, open_envelope, b"{" * 101, bytes_max=100)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda e: e.update(extra=1), ErrorCode.UNKNOWN_FIELD),
        (lambda e: e.pop("payload"), ErrorCode.WRONG_TYPE),
        (lambda e: e.pop("payloadType"), ErrorCode.WRONG_TYPE),
        (lambda e: e.pop("signatures"), ErrorCode.WRONG_TYPE),
        (lambda e: e.update(payload=5), ErrorCode.WRONG_TYPE),
        (lambda e: e.update(payload="!"), ErrorCode.MALFORMED),
        (lambda e: e.update(payloadType=None), ErrorCode.WRONG_TYPE),
        (lambda e: e.update(signatures=[]), ErrorCode.WRONG_TYPE),
        (lambda e: e.update(signatures={}), ErrorCode.WRONG_TYPE),
        (lambda e: e.update(signatures=["x"]), ErrorCode.WRONG_TYPE),
        (lambda e: e.update(signatures=e["signatures"] * (limits.SIGNATURES_MAX + 1)), ErrorCode.TOO_LARGE),
        (lambda e: e["signatures"][0].update(extra=1), ErrorCode.WRONG_TYPE),
        (lambda e: e["signatures"][0].pop("keyid"), ErrorCode.WRONG_TYPE),
        (lambda e: e["signatures"][0].update(keyid=1), ErrorCode.WRONG_TYPE),
        (lambda e: e["signatures"][0].update(keyid="1" * 201), ErrorCode.TOO_LARGE),
        (lambda e: e["signatures"][0].update(sig="a"), ErrorCode.MALFORMED),
    ],
)
def test_a_misshapen_envelope_is_refused(change: Callable[[Any], object], code: ErrorCode, raises: Raises) -> None:
    fields = sealed()
    open_envelope(json.dumps(fields).encode())
    change(fields)
    raises(code, open_envelope, json.dumps(fields).encode())


def test_an_envelope_holds_as_many_signatures_as_the_limit_says() -> None:
    fields = sealed()
    fields["signatures"] *= limits.SIGNATURES_MAX
    assert len(open_envelope(json.dumps(fields).encode()).signatures) == limits.SIGNATURES_MAX


def test_an_envelope_is_an_object(raises: Raises) -> None:
    for data in (b"[]", b"1", b"null", b'"x"', b""):
        raises(ErrorCode.MALFORMED, open_envelope, data)


@pytest.mark.parametrize("text", ["QUJ=", "QUI", "QUI==", "QU I=", "QUI=\n", "QQ==QQ==", "_-8=", "QUI=é", "=", "===="])
def test_base64_has_one_spelling(text: str, raises: Raises) -> None:
    """`QUJ=` differs from `QUI=` (AB) only in bits that encode nothing."""
    fields = sealed() | {"payload": text}
    raises(ErrorCode.MALFORMED, open_envelope, json.dumps(fields).encode())


# Signatures


def test_every_tampered_byte_of_payload_or_signature_is_noticed(raises: Raises) -> None:
    good = seal(b'{"number":1}', LEASE, KEY)
    assert good.verify(LEASE, trusted=[KEY.key_id]) == good.payload
    for i in range(len(good.payload)):
        payload = good.payload[:i] + bytes([good.payload[i] ^ 1]) + good.payload[i + 1 :]
        tampered = Envelope(good.payload_type, payload, good.signatures)
        raises(ErrorCode.BAD_SIGNATURE, tampered.verify, LEASE, trusted=[KEY.key_id])
    signature = good.signatures[0].signature
    for i in range(64):
        flipped = signature[:i] + bytes([signature[i] ^ 0x10]) + signature[i + 1 :]
        tampered = Envelope(good.payload_type, good.payload, (Signature(KEY.key_id, flipped),))
        raises(ErrorCode.BAD_SIGNATURE, tampered.verify, LEASE, trusted=[KEY.key_id])


@pytest.mark.parametrize("length", [0, 1, 63, 65, 128])
def test_a_signature_has_64_bytes(length: int, raises: Raises) -> None:
    envelope = Envelope(LEASE, b"x", (Signature(KEY.key_id, b"\1" * length),))
    raises(ErrorCode.BAD_SIGNATURE, envelope.verify, LEASE, trusted=[KEY.key_id])


def test_a_message_cannot_pass_for_another_kind(raises: Raises) -> None:
    envelope = seal(b"{}", LEASE, KEY)
    raises(ErrorCode.WRONG_PAYLOAD_TYPE, envelope.verify, RECEIPT, trusted=[KEY.key_id])
    renamed = Envelope(RECEIPT, envelope.payload, envelope.signatures)
    raises(ErrorCode.BAD_SIGNATURE, renamed.verify, RECEIPT, trusted=[KEY.key_id])


def test_a_hostile_payload_type_makes_a_printable_error(raises: Raises) -> None:
    error = raises(ErrorCode.WRONG_PAYLOAD_TYPE, Envelope("\x1b[2J", b"", ()).verify, LEASE, trusted=[])
    assert error.detail.isprintable()


def test_signatures_by_keys_that_are_not_trusted_are_ignored(raises: Raises) -> None:
    envelope = seal(b"{}", LEASE, KEY)
    broken = Signature(OTHER.key_id, b"\0" * 64)
    no_key = Signature("nobody", b"")
    assert Envelope(LEASE, b"{}", (broken, no_key, *envelope.signatures)).verify(LEASE, trusted=[KEY.key_id]) == b"{}"
    raises(ErrorCode.BAD_SIGNATURE, envelope.verify, LEASE, trusted=[OTHER.key_id])
    raises(ErrorCode.BAD_SIGNATURE, envelope.verify, LEASE, trusted=[])


def test_a_threshold_counts_keys_not_signatures(raises: Raises) -> None:
    twice = seal(b"{}", LEASE, KEY, KEY)
    trusted = [KEY.key_id, OTHER.key_id, THIRD.key_id]
    raises(ErrorCode.BAD_SIGNATURE, twice.verify, LEASE, trusted=trusted, threshold=2)
    both = seal(b"{}", LEASE, KEY, OTHER)
    assert both.verify(LEASE, trusted=trusted, threshold=2) == b"{}"
    raises(ErrorCode.BAD_SIGNATURE, both.verify, LEASE, trusted=trusted, threshold=3)


def test_a_trusted_signature_that_fails_is_an_error_whatever_the_others_say(raises: Raises) -> None:
    good = seal(b"{}", LEASE, KEY)
    mixed = Envelope(LEASE, b"{}", (*good.signatures, Signature(OTHER.key_id, b"\0" * 64)))
    raises(ErrorCode.BAD_SIGNATURE, mixed.verify, LEASE, trusted=[KEY.key_id, OTHER.key_id])


def test_a_sole_signer_is_alone(raises: Raises) -> None:
    assert seal(b"{}", LEASE, KEY).sole_signer() == KEY.key_id
    raises(ErrorCode.BAD_SIGNATURE, seal(b"{}", LEASE, KEY, OTHER).sole_signer)


def test_a_digest_names_the_statement_independent_of_the_signer() -> None:
    assert seal(b"{}", LEASE, KEY).digest == seal(b"{}", LEASE, OTHER).digest


# JSON


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":2}}',
        b'{"a":1,"\\u0061":2}',
        b'{"a":NaN}',
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e999]",
        b"[-1e999]",
        b'["\\ud800"]',
        b'{"\\udfff":1}',
        b'["\\ud83d\\u0041"]',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-32"),
        b'["\xff"]',
        b'["\xed\xa0\x80"]',
        b'["\xc0\x80"]',
        b'["\n"]',
        b"{}{}",
        b"{} x",
        b"{}\0",
        b"",
        b"[1,]",
        b'{"a":1,}',
        b"{'a':1}",
        b"[01]",
        b"[+1]",
        b"[.5]",
        b"[0x1]",
        b"[1_000]",
        b"// comment\n{}",
        b'["unclosed',
        b"[" + b"9" * 5_000 + b"]",
    ],
)
def test_what_is_not_strict_json_is_malformed(data: bytes, raises: Raises) -> None:
    raises(ErrorCode.MALFORMED, load_json, data)


def test_strict_json_is_read() -> None:
    data = ' {"a": [1, -0.5, 1e3, true, null, "\\ud83d\\ude00", "é\\\\\\"[{"]} \n'
    assert load_json(data.encode()) == {"a": [1, -0.5, 1000.0, True, None, "😀", 'é\\"[{']}


def test_nesting_is_bounded_and_brackets_inside_strings_are_none(raises: Raises) -> None:
    deep = limits.JSON_DEPTH_MAX
    load_json(b"[" * deep + b"]" * deep)
    load_json(json.dumps(["[{" * 1_000, '\\"[[' * 100]).encode())
    raises(ErrorCode.TOO_LARGE, load_json, b"[" * (deep + 1) + b"]" * (deep + 1))
    raises(ErrorCode.TOO_LARGE, load_json, b'{"a":' * (deep + 1) + b"1" + b"}" * (deep + 1))
    raises(ErrorCode.TOO_LARGE, load_json, b"[" * 100_000)
    raises(ErrorCode.TOO_LARGE, load_json, b"]" * 50 + b"[" * 67)


@pytest.mark.parametrize(
    "unit", [b'\\"', b'"', b'""', b"\\", b"[]", b'"\\', b'{"a":', b"[[]],", b"\\ud800", b'"\\ud800"']
)
def test_hostile_bytes_cost_linear_time(unit: bytes) -> None:
    """A quadratic scan takes minutes for these two megabytes, and took five seconds for forty kilobytes."""
    for prefix in (b"", b'"', b"["):
        began = time.process_time()
        with pytest.raises(RemoteError):
            load_json(prefix + unit * (2 * 2**20 // len(unit)))
        assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"{}", ErrorCode.WRONG_TYPE),
        (b"[]", ErrorCode.WRONG_TYPE),
        (b'{"number":1,"other":1}', ErrorCode.UNKNOWN_FIELD),
        (b'{"number":11}', ErrorCode.WRONG_TYPE),
        (b'{"number":-1}', ErrorCode.WRONG_TYPE),
        (b'{"number":"1"}', ErrorCode.WRONG_TYPE),
        (b'{"number":1.0}', ErrorCode.WRONG_TYPE),
        (b'{"number":1e0}', ErrorCode.WRONG_TYPE),
        (b'{"number":true}', ErrorCode.WRONG_TYPE),
        (b'{"number":null}', ErrorCode.WRONG_TYPE),
        (b'{"number":' + b"9" * 400 + b"}", ErrorCode.WRONG_TYPE),
        (b'{"number":1,"share":true}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"share":"1"}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"share":' + b"9" * 400 + b"}", ErrorCode.WRONG_TYPE),
        (b'{"number":1,"share":1e400}', ErrorCode.MALFORMED),
        (b'{"number":1,"text":1}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"text":"\\ud800"}', ErrorCode.MALFORMED),
        (b'{"number":1,"kind":"LEASE"}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"kind":5}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"items":[1,2,3,4,5]}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"items":{"0":1}}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"items":"1"}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"options":{"a":null}}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"options":{"a":[]}}', ErrorCode.WRONG_TYPE),
        (b'{"number":1,"number":1}', ErrorCode.MALFORMED),
        (b'{"number":1}{', ErrorCode.MALFORMED),
    ],
)
def test_a_payload_outside_its_schema_is_refused(payload: bytes, code: ErrorCode, raises: Raises) -> None:
    raises(code, parse_json, payload, Message)


def test_a_payload_keeps_its_types() -> None:
    message = parse_json(b'{"number":1,"share":2,"options":{"a":true,"b":1,"c":1.0,"d":"1"},"items":[1]}', Message)
    assert (message.share, message.items) == (2.0, (1,))
    assert [type(value) for value in message.options.values()] == [bool, int, float, str]


def test_a_fault_is_named_with_its_place_and_stays_printable(raises: Raises) -> None:
    assert raises(ErrorCode.WRONG_TYPE, parse_json, b'{"number":"x"}', Message).detail.startswith("Message.number: ")
    error = raises(ErrorCode.UNKNOWN_FIELD, parse_json, b'{"number":1,"\\u001b[2J":1}', Message)
    assert error.detail.isprintable()


# Properties


VALID = seal(Message(number=3, text="héllo", options={"a": 1}), LEASE, KEY).to_bytes()


def outcome(data: bytes) -> Message | None:
    """Return what a receiver makes of some bytes: the message, or None for a RemoteError. Any other error is a bug."""
    try:
        return parse_json(open_envelope(data).verify(LEASE, trusted=[KEY.key_id]), Message)
    except RemoteError:
        return None


@given(st.integers(0, len(VALID) - 1), st.integers(0, 255))
def test_a_changed_byte_changes_nothing_or_is_refused(place: int, value: int) -> None:
    mutated = VALID[:place] + bytes([value]) + VALID[place + 1 :]
    assert outcome(mutated) in (None, outcome(VALID))


@given(st.integers(0, len(VALID)), st.integers(0, len(VALID)), st.binary(max_size=8))
def test_a_cut_or_spliced_envelope_is_refused_or_the_same(start: int, end: int, middle: bytes) -> None:
    assert outcome(VALID[: min(start, end)] + middle + VALID[max(start, end) :]) in (None, outcome(VALID))


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:\\u0ab1eE.-dtrfnlsN', max_size=200).map(str.encode))
def test_any_bytes_are_json_or_a_peer_error(data: bytes) -> None:
    try:
        value = load_json(data)
    except RemoteError:
        return
    assert load_json(json.dumps(value).encode()) == value


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.text(), st.lists, max_leaves=10))
def test_what_python_writes_is_read_back(value: object) -> None:
    for ascii_only in (True, False):
        try:
            data = json.dumps(value, ensure_ascii=ascii_only).encode()
        except UnicodeEncodeError:  # a lone surrogate cannot be written as UTF-8
            continue
        assert load_json(data) == value


@given(st.binary(max_size=64))
def test_base64_survives(payload: bytes) -> None:
    envelope = seal(payload, LEASE, KEY)
    assert open_envelope(envelope.to_bytes()).payload == payload
    assert base64.b64encode(payload).decode() in envelope.to_bytes().decode()
