"""Rules for a confined process (`SandboxRules`), and the part that the system enforces (`SandboxLevel`). Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Family(StrEnum):
    """Socket family that a process may open; every other family is refused."""

    INET = "inet"
    INET6 = "inet6"
    UNIX = "unix"
    NETLINK = "netlink"
    """Routing queries only (NETLINK_ROUTE): how a C library and libp2p list network interfaces."""


class ModeChanges(StrEnum):
    """Answer to calls that change modes, owners, times, flags or extended attributes of files, which Landlock leaves open."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    SKIPPED = "skipped"
    """Calls return success and have no effect: compilers would fail on an error, and need no effect."""


NETWORK = frozenset({Family.INET, Family.INET6, Family.NETLINK})
"""Families of a process that talks to other machines. Unix sockets are not included."""


TRUNCATION, DEVICE_COMMANDS = "truncation", "commands to devices"
CLOSED_BY_OWN_ROOT = (TRUNCATION, DEVICE_COMMANDS)
"""Restrictions that a root of its own makes needless: what is only read is mounted so there, and other devices do not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Resource limits (setrlimit). None leaves a limit unchanged. A limit is never raised above the present hard limit."""

    data_bytes: int | None = None
    """RLIMIT_DATA: private writable memory of one process, in bytes. It bounds honest code: shared memory, memory that is made
    read-only, and stacks are not counted."""
    address_bytes: int | None = None
    """RLIMIT_AS: address space of one process, in bytes, also without memory files (memfd). torch, numba and CUDA reserve far
    more than they use."""
    processes: int | None = None
    """RLIMIT_NPROC: processes and threads of the user. The kernel does not apply it to root."""
    file_bytes: int | None = None
    """RLIMIT_FSIZE: size of one file that the process writes, in bytes."""
    open_files: int | None = None
    """RLIMIT_NOFILE: open file descriptors."""
    cpu_seconds: int | None = None
    """RLIMIT_CPU: CPU time in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRules:
    """Access that a process keeps. Paths that do not exist are left out; symbolic links are resolved."""

    read: tuple[Path, ...] = ()
    """Files and folders to read and to execute."""
    write: tuple[Path, ...] = ()
    """Folders to read and write in: files, links, sockets and pipes, but no device nodes. Nothing in them can be executed."""
    devices: tuple[Path, ...] = ()
    """Device files, or folders of them, to read, write and control (ioctl)."""
    hidden: tuple[Path, ...] = ()
    """Paths that stay closed although a path of `read` is above them. A path of `read` below one stays open."""
    own_root: bool = False
    """Whether to use a file system of its own if the system supports it (namespaces.py), with an empty writable /tmp and
    /dev/shm. Modes may be changed in it."""
    write_in_shared_root: tuple[Path, ...] = ()
    """Further folders of `write` if the process does not want or get its own root."""
    bind_ports: tuple[int, ...] | None = None
    """TCP ports to listen on; None allows all, () none. 0 is a port that the system chooses."""
    connect_ports: tuple[int, ...] | None = None
    """TCP ports to connect to, on any address; None allows all, () none."""
    families: frozenset[Family] = frozenset()
    """Socket families. Without UNIX, connected pairs of stream sockets (socketpair) still work."""
    signals_outside: bool = False
    """Whether the process may send signals to processes outside."""
    abstract_sockets_outside: bool = False
    """Whether it may connect to abstract Unix sockets of processes outside."""
    namespaces: bool = False
    """Whether it may make namespaces (unshare, clone)."""
    mode_changes: ModeChanges = ModeChanges.ALLOWED
    """Answer to changes of modes and the like. A root of its own protects files outside, and allows them."""
    shared_ipc: bool = True
    """Whether it may use System V IPC and POSIX message queues, which have no files. A root of its own has its own."""
    keep_capabilities: tuple[int, ...] = ()
    """Numbers of the capabilities that a process of root keeps. All others are dropped irrevocably."""
    dumpable: bool = True
    """Whether the process is dumpable. False keeps other processes of the same user from its memory, and the process itself
    from /proc/PID/fd of its relatives."""
    log_denials: bool = True
    """Whether Landlock's refusals go to the system's audit log (ABI 7)."""
    umask: int | None = None
    limits: ProcessLimits = field(default_factory=ProcessLimits)


@dataclass(frozen=True, slots=True)
class Restriction:
    """Restriction that is enforced or is not."""

    what: str
    """Name of the restricted access. Example: "files"."""
    up: bool
    why: str = ""
    """Reason why it is not enforced, as a clause for a person."""


@dataclass(frozen=True, slots=True)
class SandboxLevel:
    """Part of the rules that the system enforces."""

    restrictions: tuple[Restriction, ...]

    @property
    def up(self) -> frozenset[str]:
        """Names of the enforced restrictions. Example: level.up >= {"files"}."""
        return frozenset(restriction.what for restriction in self.restrictions if restriction.up)

    @property
    def is_full(self) -> bool:
        """Whether the system enforces all that the rules ask for."""
        return all(restriction.up for restriction in self.restrictions)

    def sentence(self) -> str:
        """Return one line for a person: what is enforced, then what is not and why."""
        up = [restriction.what for restriction in self.restrictions if restriction.up]
        down: dict[str, list[str]] = {}
        for restriction in self.restrictions:
            if not restriction.up:
                down.setdefault(restriction.why, []).append(restriction.what)
        enforced = f"enforced: {', '.join(up)}" if up else "nothing is enforced"
        if not down:
            return enforced
        return f"{enforced}; NOT enforced: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in down.items())
