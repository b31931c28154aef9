"""Ed25519 identities, named by their libp2p peer ids on HTTP, in files and between peers.

Peer id = base58btc(multihash identity of the protobuf {Type: Ed25519, Data: 32 bytes}), as the libp2p peer-id
specification defines. The id contains the public key, so verifying a signature needs no key lookup.

Keys of low order are rejected: under such a key a signature can verify for any message (Chalkias et al., "Taming the
many EdDSAs", 2020; CCTV's ed25519vectors).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AfterValidator

from prime_protocol.errors import ErrorCode, RemoteError

_PEER_ID_PREFIX = bytes.fromhex("002408011220")  # multihash: identity, 36 bytes; protobuf: type 1, 32 bytes follow
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUE = {char: value for value, char in enumerate(_BASE58)}
_P = 2**255 - 19
_D = (-121665 * pow(121666, -1, _P)) % _P


class PublicKey:
    """Public key that has passed the checks. Hashable; equal if the bytes are equal."""

    __slots__ = ("_key", "key_id", "raw")

    def __init__(self, raw: bytes) -> None:
        if len(raw) != 32:
            raise RemoteError(ErrorCode.BAD_KEY, f"an Ed25519 public key has 32 bytes, got {len(raw)}")
        if _is_weak(raw):
            raise RemoteError(ErrorCode.BAD_KEY, "public key is not a canonical curve point, or has low order")
        self.raw = raw
        self.key_id = _encode_base58(_PEER_ID_PREFIX + raw)
        self._key = Ed25519PublicKey.from_public_bytes(raw)

    @staticmethod
    def from_key_id(key_id: str) -> PublicKey:
        """Read the key from a peer id. Raises RemoteError(BAD_KEY). Keys are cached, because checking one takes a millisecond."""
        return _key_from_id(key_id)

    def verify(self, signature: bytes, message: bytes) -> None:
        """Raise RemoteError(BAD_SIGNATURE) unless `signature` is this key's signature over exactly `message`."""
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            raise RemoteError(ErrorCode.BAD_SIGNATURE, f"signature does not verify under {self.key_id}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"PublicKey({self.key_id})"


class SigningKey:
    """Private key. Only `to_bytes` exports its bytes, for the key file (mode 0600)."""

    __slots__ = ("_key", "public")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:
            raise ValueError(f"an Ed25519 private key has 32 bytes, got {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = PublicKey(
            self._key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        )

    @property
    def key_id(self) -> str:
        """Peer id of the public key."""
        return self.public.key_id

    def sign(self, message: bytes) -> bytes:
        """Return the signature over `message`, 64 bytes."""
        return self._key.sign(message)

    def to_bytes(self) -> bytes:
        """Return the 32 private bytes, for the key file only."""
        return self._key.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )

    def __repr__(self) -> str:
        return f"SigningKey({self.key_id})"


@lru_cache(maxsize=16_384)
def _key_from_id(key_id: str) -> PublicKey:
    if not 40 <= len(key_id) <= 60:
        raise RemoteError(ErrorCode.BAD_KEY, "key id is not a libp2p peer id of an Ed25519 key")
    data = _decode_base58(key_id)
    if len(data) != 38 or not data.startswith(_PEER_ID_PREFIX):
        raise RemoteError(ErrorCode.BAD_KEY, "key id is not a libp2p peer id of an Ed25519 key")
    return PublicKey(data[len(_PEER_ID_PREFIX) :])


def _valid_key_id(value: str) -> str:
    try:
        PublicKey.from_key_id(value)
    except RemoteError as error:
        raise ValueError(error.detail) from None
    return value


KeyId = Annotated[str, AfterValidator(_valid_key_id)]
"""Pydantic type: the peer id of a usable key."""


def _encode_base58(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, remainder = divmod(number, 58)
        digits.append(_BASE58[remainder])
    leading_zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * leading_zeros + "".join(reversed(digits))


def _decode_base58(text: str) -> bytes:
    number = 0
    for char in text:
        if char not in _BASE58_VALUE:
            raise RemoteError(ErrorCode.BAD_KEY, "key id is not base58")
        number = number * 58 + _BASE58_VALUE[char]
    leading_zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * leading_zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def _is_weak(raw: bytes) -> bool:
    """Return True for encodings that are no curve point, not canonical, or a point of order 1, 2, 4 or 8."""
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    x_is_odd = raw[31] >> 7
    if y >= _P:
        return True
    u, v = (y * y - 1) % _P, (_D * y * y + 1) % _P
    x = (u * pow(v, 3, _P) * pow(u * pow(v, 7, _P), (_P - 5) // 8, _P)) % _P
    if (v * x * x - u) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
        if (v * x * x - u) % _P:
            return True
    if x == 0 and x_is_odd:
        return True
    for _ in range(3):  # eight times a point of low order is the identity (0, 1)
        x, y = _double(x, y)
    return x == 0 and y == 1


def _double(x: int, y: int) -> tuple[int, int]:
    """Double an affine point of the twisted Edwards curve -x^2 + y^2 = 1 + d x^2 y^2."""
    xx, yy, xy = x * x % _P, y * y % _P, x * y % _P
    dxy = _D * xx * yy % _P
    return 2 * xy * pow(1 + dxy, -1, _P) % _P, (yy + xx) * pow(1 - dxy, -1, _P) % _P
