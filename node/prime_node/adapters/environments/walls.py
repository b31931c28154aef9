"""The walls around a process of environments: what its host starts it with, and what it gives up before foreign code is loaded.

Two walls. bubblewrap gives it a file system that holds nothing else, its own /tmp, /dev/shm, processes and network; Landlock,
seccomp and resource limits then bind it inside. Where bubblewrap does not run, the second wall stands alone, and the process says
what is not enforced. Root's environments run as another user where all that they read may be read by anybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from prime_node.adapters.sandbox import bubblewrap
from prime_node.adapters.sandbox.confine import confine
from prime_node.adapters.sandbox.rules import NETWORK, ProcessLimits, SandboxRules
from prime_node.adapters.sandbox.system_paths import devices, python_paths, system_paths

NOBODY = 65_534
_SET_DUMPABLE = 4
TMP = Path("/tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """What a process of environments may do. Paths are absolute."""

    read: tuple[str, ...]
    """Beside the system's and Python's own."""
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
    """Which user it becomes."""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Read what dataclasses.asdict has made."""
        return cls(**{**said, "read": tuple(said["read"]), "hidden": tuple(said["hidden"])})


def around_command(
    command: Sequence[str], folder: Path, walls: Walls, *, imports: Sequence[Path]
) -> tuple[list[str], Path, Walls]:
    """Make, as the host, the command line to start. Returns with it the process's folder, and the walls of its inside.

    The last argument of the command line names that folder and those walls for `read_order`. So they come from the process that
    starts it, and no later message can widen them. `imports`: folders of modules that it imports beside Python's own.
    """
    program, _ = bubblewrap.find_bubblewrap()
    needed = [*_interpreter(), *map(Path, walls.read)]
    if not program:
        user = NOBODY if _may_switch_user() and all(_is_public(path, above=True) for path in needed) else None
        if user is not None:
            os.chown(folder, user, user)
        inside = replace(walls, user=user)
        return [*command, order(inside, folder)], folder, inside
    read = _around([*system_paths(), *python_paths(), *imports, *map(Path, walls.read)], map(Path, walls.hidden))
    user = NOBODY if os.geteuid() == 0 and all(map(_is_public, needed)) else None
    view = bubblewrap.View(
        read=tuple(read),
        folder=TMP,
        tmp_bytes=walls.tmp_bytes_max,
        switches_user=user is not None,
        network=walls.network,
    )
    inside = replace(walls, isolated=True, user=user)
    return bubblewrap.wrap([*command, order(inside, TMP)], view, program=program), TMP, inside


def order(walls: Walls, folder: Path) -> str:
    """Write what a process has to enforce of itself, as an argument of its command line."""
    return json.dumps({"walls": asdict(walls), "folder": str(folder)})


def read_order(text: str) -> tuple[Walls, Path]:
    """Read what `order` has written. Raises ValueError, KeyError and TypeError."""
    told = json.loads(text)
    return Walls.of(told["walls"]), Path(told["folder"])


def why_not_isolated() -> str:
    """Empty where namespaces are to be had."""
    return bubblewrap.find_bubblewrap()[1]


def confine_here(walls: Walls, folder: Path) -> list[str]:
    """The process's own side, before its first thread: what is not enforced, one clause each. Cannot be undone."""
    missing = []
    _die_first()
    if walls.user is not None:
        os.setgroups([])
        os.setresgid(walls.user, walls.user, walls.user)
        os.setresuid(walls.user, walls.user, walls.user)
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else not even its own /proc/self is its own
    elif os.geteuid() == 0:
        missing.append("the number of processes (root has no such limit, and what it reads is not readable by all)")
    if not walls.isolated:
        missing.append("namespaces: its own /tmp, processes and network")
    shared = (TMP, Path("/dev/shm")) if walls.isolated else ()
    level = confine(
        SandboxRules(
            read=(*system_paths(), *python_paths(), *map(Path, walls.read)),
            write=(folder, *shared),
            devices=devices(),
            hidden=tuple(map(Path, walls.hidden)),
            families=NETWORK if walls.network or walls.loopback else frozenset(),
            change_modes=walls.isolated,
            log_denials=False,
            limits=ProcessLimits(
                data_bytes=walls.memory_bytes_max,
                processes=walls.processes_max + (0 if walls.isolated else _num_threads()),
                file_bytes=walls.file_bytes_max,
                open_files=walls.open_files_max,
            ),
        )
    )
    return [
        *missing,
        *(f"{wall.what} ({wall.why})" for wall in level.walls if not wall.up and wall.what != "Unix sockets by path"),
    ]


def _num_threads() -> int:
    """Of all this user's processes that it may see: outside a namespace the limit counts them too."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += process.stat().st_uid == os.geteuid() and len(list((process / "task").iterdir()))
    return found


def _die_first() -> None:
    """Where memory runs out, the kernel ends environments before anything else of this machine."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _interpreter() -> list[Path]:
    import prime_node

    return [Path(sys.prefix), Path(sys.base_prefix), *(Path(entry) for entry in prime_node.__path__)]


def _around(paths: Iterable[Path], hidden: Iterable[Path]) -> list[Path]:
    """Without what is hidden. What is named below something hidden stays."""
    from prime_node.adapters.sandbox.landlock import around

    kept_out = [path.resolve() for path in hidden]
    found: list[Path] = []
    for path in paths:
        below = [one for one in kept_out if path.resolve() in one.parents]
        found += around([path.resolve()], below) if below else [path]
    return found


def _may_switch_user() -> bool:
    """Whether this is root with the capabilities to chown (0), setgid (6) and setuid (7), which a confined role gave up."""
    held = Path("/proc/self/status").read_text(encoding="ascii").partition("CapEff:")[2].split()
    return os.geteuid() == 0 and bool(held) and int(held[0], 16) & 0b1100_0001 == 0b1100_0001


def _is_public(path: Path, *, above: bool = False) -> bool:
    """Whether any user may read it, and a folder's own files; `above`: and may pass through all folders above it."""
    try:
        if above and not all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents):
            return False
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode):
            return bool(mode & stat.S_IROTH)
        return mode & 0o005 == 0o005 and all(each.stat().st_mode & stat.S_IROTH for each in path.iterdir())
    except OSError:
        return False
