"""A contributor's keys on this machine: the machine's own, its delegation by a person's key, and backups of both."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prime_node.files import write_durably
from prime_node.inside import read_regular
from prime_node.keyfile import keep_secret, load_key
from prime_protocol import limits
from prime_protocol.delegation import Delegation, open_delegation, read_delegation
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.identity import SigningKey

DAY_MS = 86_400_000
BACKUP_BYTES_MAX = 4_096


def now_ms() -> int:
    """Return the Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


def delegation_file(key_file: Path) -> Path:
    """Return the file of a machine's delegation: next to its key, for example identity.delegation."""
    return key_file.with_suffix(".delegation")


def delegation_text(person: SigningKey, machine: str, *, days: float, run: str | None) -> str:
    """Return a delegation as text. Raises LocalError."""
    issued_at_ms = now_ms()
    try:
        delegation = Delegation(
            person=person.key_id,
            machine=machine,
            run=run,
            issued_at_ms=issued_at_ms,
            expires_at_ms=issued_at_ms + round(days * DAY_MS),
        )
    except ValueError:
        longest = limits.DELEGATION_LIFETIME_S_MAX / 86_400
        raise LocalError(
            f"{machine[:60]!r} must be the key id of another machine, and --days at most {longest:g}"
        ) from None
    return seal(delegation, PayloadType.DELEGATION, person).to_base64()


def keep_delegation(key_file: Path, text: str) -> Delegation:
    """Store a delegation for the key in a file. Raises LocalError if it is for another key, has expired or is damaged."""
    key = load_key(key_file)
    try:
        found, _ = read_delegation(text.strip())
        delegation = open_delegation(text.strip(), key.key_id, found.run or "", now_ms=now_ms())
    except RemoteError as error:
        raise LocalError(f"this delegation cannot be used here: {error.detail}") from None
    write_durably(delegation_file(key_file), f"{text.strip()}\n".encode())
    return delegation


def stored_delegation(key_file: Path) -> tuple[Delegation, str] | None:
    """Return the delegation stored next to a key, and its text; None if there is none. Raises LocalError if it is damaged."""
    path = delegation_file(key_file)
    try:
        text = read_regular(path).decode("ascii").strip()
        return read_delegation(text)[0], text
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, RemoteError) as error:
        why = error.detail if isinstance(error, RemoteError) else error
        raise LocalError(f"{path}: {why}; delete it, or authorise this machine again") from None


def delegation_for(key_file: Path, key: SigningKey, run: str) -> str:
    """Return the delegation that a worker presents to a run; empty if it has none for it. Raises LocalError."""
    stored = stored_delegation(key_file)
    if stored is None or stored[0].run not in (None, run):
        return ""
    try:
        open_delegation(stored[1], key.key_id, run, now_ms=now_ms())
    except RemoteError as error:
        path = delegation_file(key_file)
        raise LocalError(
            f"{path}: {error.detail}. With the person's key: `prime-node identity authorise {key.key_id}`"
        ) from None
    return stored[1]


def write_backup(key_file: Path, backup: Path, passphrase: str) -> SigningKey:
    """Write an encrypted backup of a key to a new file, and read it back. Raises LocalError."""
    from prime_node.adapters.key_backup import encrypt_key

    key = load_key(key_file)
    if backup.exists():
        raise LocalError(f"{backup} exists already and is not overwritten; choose another file")
    before = os.umask(0o077)
    try:
        write_durably(backup, encrypt_key(key, passphrase))
    except OSError as error:
        raise LocalError(f"{backup}: cannot be written ({error.strerror})") from None
    finally:
        os.umask(before)
    if read_backup(backup, passphrase).key_id != key.key_id:
        raise LocalError(f"{backup}: does not hold the key that was written to it; try another disk")
    return key


def read_backup(backup: Path, passphrase: str) -> SigningKey:
    """Return the key of a backup. Raises LocalError."""
    from prime_node.adapters.key_backup import decrypt_key

    try:
        data = read_regular(backup, bytes_max=BACKUP_BYTES_MAX)
    except OSError as error:
        raise LocalError(f"{backup}: cannot be read as a key backup ({error.strerror})") from None
    try:
        return decrypt_key(data, passphrase)
    except LocalError as error:
        raise LocalError(f"{backup}: {error}") from None


def restore_key(backup: Path, key_file: Path, passphrase: str) -> SigningKey:
    """Write the key of a backup to a new key file. Raises LocalError, also if another key is there."""
    key = read_backup(backup, passphrase)
    if key_file.exists():
        if load_key(key_file).key_id == key.key_id:
            return key
        raise LocalError(f"key {key_file}: holds another key and is not overwritten; choose another path with --key")
    keep_secret(key_file, key.to_bytes())
    return key
