"""Backups of a key, encrypted with a passphrase: scrypt (RFC 7914), then ChaCha20-Poly1305 (RFC 8439), by `cryptography`.

A backup is one JSON object. It names its key id, which is authenticated with the ciphertext, and scrypt's cost.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_protocol.errors import LocalError
from prime_protocol.identity import KeyId, SigningKey

LOG_COST = 17
"""Binary logarithm of scrypt's cost: 128 MiB and a third of a second for each guess at a passphrase."""
LOG_COST_MAX = 20
BLOCK_SIZE = 8
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class KeyBackup(BaseModel):
    """Content of a backup."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["prime-node key backup 1"] = "prime-node key backup 1"
    key_id: KeyId
    log_cost: int = Field(ge=14, le=LOG_COST_MAX)
    salt: Hex32
    nonce: str = Field(pattern=r"^[0-9a-f]{24}$")
    sealed: str = Field(pattern=r"^[0-9a-f]{96}$")
    """Ciphertext of the 32 private bytes, and its tag."""


def encrypt_key(key: SigningKey, passphrase: str) -> bytes:
    """Return the backup of a key, as JSON."""
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    sealed = _cipher(passphrase, salt, LOG_COST).encrypt(nonce, key.to_bytes(), key.key_id.encode())
    backup = KeyBackup(key_id=key.key_id, log_cost=LOG_COST, salt=salt.hex(), nonce=nonce.hex(), sealed=sealed.hex())
    return f"{backup.model_dump_json(indent=1)}\n".encode()


def decrypt_key(data: bytes, passphrase: str) -> SigningKey:
    """Return the key of a backup. Raises LocalError for another file, and for a wrong passphrase."""
    try:
        backup = KeyBackup.model_validate_json(data)
    except ValidationError:
        raise LocalError("this file is no key backup of prime-node, or it is damaged") from None
    try:
        cipher = _cipher(passphrase, bytes.fromhex(backup.salt), backup.log_cost)
        seed = cipher.decrypt(bytes.fromhex(backup.nonce), bytes.fromhex(backup.sealed), backup.key_id.encode())
    except MemoryError as error:
        raise LocalError(str(error)) from None
    except InvalidTag:
        raise LocalError("the passphrase is wrong, or the backup was changed") from None
    key = SigningKey(seed)
    if key.key_id != backup.key_id:
        raise LocalError("the backup names another key than it holds")
    return key


def _cipher(passphrase: str, salt: bytes, log_cost: int) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(Scrypt(salt=salt, length=32, n=2**log_cost, r=BLOCK_SIZE, p=1).derive(passphrase.encode()))
