"""Key files: one line, mode 0600. Every role's private key has this format.

    64 hexadecimal digits of the key, a space, 8 of its check (`check_of`)

A changed digit would be another identity without an error, so the check is compared. Files of earlier releases lack it. Next to a
key that `load_or_create` has returned is its id, as NAME.id: a key that is missing later is not replaced by another one.

Invariant: the file appears complete or not at all, and is never overwritten, because a lost key is a lost identity with
all the credit that it has earned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from prime_node.files import disk_fault, replace, sync
from prime_node.inside import NotRegular, open_regular, read_regular
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey

CHECK_DIGITS = 8

log = logging.getLogger(__name__)


def load_key(path: Path) -> SigningKey:
    """Return the key in `path`. Raises LocalError if it is missing, not safe or not a key."""
    try:
        return _load(path)
    except FileNotFoundError:
        raise LocalError(f"key {path}: no such file") from None


def create_key(path: Path) -> SigningKey:
    """Create a new key in a new file. Raises LocalError if the file exists or cannot be written."""
    if path.exists():
        raise LocalError(f"key {path}: exists already and is not overwritten; choose another path")
    return load_or_create(path)


def load_or_create(path: Path) -> SigningKey:
    """Return the key in `path`, creating it on first use. Raises LocalError if the file is not safe, not a key or lost."""
    name = id_file(path)
    was_used = name.exists()  # before the key is read: another process may create both
    try:
        key = _load(path)
    except FileNotFoundError:
        if was_used:
            raise LocalError(
                f"key {path}: is missing, and {name} names the key that was there. Put back your copy of it; or remove {name} "
                "too, to begin with a new identity, which does not inherit the old one's credit"
            ) from None
        try:
            _create(path, SigningKey(secrets.token_bytes(32)))
            key = _load(path)
        except OSError as error:
            raise _fault(error, f"key {path}") from None
        log.info(
            "created identity %s in %s; keep a backup (`prime-node identity backup`), a lost key cannot be restored",
            key.key_id,
            path,
        )
    line = f"{key.key_id}\n".encode()
    with contextlib.suppress(OSError):  # of a folder that may only be read
        if not was_used or read_regular(name) != line:
            replace(name, line)
    return key


def id_file(path: Path) -> Path:
    """Return the file with the id of the key in `path`: for example identity.id."""
    return path.with_suffix(".id")


def keep_secret(path: Path, secret: bytes) -> bytes:
    """Return the 32 bytes stored in `path`; on first use store `secret`.

    Raises LocalError if the file is not safe or cannot be written.
    """
    kept = read_secret(path)
    if kept is not None:
        return kept
    try:
        _create(path, SigningKey(secret))
        return _load(path).to_bytes()
    except OSError as error:
        raise _fault(error, f"secret {path}") from None


def read_secret(path: Path) -> bytes | None:
    """Return the secret stored by `keep_secret`, None if there is none. Raises LocalError if the file is not safe."""
    try:
        return _load(path).to_bytes()
    except FileNotFoundError:
        return None


def _load(path: Path) -> SigningKey:
    """Return the key in `path`. Raises FileNotFoundError, or LocalError."""
    try:
        with os.fdopen(open_regular(path.resolve(), os.O_RDONLY), "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(1_024)
    except FileNotFoundError:
        raise
    except NotRegular:
        raise LocalError(f"key {path}: not a regular file") from None
    except OSError as error:
        raise _fault(error, f"key {path}") from None
    if status.st_uid != os.geteuid():
        raise LocalError(f"key {path}: belongs to another user; copy it to a file of your own")
    if status.st_mode & 0o077:
        raise LocalError(f"key {path}: other users can read it; if none of them has, run: chmod 600 {path}")
    try:
        return _key_in(data.decode("ascii"))
    except ValueError:
        raise LocalError(
            f"key {path}: not a key, or damaged. Put back your copy of it; or move it and {id_file(path).name} away, to begin "
            "with a new identity, which does not inherit the old one's credit"
        ) from None


def _fault(error: OSError, what: str) -> LocalError:
    """Return the error of a key file, whatever the name of the file that was opened for it."""
    error.filename = error.filename2 = None
    return disk_fault(error, what)


def check_of(key: SigningKey) -> str:
    """Return the digits by which a key file is found damaged."""
    return digest_of(key.to_bytes())[:CHECK_DIGITS]


def _key_in(line: str) -> SigningKey:
    """Return the key in a file's line. Raises ValueError."""
    digits, *check = line.split()
    key = SigningKey(bytes.fromhex(digits))
    if check and check != [check_of(key)]:
        raise ValueError("the key and its check differ")
    return key


def _create(path: Path, key: SigningKey) -> None:
    """Write a new key file. If another process was faster, its file stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{key.to_bytes().hex()} {check_of(key)}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)  # unlike a rename, never replaces
    finally:
        partial.unlink()
    sync(path.parent)
