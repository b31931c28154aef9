from __future__ import annotations

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId, PublicKey, SigningKey

Raises = Callable[..., RemoteError]
P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]

# The peer-id specification's Ed25519 key pair: protobuf {Type: Ed25519, Data: seed and public key}.
SPEC_PRIVATE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PUBLIC = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")


def add(a: Point, b: Point) -> Point:
    """Add points on the twisted Edwards curve, written out as in RFC 8032."""
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2 % P
    x = (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P
    return x, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P


def times(scalar: int, point: Point) -> Point:
    result: Point = (0, 1)
    for bit in f"{scalar:b}":
        result = add(result, result)
        result = add(result, point) if bit == "1" else result
    return result


def some_point(y: int) -> Point | None:
    """Return a point with this y, by the square root of x squared."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    root = pow(square, (P + 3) // 8, P)
    for x in (root, root * pow(2, (P - 1) // 4, P) % P):
        if x * x % P == square:
            return x, y
    return None


def low_order_points() -> set[Point]:
    """Return all eight: the multiples of any point of order 8. L times a point is of order 8 half of the time."""
    for y in range(2, 100):
        point = some_point(y)
        torsion = times(L, point) if point else (0, 1)
        multiples = {times(i, torsion) for i in range(8)}
        if len(multiples) == 8:
            return multiples
    raise AssertionError


def encodings(point: Point) -> set[bytes]:
    """Return all 32-byte strings that some decoder accepts for the point: y or y + p, and either sign if x is 0."""
    x, y = point
    signs = (0, 1) if x == 0 else (x & 1,)
    return {(value | sign << 255).to_bytes(32, "little") for value in (y, y + P) for sign in signs if value < 2**255}


def test_the_peer_id_specification_s_key_pair_is_ours() -> None:
    key = SigningKey(SPEC_PRIVATE[4:36])
    assert key.public.raw == SPEC_PUBLIC[4:] == SPEC_PRIVATE[36:]
    assert key.key_id == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
    assert PublicKey.from_key_id(key.key_id) == key.public


def test_the_peer_id_specification_s_example_is_read_and_written_back() -> None:
    example = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
    assert PublicKey.from_key_id(example).key_id == example


def test_rfc_8032_signs_alike() -> None:
    """RFC 8032, section 7.1, test 2."""
    key = SigningKey(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
    assert key.public.raw.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_a_key_id_has_one_spelling(raises: Raises) -> None:
    key_id = SigningKey(b"\7" * 32).key_id
    for other in (
        "1" + key_id,
        key_id[1:],
        key_id + " ",
        key_id[:-1],
        key_id[:-1] + "0",
        key_id[:-1] + "é",
        key_id.lower(),
        "z" + key_id,
        "",
        "1" * 52,
        "z" * 52,
        "1" * 4_000_000,
    ):
        raises(ErrorCode.BAD_KEY, PublicKey.from_key_id, other)


def test_every_point_of_low_order_is_refused_in_every_encoding(raises: Raises) -> None:
    points = low_order_points()
    assert {point for point in points if times(4, point) != (0, 1)} != set()
    weak = set().union(*(encodings(point) for point in points))
    assert len(weak) == 14  # eight canonical ones, and six more that lenient decoders take
    for raw in weak:
        raises(ErrorCode.BAD_KEY, PublicKey, raw)


def test_the_library_alone_would_verify_anything_under_the_identity() -> None:
    """Why low-order keys are refused: S = 0 and R = the key make a signature of every message."""
    identity = (1).to_bytes(32, "little")
    Ed25519PublicKey.from_public_bytes(identity).verify(identity + bytes(32), b"anything at all")


def test_what_is_no_canonical_point_is_refused(raises: Raises) -> None:
    on_curve = [y for y in range(2, 40) if some_point(y)]
    for y in range(2, 40):
        raw = y.to_bytes(32, "little")
        if y in on_curve:
            PublicKey(raw)
        else:
            raises(ErrorCode.BAD_KEY, PublicKey, raw)
    for y in range(2, 19):  # y + p fits into 255 bits: a second spelling of the same point
        raises(ErrorCode.BAD_KEY, PublicKey, (y + P).to_bytes(32, "little"))
    for length in (0, 31, 33, 64):
        raises(ErrorCode.BAD_KEY, PublicKey, b"\2" * length)


def test_a_signature_whose_scalar_was_raised_by_the_group_order_is_refused(raises: Raises) -> None:
    """Otherwise anyone could make a second valid signature out of a first."""
    key = SigningKey(b"\7" * 32)
    signature = key.sign(b"message")
    scalar = int.from_bytes(signature[32:], "little")
    raised = signature[:32] + (scalar + L).to_bytes(32, "little")
    key.public.verify(signature, b"message")
    raises(ErrorCode.BAD_SIGNATURE, key.public.verify, raised, b"message")


def test_keys_are_equal_when_their_bytes_are() -> None:
    a, b = SigningKey(b"\1" * 32), SigningKey(b"\2" * 32)
    assert PublicKey(a.public.raw) == a.public != b.public
    assert len({a.public, PublicKey(a.public.raw), b.public}) == 2


def test_a_private_key_does_not_show_itself() -> None:
    key = SigningKey(b"\x41" * 32)
    assert key.to_bytes() == b"\x41" * 32
    assert repr(key) == f"SigningKey({key.key_id})"
    with pytest.raises(ValueError, match="32 bytes"):
        SigningKey(b"short")


def test_a_message_cannot_carry_an_unusable_key() -> None:
    adapter = TypeAdapter(KeyId)
    key_id = SigningKey(b"\7" * 32).key_id
    assert adapter.validate_json(f'"{key_id}"') == key_id
    for bad in ("", "x", key_id[:-1], "12D3KooW" + "z" * 44):
        with pytest.raises(ValidationError):
            adapter.validate_python(bad)


@given(st.binary(min_size=32, max_size=32))
def test_any_seed_makes_a_key_that_reads_back_and_signs(seed: bytes) -> None:
    key = SigningKey(seed)
    assert key.key_id.startswith("12D3KooW")
    assert len(key.key_id) == 52
    public = PublicKey.from_key_id(key.key_id)
    public.verify(key.sign(seed), seed)
    with pytest.raises(RemoteError):
        public.verify(key.sign(seed), seed + b"x")


@given(st.binary(min_size=32, max_size=32) | st.text(max_size=60))
def test_any_bytes_and_any_text_are_a_key_or_a_bad_key(data: bytes | str) -> None:
    code = None
    try:
        key = PublicKey(data) if isinstance(data, bytes) else PublicKey.from_key_id(data)
    except RemoteError as error:
        code = error.code
    assert code is ErrorCode.BAD_KEY or PublicKey.from_key_id(key.key_id).raw == key.raw
