"""Files under names from outside, and in folders that somebody else may have filled.

A name from outside becomes a file by `write_inside` and `read_inside` alone. They do not trust that it has been checked
(prime_protocol/names.py): it must be one component of a path, the folder is opened first and is no symbolic link, the file is
opened relative to it and is no symbolic link either. `open_regular` does the last for files whose names are our own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from prime_protocol.errors import ErrorCode, LocalError, PeerError
from prime_protocol.names import file_name
from prime_protocol.visible import printable

LINKS_ALLOWED_IN = frozenset({"wandb"})
"""Folders of services that make links themselves. Nothing of ours is read or written there."""
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""What opening says of a link, a folder, and a pipe or socket at which nobody listens."""


class NotRegular(OSError):
    """There is something of that name, and it is no file: a link, a folder, a pipe, a device."""


def place(folder: Path, name: str) -> Path:
    """`folder / name`, for a name that is made with something from outside; `/` parts folders. Raises PeerError for the name."""
    return folder.joinpath(*map(file_name, name.split("/")))


def write_inside(folder: Path, name: str, data: bytes) -> None:
    """Create or replace, durably, the file of a name from outside. Raises PeerError for the name, OSError for the disk.

    A link of that name is replaced and not followed.
    """
    with _opened(folder, name) as (directory, name):
        partial = f"{name[:100]}.{secrets.token_hex(4)}.partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial, dir_fd=directory)
            raise
        os.fsync(directory)


def read_inside(folder: Path, name: str, *, bytes_max: int) -> bytes | None:
    """The file of a name from outside; None where there is none, or one of another kind or above `bytes_max`.

    Raises PeerError for the name, OSError for the disk.
    """
    try:
        with _opened(folder, name) as (directory, name):
            descriptor = open_regular(Path(name), os.O_RDONLY, directory=directory)
    except (FileNotFoundError, NotRegular):
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(bytes_max + 1)
    return data if len(data) <= bytes_max else None


def open_regular(path: Path, flags: int, *, directory: int | None = None, mode: int = 0o644) -> int:
    """A descriptor of a regular file; what else bears the name is neither followed nor waited for.

    Raises NotRegular, and OSError as os.open does. With O_CREAT the file is made where it is missing.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=directory)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotRegular(error.errno, "is a link, or no file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "is no file", str(path))
    return descriptor


def read_regular(path: Path) -> bytes:
    """All of a regular file. Raises NotRegular and OSError."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


def refuse_links(folder: Path) -> None:
    """Raises LocalError where a symbolic link, a pipe, a socket or a device lies anywhere below `folder`.

    A role calls it before it touches its state: a folder that somebody else has packed may lead every later read, write and
    deletion elsewhere. `folder` itself may be a link, for its owner has named it.
    """
    found = [folder]
    while found:
        try:
            entries = list(os.scandir(found.pop()))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found += [Path(entry.path)] if entry.name not in LINKS_ALLOWED_IN else []
            elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                raise LocalError(
                    f"{printable(entry.path)} is a symbolic link or no file, and could lead out of {folder}; remove it. To keep "
                    "state on another disk, mount that here or name it with --folder"
                )


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder, and the name: one component of a path, by two checks that know nothing of each other."""
    name = file_name(name)
    if name in ("", os.curdir, os.pardir) or Path(name).name != name or "\0" in name:
        raise PeerError(ErrorCode.MALFORMED, f"{name[:80]!r} is no name of a file")
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield directory, name
    finally:
        os.close(directory)
