"""System paths that any program may read, and those of an interpreter. No folder here holds a user's secrets."""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

PROGRAMS = ("/bin", "/lib", "/lib32", "/lib64", "/opt", "/sbin", "/usr", "/nix/store", "/run/current-system")
OF_ETC = (
    *("alternatives", "ca-certificates", "fonts", "group", "gai.conf", "host.conf", "hosts", "ld.so.cache"),
    *("ld.so.conf", "ld.so.conf.d", "localtime", "machine-id", "mime.types", "nsswitch.conf", "passwd", "pki"),
    *("protocols", "resolv.conf", "services", "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "timezone"),
)
"""Files of /etc that names, networks, compilers and certificates need. Operators keep secrets in other files there."""
OF_PROC = ("cpuinfo", "meminfo", "stat", "sys", "self", "loadavg", "filesystems", "version", "net")
"""Files of /proc; the folders of other processes contain their environment variables."""
OF_SYS = ("devices/system/cpu", "devices/system/node", "fs/cgroup", "kernel/mm/transparent_hugepage")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""Devices that any program may open: no disks, no terminals, no memory."""
GPU_DRIVERS = ("nvidiactl", "kfd", "dxg")
"""Files below /dev of which one exists where programs can compute on a GPU: NVIDIA's and AMD's drivers, and WSL's."""
GPU_PATTERNS = (*GPU_DRIVERS, "nvidia*", "dri", "nvidia-caps", "infiniband")
"""Patterns below /dev of all that such programs open: also the GPUs themselves, and links between them."""


def system_paths() -> tuple[Path, ...]:
    """Return the paths to read: programs, libraries, and what names, networks and certificates need."""
    return _there(
        [
            *map(Path, PROGRAMS),
            *(Path("/etc") / name for name in OF_ETC),
            *(Path("/proc") / name for name in OF_PROC),
            *(Path("/sys") / name for name in OF_SYS),
            # systemd or NetworkManager writes the target of the link /etc/resolv.conf here.
            *(Path("/run") / name for name in ("systemd/resolve", "NetworkManager", "resolvconf")),
        ]
    )


def python_paths() -> tuple[Path, ...]:
    """Return the interpreter, its libraries and import folders, for reading.

    Never a whole home, working or temporary folder, nor that of the user's own program, unless PYTHONPATH names it.
    """
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    own = None if program is None else Path(program).resolve().parent
    named = {Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    found = [
        Path(sys.prefix),
        Path(sys.base_prefix),
        *_packages(),
        *(path for path in map(Path, sys.path) if path.is_absolute() and (path.resolve() != own or own in named)),
    ]
    closed = {path.resolve() for path in (*homes(), Path.cwd(), Path(tempfile.gettempdir()))}
    kept = [path for path in _there(found) if not any(path == one or path in one.parents for one in closed)]
    return tuple(dict.fromkeys([*kept, *_there(_packages())]))


def homes() -> tuple[Path, ...]:
    """Return the user's home, by the environment and by the system's list of users."""
    try:
        known = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container may run as a user without an entry
        return (Path.home(),)
    return (Path.home(), known)


def devices() -> tuple[Path, ...]:
    """Return those of DEVICES that exist."""
    return _there(map(Path, DEVICES))


def gpu_devices(folder: Path = Path("/dev")) -> tuple[Path, ...]:
    """Return the devices that programs on a GPU open; none without a driver to compute with."""
    if not any((folder / name).exists() for name in GPU_DRIVERS):
        return ()
    return tuple(sorted({path for pattern in GPU_PATTERNS for path in folder.glob(pattern)}))


def _packages() -> list[Path]:
    """Return the folders of our own two packages, wherever they are installed."""
    import prime_node
    import prime_protocol

    return [Path(entry) for package in (prime_node, prime_protocol) for entry in package.__path__]


def _there(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(path for path in paths if os.path.lexists(path) and path.exists()))
