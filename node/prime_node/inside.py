"""Files whose names come from outside, and files in folders that others may have filled.

Only `write_inside` and `read_inside` turn a name from outside into a file. They do not trust the earlier check of the
name (prime_protocol/names.py). It must be one component of a path. The folder is opened first and must not be a
symbolic link; the file is opened relative to it and must not be one either. `open_regular` does the last step for files
with names of our own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.names import file_name
from prime_protocol.visible import printable

LINKS_ALLOWED_IN = frozenset({"wandb"})
"""Folders of services that create links themselves. Our code reads and writes nothing there."""
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of opening a link, a folder, or a pipe or socket without a listener."""


class NotRegular(OSError):
    """The name exists and is not a regular file: a link, a folder, a pipe, a device."""


def place(folder: Path, name: str) -> Path:
    """Return `folder / name`, for a name with parts from outside. Raises RemoteError for the name. `/` separates folders."""
    return folder.joinpath(*map(file_name, name.split("/")))


def write_inside(folder: Path, name: str, data: bytes) -> None:
    """Create or replace, durably, the file of a name from outside.

    A link of that name is replaced and not followed. Raises RemoteError for the name, OSError for the disk.
    """
    with _opened(folder, name) as (directory, name):
        partial = f"{name[:100]}.{secrets.token_hex(4)}.partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=directory)
        try:
            with naming(folder / name), os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial, dir_fd=directory)
            if isinstance(error, OSError):  # its names are relative to the folder
                error.filename, error.filename2 = str(folder / name), None
            raise
        os.fsync(directory)


def read_inside(folder: Path, name: str, *, bytes_max: int) -> bytes | None:
    """Return the content of the file of a name from outside.

    None if there is none, or one of another kind or above `bytes_max`. Raises RemoteError for the name, OSError for the
    disk.
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
    """Open a regular file and return its descriptor; follow no link and block on nothing else of that name.

    Raises NotRegular, and OSError as os.open does. With O_CREAT a missing file is created.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=directory)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotRegular(error.errno, "is a link, or not a file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "is not a file", str(path))
    return descriptor


def read_regular(path: Path, *, bytes_max: int | None = None) -> bytes:
    """Return the content of a regular file. Raises NotRegular and OSError, also for more than `bytes_max` bytes."""
    with naming(path), os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        data = file.read(-1 if bytes_max is None else bytes_max + 1)
    if bytes_max is not None and len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"has more than {bytes_max:,} bytes", str(path))
    return data


def linked_anywhere(folder: Path, name: str) -> Path:
    """Return where a file of a model's folder is, if its name is a link. Raises LocalError."""
    if name in ("", os.curdir, os.pardir) or Path(name).name != name or "\0" in name:
        raise LocalError(f"{folder}: {printable(name, 100)} is outside the folder")
    try:
        return (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # a circle of links
        raise LocalError(f"{folder / printable(name, 100)}: {printable(str(error), 200)}") from None


def linked_inside(folder: Path, name: str) -> Path:
    """Return the same, and raise LocalError for a link that leads elsewhere.

    A folder of the hub's cache, snapshots/REVISION, has links to ../../blobs.
    """
    home, real = folder.resolve(), linked_anywhere(folder, name)
    in_cache = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if real.parent != home and not in_cache:
        raise LocalError(
            f"{folder / printable(name, 100)} is a link out of the folder, perhaps to a file that must not be published: "
            "put a copy of the file there (`cp -rL` copies a folder without its links)"
        )
    return real


def refuse_links(folder: Path) -> None:
    """Refuse a folder with a symbolic link, a pipe, a socket or a device anywhere below it. Raises LocalError.

    A role calls it before it touches its state: a folder prepared by another person may redirect every later read,
    write and deletion. `folder` itself may be a link, since its owner has named it.
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
                    f"{printable(entry.path)} is a link or not a file, and could lead out of {folder}; remove it. To keep "
                    "state on another disk, mount that here or name it with --folder"
                )


@contextlib.contextmanager
def naming(path: object) -> Iterator[None]:
    """Give an OSError of the body the name of the file, which a failed write does not know."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[tuple[int, str]]:
    """Open the folder; yield its descriptor and the name.

    Two independent checks make sure that the name is one component of a path.
    """
    name = file_name(name)
    if name in ("", os.curdir, os.pardir) or Path(name).name != name or "\0" in name:
        raise RemoteError(ErrorCode.MALFORMED, f"{name[:80]!r} is not a valid file name")
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield directory, name
    finally:
        os.close(directory)
