"""Landlock (docs.kernel.org/userspace-api/landlock.html): files, TCP ports, signals and abstract sockets, without privileges.

A domain binds the calling thread and all that it starts from then on, and cannot be lifted. Each ABI version adds rights: 1
files (Linux 5.13), 2 moves between folders (5.19), 3 truncation (6.2), 4 TCP ports (6.7), 5 ioctl on devices (6.10), 6 signals
and abstract sockets (6.12), 7 audit flags (6.15), 8 all threads at once (7.0), 9 Unix sockets by path (7.1).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from prime_node.adapters.sandbox.libc import checked, libc
from prime_node.adapters.sandbox.rules import DEVICE_COMMANDS, TRUNCATION, Restriction, SandboxRules

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on every architecture."""
_VERSION_FLAG = 1
_PATH_BENEATH, _NET_PORT = 1, 2

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, MAKE_DIR = 1 << 4, 1 << 5, 1 << 6, 1 << 7
MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK = 1 << 8, 1 << 9, 1 << 10, 1 << 11
MAKE_SYM, REFER, TRUNCATE, IOCTL_DEV, RESOLVE_UNIX = 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = {2: REFER, 3: TRUNCATE, 5: IOCTL_DEV, 9: RESOLVE_UNIX}
"""ABI version -> right over files that it added."""
_LATER_WALLS = ((TRUNCATION, 3, "6.2"), (DEVICE_COMMANDS, 5, "6.10"))
"""Accesses to files that an older ABI leaves open: name, ABI version, Linux version."""
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV | RESOLVE_UNIX
"""Rights that may be granted on anything but a folder."""

READ = EXECUTE | READ_FILE | READ_DIR
WRITE = (WRITE_FILE | READ_FILE | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO) | (
    MAKE_SYM | REFER | TRUNCATE | RESOLVE_UNIX
)
DEVICE = WRITE_FILE | READ_FILE | READ_DIR | TRUNCATE | IOCTL_DEV

_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT, _SCOPE_SIGNAL = 1, 2
_LOG_SAME_EXEC_OFF, _LOG_SUBDOMAINS_OFF, _TSYNC = 1, 4, 8
ABI_NET, ABI_SCOPES, ABI_LOG, ABI_TSYNC, ABI_UNIX_PATHS = 4, 6, 7, 8, 9


class _Handled(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Port(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def abi() -> int:
    """Return this kernel's ABI version; 0 without Landlock."""
    if sys.platform != "linux":
        return 0
    return max(0, int(libc().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def restrict_access(rules: SandboxRules) -> list[Restriction]:
    """Bind this thread, and with ABI 8 all threads, to the rules.

    The caller has set no_new_privs. Returns what is enforced from now on. Raises OSError if the kernel has Landlock and
    refuses.
    """
    version = abi()
    if version < 1:
        missing = "this kernel does not enable Landlock, which Linux 5.13 and newer offer"
        return [Restriction(name, False, missing) for name in ("files", *_asked(rules), "Unix sockets by path")]
    try:
        handled = _handled(rules, version)
        ruleset = checked("Landlock", libc().syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.E2BIG) or version < ABI_UNIX_PATHS:
            raise
        version = ABI_TSYNC  # a newer kernel than this file, with other numbers for later rights
        handled = _handled(rules, version)
        ruleset = checked("Landlock", libc().syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0))
    try:
        for path, rights in _granted(rules):
            _allow_path(ruleset, path, rights & handled.fs)
        for right, ports in ((_BIND_TCP, rules.bind_ports), (_CONNECT_TCP, rules.connect_ports)):
            for port in ports or ():
                _allow_port(ruleset, port, right & handled.net)
        checked("Landlock", libc().syscall(_RESTRICT_SELF, ruleset, _flags(rules, version)))
    finally:
        os.close(ruleset)
    return enforced_restrictions(rules, version)


def around(paths: Iterable[Path], hidden: Iterable[Path]) -> list[Path]:
    """Return the paths without hidden ones below them: a folder that contains one is replaced by the rest of its content."""
    kept_out, found = list(hidden), []
    for path in paths:
        real = path.resolve()
        if any(real == one or one in real.parents for one in kept_out):
            continue
        if any(real in one.parents for one in kept_out):
            try:
                inside = sorted(path.iterdir())
            except OSError:  # a user cannot grant what it may not list
                continue
            found += around(inside, kept_out)
        else:
            found.append(path)
    return found


def readable(rules: SandboxRules) -> list[Path]:
    """Return the readable paths. A named path below a hidden one stays; a folder above a hidden one is opened around it."""
    hidden = [path.resolve() for path in rules.hidden]
    named = [path for path in rules.read if any(one in path.resolve().parents for one in hidden)]
    return [*around([path for path in rules.read if path not in named], hidden), *named]


def _granted(rules: SandboxRules) -> list[tuple[Path, int]]:
    return [
        *((path.resolve(), READ) for path in readable(rules)),
        *((path.resolve(), WRITE) for path in rules.write),
        *((path.resolve(), DEVICE) for path in rules.devices),
    ]


def _handled(rules: SandboxRules, version: int) -> _Handled:
    rights = _FIRST_RIGHTS
    for since, right in _LATER_RIGHTS.items():
        if version >= since:
            rights |= right
    net = scoped = 0
    if version >= ABI_NET:
        net = (0 if rules.bind_ports is None else _BIND_TCP) | (0 if rules.connect_ports is None else _CONNECT_TCP)
    if version >= ABI_SCOPES:
        scoped = (0 if rules.abstract_sockets_outside else _SCOPE_ABSTRACT) | (
            0 if rules.signals_outside else _SCOPE_SIGNAL
        )
    return _Handled(rights, net, scoped)


def _flags(rules: SandboxRules, version: int) -> int:
    quiet = 0 if rules.log_denials or version < ABI_LOG else _LOG_SAME_EXEC_OFF | _LOG_SUBDOMAINS_OFF
    return quiet | (_TSYNC if version >= ABI_TSYNC else 0)


def _asked(rules: SandboxRules) -> list[str]:
    """Return names of the requested restrictions besides files, in the order of `enforced_restrictions`."""
    names = ["TCP ports"] if rules.bind_ports is not None or rules.connect_ports is not None else []
    names += [] if rules.signals_outside else ["signals"]
    return names if rules.abstract_sockets_outside else [*names, "abstract sockets"]


def enforced_restrictions(rules: SandboxRules, version: int) -> list[Restriction]:
    """Return what a kernel with that ABI enforces of the rules."""
    # Nothing is missing before ABI 2: such a kernel refuses every move between folders.
    found = [Restriction("files", True)]
    found += [
        Restriction(name, False, f"Linux {linux} and newer") for name, since, linux in _LATER_WALLS if version < since
    ]
    for name in _asked(rules):
        since, linux = (ABI_NET, "6.7") if name == "TCP ports" else (ABI_SCOPES, "6.12")
        found.append(Restriction(name, version >= since, "" if version >= since else f"Linux {linux} and newer"))
    by_path = version >= ABI_UNIX_PATHS
    return [*found, Restriction("Unix sockets by path", by_path, "" if by_path else "Landlock of Linux 7.1 and newer")]


def _allow_path(ruleset: int, path: Path, rights: int) -> None:
    """Grant rights on a path, ignoring one that does not exist or cannot be opened anyway."""
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _OF_FILES
        beneath = _Beneath(rights, parent)
        checked("Landlock", libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(beneath), 0))
    finally:
        os.close(parent)


def _allow_port(ruleset: int, port: int, right: int) -> None:
    if right:
        rule = _Port(right, port)
        checked("Landlock", libc().syscall(_ADD_RULE, ruleset, _NET_PORT, ctypes.byref(rule), 0))
