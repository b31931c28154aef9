"""Takes away what an environment's code has no business with: every file but those that it is given. Linux 5.13 and newer.

Landlock (docs.kernel.org/userspace-api/landlock.html) needs no privileges and cannot be undone: from then on the process and its
children open only what lies below the paths granted here, and may not look into the memory of processes outside. Where the kernel
has none, nothing is taken away, and the caller is told.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38
_READ = 0b1101  # execute, read file, read directory
_FILE_RIGHTS = (
    0b0000_0111 | 1 << 14 | 1 << 15
)  # those that may be granted on a single file: truncate and ioctl among them
_HANDLED = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Landlock ABI -> number of rights over files that it knows, in the order of the header file."""
SYSTEM = ("/bin", "/dev", "/lib", "/lib32", "/lib64", "/opt", "/sbin", "/sys", "/usr")
"""What any program may read."""
OF_ETC = [
    "ca-certificates",
    "fonts",
    "group",
    "gai.conf",
    "host.conf",
    "hosts",
    "ld.so.cache",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "passwd",
    "pki",
    "protocols",
    "resolv.conf",
    "services",
    "ssl/certs",
    "ssl/cert.pem",
    "ssl/openssl.cnf",
    "timezone",
]
"""Of /etc, where operators keep secrets too: what names, networks and certificates need."""
OF_PROC = ("cpuinfo", "meminfo", "stat", "sys", "self")
"""Of /proc; the folders of other processes hold their environment variables."""


class _Rules(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def confine(readable: Iterable[Path], writable: Iterable[Path], *, hidden: Iterable[Path] = ()) -> bool:
    """Leave this process these paths, what Python and the system need, and nothing else. False where the system cannot.

    `hidden`: never, even where they lie below a path that is granted; what is granted below them by its own name stays granted.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False
    handled = (1 << _HANDLED[min(abi, max(_HANDLED))]) - 1
    rules = _Rules(handled)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    kept_out = [path.resolve() for path in hidden]
    named = [part for path in readable for part in _granted(path.resolve(), kept_out)]
    try:
        for path in [*around(python_paths(), kept_out), *named]:
            _grant(libc, ruleset, path, _READ & handled)
        for path in [*writable, Path("/dev/null")]:
            _grant(libc, ruleset, path, handled)
        if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_RESTRICT_SELF, ruleset, 0):
            return False
    finally:
        os.close(ruleset)
    return True


def python_paths() -> list[Path]:
    """Of the system, of the interpreter, and of everything that it imports from."""
    system = [
        *map(Path, SYSTEM),
        *(Path("/etc") / name for name in OF_ETC),
        *(Path("/proc") / name for name in OF_PROC),
    ]
    found = [*system, Path(sys.prefix), Path(sys.base_prefix), *(Path(entry) for entry in sys.path if entry)]
    return list(dict.fromkeys(path.resolve() for path in found if path.exists()))


def around(paths: Iterable[Path], hidden: Iterable[Path]) -> list[Path]:
    """The same paths without what is hidden below them: instead of a folder that holds it, everything else in that folder."""
    kept_out, found = list(hidden), []
    for path in paths:
        if any(path == one or one in path.parents for one in kept_out):
            continue
        if any(path in one.parents for one in kept_out):
            found += around(sorted(path.iterdir()), kept_out)
        else:
            found.append(path)
    return found


def _granted(path: Path, hidden: Iterable[Path]) -> list[Path]:
    """A path that the host has named, which may itself lie in a hidden folder, without what is hidden below it."""
    return around([path], [one for one in hidden if path in one.parents])


def _grant(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    """What does not exist, or may not be opened anyway, is left out."""
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not path.is_dir():
            rights &= _FILE_RIGHTS
        beneath = _Beneath(rights, parent)
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(beneath), 0)
    finally:
        os.close(parent)
