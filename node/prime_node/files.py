"""Durable files: written under another name, synced, renamed, then the folder synced.

After `write_durably` has returned, the file is complete, even after kill -9 or a power cut; before, the old one is.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from prime_node.inside import naming, open_regular, read_regular
from prime_protocol.digest import digest_of_all
from prime_protocol.errors import LocalError, TransientFault

log = logging.getLogger(__name__)

DISK_FAULTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n, LimitNOFILE)",
    errno.ENFILE: "raise the system's limit on open files (fs.file-max)",
    errno.EROFS: "choose another folder",
    errno.ENOTDIR: "choose another folder",
    errno.EEXIST: "choose another folder",
    errno.EISDIR: "move the folder of this name away",
    errno.ENOTEMPTY: "move the folder of this name away",
    errno.ELOOP: "move the link of this name away",
    errno.EIO: "check the disk or the storage service",
    errno.EACCES: "choose another folder, or change who may use this one",
    errno.ENOENT: "put back a copy of it",
}
"""Errors of the disk and of descriptors, with the advice for each."""
PASSING_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
"""Those that may pass without the operator: another program filled the disk, or a crowd has left."""
DAMAGED = ".damaged"
"""Suffix of a file, or a folder, that could not be read."""
DAMAGED_MAX = 8
"""Number of these that a folder keeps, the newest ones."""
BLOCK_BYTES = 2**20
"""Bytes of a file that are read and hashed together."""


def disk_fault(error: OSError, place: object = "") -> LocalError:
    """Return the error of one line for a fault of the disk: the file, or else `place`, what happened, and what to do."""
    where = error.filename2 or error.filename or place  # a rename's second name is the file that was to be written
    kind = kind_of(error)
    advice = DISK_FAULTS.get(error.errno or 0, "check the disk")
    return kind(f"{where}{': ' if where else ''}{error.strerror or error}; {advice}, then start again")


def kind_of(error: Exception) -> type[LocalError]:
    """Return the type of the error for a fault of the disk: whether it may pass by itself."""
    return TransientFault if getattr(error, "errno", None) in PASSING_FAULTS else LocalError


@contextlib.contextmanager
def disk_faults(place: object = "") -> Iterator[None]:
    """Raise an OSError of the `with` block as `disk_fault` returns it."""
    try:
        yield
    except OSError as error:
        raise disk_fault(error, place) from None


def write_durably(path: Path, data: bytes, *, partial_folder: Path | None = None, mode: int = 0o666) -> None:
    """Create or replace a file, durably. Raises OSError.

    Unfinished files are in the same folder as `*.partial`, or in `partial_folder`. The umask limits `mode`.
    """
    folder = partial_folder or path.parent
    if partial_folder is not None:  # another program may have removed it
        partial_folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{path.name[:100]}.{secrets.token_hex(4)}.partial"
    try:
        with naming(path), open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Create or replace a file atomically but not durably, for content about the present only. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with naming(path), partial.open("xb") as file:  # never through an existing link
            file.write(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_or_begin(path: Path) -> bytes:
    """Return the content of a file that a role can do without; empty if there is none.

    One that cannot be read, for example a folder or a bad sector, is renamed to NAME.damaged with a warning, so that a new one
    can be written; of these the folder keeps the newest DAMAGED_MAX. Raises OSError if the process has no descriptors, or may
    not rename it.
    """
    try:
        return read_regular(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if error.errno in PASSING_FAULTS:
            raise
        if path.suffix == DAMAGED:
            return b""
        aside = path.with_name(f"{path.name}{DAMAGED}")
        log.warning("%s cannot be read (%s): it is kept as %s, and a new one begins", path, error.strerror, aside)
        _remove(aside)
        path.rename(aside)
        kept = sorted(path.parent.glob(f"*{DAMAGED}"), key=lambda one: (one == aside, one.lstat().st_ctime))
        for old in kept[:-DAMAGED_MAX]:
            _remove(old)
        return b""


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with what it holds; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def digest_of_file(path: Path) -> str:
    """Return the digest of a regular file, read in blocks that fit a core's cache: larger ones, hashed by all cores, take longer.

    It is not mapped: a bad sector would end the process by SIGBUS. Raises NotRegular and OSError.
    """
    with naming(path), os.fdopen(open_regular(path, os.O_RDONLY), "rb", buffering=0) as file:
        return digest_of_all(iter(lambda: file.read(BLOCK_BYTES), b""))


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
