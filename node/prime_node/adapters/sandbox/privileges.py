"""Irrevocable drop of privileges: those by exec, capabilities, and resources beyond a limit."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterable

from prime_node.adapters.sandbox.libc import checked, libc
from prime_node.adapters.sandbox.rules import ProcessLimits, Restriction

_SET_DUMPABLE, _CAPBSET_READ, _CAPBSET_DROP, _NO_NEW_PRIVS, _CAP_AMBIENT, _AMBIENT_CLEAR_ALL = 4, 23, 24, 38, 47, 4
_VERSION_3 = 0x20080522

CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID = 0, 1, 3, 5, 6, 7
NET_BIND_SERVICE, IPC_LOCK, SYS_NICE = 10, 14, 23
ORDINARY = (DAC_OVERRIDE, FOWNER, NET_BIND_SERVICE, IPC_LOCK, SYS_NICE)
"""Capabilities with which root in a container works like a user: its folders whatever their owner; a low port; pinned memory."""
GIVES_WORK_AWAY = (CHOWN, KILL, SETGID, SETUID)
"""Further capabilities that root needs to start processes as a user with fewer rights, and to end them."""


def no_new_privileges() -> None:
    """Prevent any exec from gaining privileges: set-user-ID programs run as this user. Raises OSError."""
    _prctl(_NO_NEW_PRIVS, 1)


def forbid_dumps() -> None:
    """Disable core files and ptrace, and make /proc/PID of this process root's. Raises OSError."""
    _prctl(_SET_DUMPABLE, 0)


def drop_capabilities(keep: Iterable[int]) -> Restriction:
    """Drop all other capabilities, also for executed programs. A process without any has nothing to drop."""
    wanted = sum(1 << number for number in set(keep))
    held = held_capabilities()[1]
    if held == 0:
        return Restriction("capabilities", True)
    try:
        _prctl(_CAP_AMBIENT, _AMBIENT_CLEAR_ALL)
        number = 0
        while libc().prctl(_CAPBSET_READ, number, 0, 0, 0) >= 0:
            if not wanted >> number & 1:
                _prctl(_CAPBSET_DROP, number)
            number += 1
    except OSError:
        pass  # without CAP_SETPCAP the bounding set stays; no_new_privs keeps exec from gaining any of it
    left = held & wanted
    low, high = left & 0xFFFFFFFF, left >> 32
    header = struct.pack("=Ii", _VERSION_3, 0)
    if libc().capset(header, struct.pack("=6I", low, low, 0, high, high, 0)) != 0:
        return Restriction("capabilities", False, f"the kernel keeps them ({os.strerror(ctypes.get_errno())})")
    return Restriction("capabilities", True)


def held_capabilities() -> tuple[int, int]:
    """Return (effective, permitted) of this thread."""
    header, data = struct.pack("=Ii", _VERSION_3, 0), ctypes.create_string_buffer(24)
    if libc().capget(header, data) != 0:
        return 0, 0
    found = struct.unpack("=6I", data.raw)
    return found[0] | found[3] << 32, found[1] | found[4] << 32


def apply_limits(limits: ProcessLimits) -> None:
    """Set soft and hard limits alike, and always forbid core files. Raises OSError."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_DATA: limits.data_bytes,
        resource.RLIMIT_AS: limits.address_bytes,
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CPU: limits.cpu_seconds,
    }
    for which, value in wanted.items():
        if value is not None:
            hard = resource.getrlimit(which)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (bound, bound))


def _prctl(option: int, value: int) -> None:
    checked(f"prctl {option}", libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0))
