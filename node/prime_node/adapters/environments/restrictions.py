"""The sandbox of an environment process: how its host starts it, and what it gives up before untrusted code is loaded.

It has two layers. bubblewrap gives it a minimal file system, its own /tmp, /dev/shm, processes and network; Landlock, seccomp
and resource limits then confine it inside. Without bubblewrap only the second layer applies, and the process reports what is
not enforced. Environments started by root run as another user if all that they read is readable by anyone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from prime_node.adapters.sandbox import bubblewrap, privileges
from prime_node.adapters.sandbox.confine import confine
from prime_node.adapters.sandbox.rules import CLOSED_BY_OWN_ROOT, NETWORK, ModeChanges, ProcessLimits, SandboxRules
from prime_node.adapters.sandbox.system_paths import devices, python_paths, system_paths

NOBODY = 65_534
_SET_DUMPABLE = 4
TMP = Path("/tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRestrictions:
    """Rights of an environment process. Paths are absolute."""

    read: tuple[str, ...]
    """Paths to read besides the system's and Python's own."""
    hidden: tuple[str, ...]
    network: bool
    """Whether it may use the host's network."""
    loopback: bool
    """Whether it talks to itself over 127.0.0.1."""
    memory_bytes_max: int
    processes_max: int
    file_bytes_max: int
    open_files_max: int
    tmp_bytes_max: int
    isolated: bool = False
    """Whether it runs in namespaces of its own."""
    user: int | None = None
    """User id that it switches to."""
    network_grants: tuple[str, ...] = ()
    """Environments that it may build if it has the host's network (envs/grants.py)."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Read the output of dataclasses.asdict."""
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("read", "hidden", "network_grants")}})


def around_command(
    command: Sequence[str], folder: Path, restrictions: ProcessRestrictions, *, imports: Sequence[Path]
) -> tuple[list[str], Path, ProcessRestrictions]:
    """Make, on the host, the command line to start.

    Return it with the process's folder and the restrictions inside. The last argument of the command line names both for
    `read_order`. They come from the process that starts it, so no later message can loosen them. `imports`: folders of modules
    that it imports besides Python's own.
    """
    program, _ = bubblewrap.find_bubblewrap()
    needed = [*_interpreter(), *map(Path, restrictions.read)]
    if not program:
        user = NOBODY if _may_switch_user() and all(_is_public(path, above=True) for path in needed) else None
        own = None if user is None else _own_folder(folder, user)
        inside = replace(restrictions, user=None if own is None else user)
        folder = own or folder
        return [*command, order(inside, folder)], folder, inside
    read = _around(
        [*system_paths(), *python_paths(), *imports, *map(Path, restrictions.read)], map(Path, restrictions.hidden)
    )
    user = NOBODY if os.geteuid() == 0 and all(map(_is_public, needed)) else None
    view = bubblewrap.View(
        read=tuple(read),
        folder=TMP,
        tmp_bytes=restrictions.tmp_bytes_max,
        switches_user=user is not None,
        network=restrictions.network,
    )
    inside = replace(restrictions, isolated=True, user=user)
    return bubblewrap.wrap([*command, order(inside, TMP)], view, program=program), TMP, inside


def order(restrictions: ProcessRestrictions, folder: Path) -> str:
    """Write what a process must enforce on itself, as an argument of its command line."""
    return json.dumps({"restrictions": asdict(restrictions), "folder": str(folder)})


def read_order(text: str) -> tuple[ProcessRestrictions, Path]:
    """Read the output of `order`. Raises ValueError, KeyError and TypeError."""
    order = json.loads(text)
    return ProcessRestrictions.of(order["restrictions"]), Path(order["folder"])


def why_not_isolated() -> str:
    """Return why namespaces are not available; empty if they are."""
    return bubblewrap.find_bubblewrap()[1]


def confine_here(restrictions: ProcessRestrictions, folder: Path) -> list[str]:
    """Confine this process irrevocably, before its first thread. Return what is not enforced, one clause each."""
    missing = []
    _die_first()
    if restrictions.user is not None:
        os.setgroups([])
        os.setresgid(restrictions.user, restrictions.user, restrictions.user)
        os.setresuid(restrictions.user, restrictions.user, restrictions.user)
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else it may not read its own /proc/self
    elif os.geteuid() == 0:
        missing.append("the number of processes (root has no such limit, and what it reads is not readable by all)")
    if not restrictions.isolated:
        missing.append("namespaces: its own /tmp, processes and network")
    covered = ("Unix sockets by path", *(CLOSED_BY_OWN_ROOT if restrictions.isolated else ()))
    shared = (TMP, Path("/dev/shm")) if restrictions.isolated else ()
    level = confine(
        SandboxRules(
            read=(*system_paths(), *python_paths(), *map(Path, restrictions.read)),
            write=(folder, *shared),
            devices=devices(),
            hidden=tuple(map(Path, restrictions.hidden)),
            families=NETWORK if restrictions.network or restrictions.loopback else frozenset(),
            mode_changes=ModeChanges.ALLOWED if restrictions.isolated else ModeChanges.REFUSED,
            shared_ipc=restrictions.isolated,
            log_denials=False,
            limits=ProcessLimits(
                data_bytes=restrictions.memory_bytes_max,
                processes=restrictions.processes_max + (0 if restrictions.isolated else _num_threads()),
                file_bytes=restrictions.file_bytes_max,
                open_files=restrictions.open_files_max,
            ),
        )
    )
    return [
        *missing,
        *(
            f"{restriction.what} ({restriction.why})"
            for restriction in level.restrictions
            if not restriction.up and restriction.what not in covered
        ),
    ]


def _num_threads() -> int:
    """Count the threads of this user's visible processes: outside a namespace the limit includes them."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += process.stat().st_uid == os.geteuid() and len(list((process / "task").iterdir()))
    return found


def _die_first() -> None:
    """Make the kernel end environments before anything else on this machine when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _interpreter() -> list[Path]:
    import prime_node

    return [Path(sys.prefix), Path(sys.base_prefix), *(Path(entry) for entry in prime_node.__path__)]


def _around(paths: Iterable[Path], hidden: Iterable[Path]) -> list[Path]:
    """Return the paths without what is hidden. A path that is itself below a hidden one stays."""
    from prime_node.adapters.sandbox.landlock import around

    kept_out = [path.resolve() for path in hidden]
    found: list[Path] = []
    for path in paths:
        below = [one for one in kept_out if path.resolve() in one.parents]
        found += around([path.resolve()], below) if below else [path]
    return found


def _may_switch_user() -> bool:
    """Return whether this is root with the capabilities for that. A confined role has dropped them."""
    needed = 1 << privileges.CHOWN | 1 << privileges.SETGID | 1 << privileges.SETUID
    return os.geteuid() == 0 and privileges.held_capabilities()[0] & needed == needed


def _own_folder(folder: Path, user: int) -> Path | None:
    """Return a folder that this user owns; None if none can be made.

    It is `folder` itself, or a new one in it that a child makes as that user: the filter of a role lets it change no owner.
    """
    with contextlib.suppress(PermissionError):
        os.chown(folder, user, user)
    if folder.stat().st_uid == user:
        return folder
    shared = folder / secrets.token_hex(16)
    try:
        subprocess.run(["mkdir", shared], umask=0, check=True, capture_output=True)
        own = ["mkdir", str(shared / "own")]
        subprocess.run(own, user=user, group=user, extra_groups=[], umask=0o077, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return shared / "own"


def _is_public(path: Path, *, above: bool = False) -> bool:
    """Return whether any user may read it, and a folder's own files; `above`: and may pass through all folders above it."""
    try:
        if above and not all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents):
            return False
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode):
            return bool(mode & stat.S_IROTH)
        return mode & 0o005 == 0o005 and all(each.stat().st_mode & stat.S_IROTH for each in path.iterdir())
    except OSError:
        return False
