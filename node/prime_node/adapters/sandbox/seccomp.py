"""A seccomp filter (docs.kernel.org/userspace-api/seccomp_filter.html): refuses system calls that none of our roles makes.

A filter binds all threads of the process and all that they start, and cannot be lifted. It sees call numbers and register
values, never memory behind a pointer. The flags of clone3 are in memory, so the filter answers as if the kernel had no clone3,
and C libraries fall back to clone. A refused call gets an error number; a call by another convention (32-bit, x32) ends the
process.

The numbers of system calls are from the kernel's asm/unistd.h, by architecture.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from dataclasses import dataclass, field

from prime_node.adapters.sandbox.libc import checked, libc
from prime_node.adapters.sandbox.rules import Family, ModeChanges, Restriction, SandboxRules


@dataclass(frozen=True, slots=True)
class Architecture:
    """Processor properties that a filter depends on."""

    audit: int
    """AUDIT_ARCH_*: the kernel's name for the convention of a call."""
    foreign_from: int | None
    """Number from which calls belong to a second convention of the same name (x32)."""
    numbers: dict[str, int]


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, _, number in (pair.partition("=") for pair in text.split())}


_SINCE_5_1 = _table(
    """
    io_uring_setup=425 io_uring_enter=426 io_uring_register=427 open_tree=428 move_mount=429 fsopen=430
    fsconfig=431 fsmount=432 fspick=433 clone3=435 pidfd_getfd=438 process_madvise=440 mount_setattr=442
    quotactl_fd=443 memfd_secret=447 fchmodat2=452 setxattrat=463
    removexattrat=466 open_tree_attr=467 file_setattr=469
    """
)
"""Newer calls, which have one number on every architecture."""

_X86_64 = (
    _table(
        """
    ptrace=101 process_vm_readv=310 process_vm_writev=311 kexec_load=246 kexec_file_load=320 mount=165 umount2=166
    pivot_root=155 chroot=161 bpf=321 perf_event_open=298 userfaultfd=323 add_key=248 request_key=249 keyctl=250
    unshare=272 setns=308 clone=56 init_module=175 finit_module=313 delete_module=176 swapon=167 swapoff=168
    reboot=169 sethostname=170 setdomainname=171 iopl=172 ioperm=173 acct=163 settimeofday=164 clock_settime=227
    clock_adjtime=305 adjtimex=159 quotactl=179 nfsservctl=180 syslog=103 vhangup=153 lookup_dcookie=212
    name_to_handle_at=303 open_by_handle_at=304 fanotify_init=300 modify_ldt=154 uselib=134 mknod=133 mknodat=259
    chmod=90 fchmod=91 fchmodat=268 chown=92 fchown=93 lchown=94 fchownat=260 setxattr=188 lsetxattr=189
    fsetxattr=190 removexattr=197 lremovexattr=198 fremovexattr=199 utime=132 utimes=235 futimesat=261
    utimensat=280 socket=41 socketpair=53 ioctl=16 prlimit64=302 setpriority=141 sched_setparam=142
    sched_setscheduler=144 sched_setaffinity=203 sched_setattr=314 ioprio_set=251 shmget=29
    shmat=30 shmctl=31 shmdt=67 semget=64 semop=65 semctl=66 semtimedop=220 msgget=68 msgsnd=69 msgrcv=70
    msgctl=71 mq_open=240 mq_unlink=241 migrate_pages=256 move_pages=279 kcmp=312
    memfd_create=319
    """
    )
    | _SINCE_5_1
)
_AARCH64 = (
    _table(
        """
    ptrace=117 process_vm_readv=270 process_vm_writev=271 kexec_load=104 kexec_file_load=294 mount=40 umount2=39
    pivot_root=41 chroot=51 bpf=280 perf_event_open=241 userfaultfd=282 add_key=217 request_key=218 keyctl=219
    unshare=97 setns=268 clone=220 init_module=105 finit_module=273 delete_module=106 swapon=224 swapoff=225
    reboot=142 sethostname=161 setdomainname=162 acct=89 settimeofday=170 clock_settime=112 clock_adjtime=266
    adjtimex=171 quotactl=60 nfsservctl=42 syslog=116 vhangup=58 lookup_dcookie=18 name_to_handle_at=264
    open_by_handle_at=265 fanotify_init=262 mknodat=33 fchmod=52 fchmodat=53 fchownat=54 fchown=55 setxattr=5
    lsetxattr=6 fsetxattr=7 removexattr=14 lremovexattr=15 fremovexattr=16 utimensat=88 socket=198 socketpair=199
    ioctl=29 prlimit64=261 setpriority=140 sched_setparam=118 sched_setscheduler=119 sched_setaffinity=122
    sched_setattr=274 ioprio_set=30 mq_open=180 mq_unlink=181 msgget=186 msgctl=187 msgrcv=188 msgsnd=189
    semget=190 semctl=191 semtimedop=192 semop=193 shmget=194 shmctl=195 shmat=196 shmdt=197 migrate_pages=238
    move_pages=239 kcmp=272 memfd_create=279
    """
    )
    | _SINCE_5_1
)

_KNOWN = {
    "x86_64": Architecture(0xC000003E, 0x40000000, _X86_64),
    "aarch64": Architecture(0xC00000B7, None, _AARCH64),
}


def architecture() -> Architecture | None:
    """Return this machine's architecture; None if it has no table."""
    return _KNOWN.get(platform.machine())


_LD, _JEQ, _JGE, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AT_NUMBER, _AT_ARCH, _AT_ARGUMENTS = 0, 4, 16
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_SECCOMP = {0xC000003E: 317, 0xC00000B7: 277}
"""AUDIT_ARCH_* -> number of the call seccomp."""

NAMESPACE_FLAGS = 0x7E02_0080
"""Flags CLONE_NEW* of unshare. In clone's flags 0x80 is part of a signal number."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
"""Commands that put characters into a terminal's input, so that the user's shell would run them."""
_COMMAND_TYPE = 0xFF00
_SOCK_TYPE, _STREAM, _SEQPACKET = 0xF, 1, 5

ALWAYS_REFUSED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kexec_load", "kexec_file_load", "bpf", "perf_event_open"),
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "userfaultfd", "add_key", "request_key", "keyctl", "setns"),
    *("init_module", "finit_module", "delete_module", "swapon", "swapoff", "reboot", "sethostname", "setdomainname"),
    *("iopl", "ioperm", "acct", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "quotactl"),
    *("quotactl_fd", "nfsservctl", "syslog", "vhangup", "lookup_dcookie", "name_to_handle_at", "open_by_handle_at"),
    *("fanotify_init", "modify_ldt", "uselib", "pidfd_getfd", "process_madvise", "kcmp"),
)
NOT_THERE = ("io_uring_setup", "io_uring_enter", "io_uring_register")
"""Calls answered by ENOSYS, so that libraries fall back. io_uring requests bypass every filter of system calls."""
CHANGES_MODES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "file_setattr"),
    *(
        "setxattr",
        "lsetxattr",
        "fsetxattr",
        "setxattrat",
        "removexattr",
        "lremovexattr",
        "fremovexattr",
        "removexattrat",
    ),
    *("utime", "utimes", "futimesat", "utimensat"),
)
"""Calls that change attributes of a file, by its path or while it is open: one that is open to be read suffices."""
FILE_SYSTEM_COMMANDS = (ord("f"), ord("X"), ord("v"), ord("r"), 0x94, 0xBC, 0xF5)
"""Types of the ioctl commands of file systems (ext4, XFS, FAT, btrfs, bcachefs, F2FS). Some change flags of a file that is open
to be read, or make a subvolume in a folder. They are answered by EOPNOTSUPP, as if the file system had none."""
SHARED_IPC = (
    *("shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semctl", "semtimedop", "msgget", "msgsnd", "msgrcv"),
    *("msgctl", "mq_open", "mq_unlink"),
)
"""Calls of System V IPC and POSIX message queues, answered by ENOSYS. POSIX shared memory and semaphores are files."""
SCHEDULING_OF_THREADS = ("sched_setaffinity", "sched_setscheduler", "sched_setparam")
"""Calls that glibc makes with a thread's own id, which a filter cannot distinguish from another's. For an id other than zero
they are skipped and return success, because on an error libzmq aborts, and libgomp with OMP_PROC_BIND cannot start a thread. So
threads that name themselves are not pinned."""
PLACES_PAGES = ("move_pages", "migrate_pages")
"""Calls that ask where a process's pages are, or move them between NUMA nodes. vLLM names itself by its own id, which a filter
cannot distinguish from another's; on an error it warns and continues."""
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1

_FAMILIES = {
    Family.UNIX: socket.AF_UNIX,
    Family.INET: socket.AF_INET,
    Family.INET6: socket.AF_INET6,
    Family.NETLINK: getattr(socket, "AF_NETLINK", 16),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def restrict_calls(rules: SandboxRules) -> Restriction:
    """Bind this process to the filter. The caller has set no_new_privs. Raises OSError if the kernel refuses it."""
    machine = architecture()
    if machine is None:
        return Restriction("system calls", False, "this software has no filter for this processor")
    code = program(rules, machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    what = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    result = libc().syscall(_SECCOMP[machine.audit], _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(what))
    if result > 0:
        raise OSError(errno.EBUSY, f"seccomp: thread {result} already has its own filter")
    if result < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EINVAL):
        return Restriction("system calls", False, "seccomp is not built into this kernel")
    checked("seccomp", result)
    return Restriction("system calls", True)


@dataclass(slots=True)
class _Code:
    """Instructions under construction. The accumulator holds the call's number between two blocks."""

    machine: Architecture
    made: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, code: int, value: int, true: int = 0, false: int = 0) -> None:
        self.made.append((code, true, false, value))

    def refuse(self, *names: str, error: int = errno.EPERM) -> None:
        """Refuse calls with any arguments; the error 0 is success. A call that the architecture does not have is left out."""
        for name in names:
            if (number := self.machine.numbers.get(name)) is not None:
                self.add(_JEQ, number, 0, 1)
                self.add(_RET, _ERRNO | error)

    def judge(self, name: str, body: list[tuple[int, int, int, int]]) -> None:
        """Let `body` decide by the call's arguments. It returns on every path."""
        self.add(_JEQ, self.machine.numbers[name], 0, len(body))
        self.made += body

    def bytes(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in self.made)


def program(rules: SandboxRules, machine: Architecture) -> bytes:
    """Return the filter's instructions. Example: len(program(Rules(), architecture())) // 8."""
    code = _Code(machine)
    code.add(_LD, _AT_ARCH)
    code.add(_JEQ, machine.audit, 1, 0)
    code.add(_RET, _KILL)
    code.add(_LD, _AT_NUMBER)
    if machine.foreign_from is not None:
        code.add(_JGE, machine.foreign_from, 0, 1)
        code.add(_RET, _KILL)
    code.refuse(*ALWAYS_REFUSED)
    code.refuse(*NOT_THERE, error=errno.ENOSYS)
    if rules.mode_changes != ModeChanges.ALLOWED:
        code.refuse(*CHANGES_MODES, error=0 if rules.mode_changes == ModeChanges.SKIPPED else errno.EPERM)
    if not rules.shared_ipc:
        code.refuse(*SHARED_IPC, error=errno.ENOSYS)
    if rules.limits.address_bytes is not None:  # their memory need not be mapped
        code.refuse("memfd_create", "memfd_secret", error=errno.ENOSYS)
    if not rules.namespaces:
        code.refuse("clone3", error=errno.ENOSYS)
        code.judge("clone", _unless_any_bit(0, NAMESPACE_FLAGS & ~0x80))
        code.judge("unshare", _unless_any_bit(0, NAMESPACE_FLAGS))
    code.judge("socket", _families(rules.families))
    if Family.UNIX not in rules.families:
        code.judge("socketpair", _pairs())
    code.judge("ioctl", _commands(() if rules.mode_changes == ModeChanges.ALLOWED else FILE_SYSTEM_COMMANDS))
    for name in ("prlimit64", *PLACES_PAGES):
        code.judge(name, _only_zero(0))  # zero is the caller
    for name in SCHEDULING_OF_THREADS:
        code.judge(name, _only_zero(0, otherwise=_PRETENDED))
    code.judge("sched_setattr", _only_zero(0))
    code.judge("setpriority", _only_of_the_caller(_PRIO_PROCESS))
    code.judge("ioprio_set", _only_of_the_caller(_IOPRIO_WHO_PROCESS))
    code.add(_RET, _ALLOW)
    return code.bytes()


Instructions = list[tuple[int, int, int, int]]
_REFUSED, _ALLOWED = (_RET, 0, 0, _ERRNO | errno.EPERM), (_RET, 0, 0, _ALLOW)
_PRETENDED = (_RET, 0, 0, _ERRNO)
"""Instruction that skips the call and returns success."""


def _load(argument: int) -> tuple[int, int, int, int]:
    """Load the lower half of an argument: the kernel uses only this half of flags, families and commands."""
    return (_LD, 0, 0, _AT_ARGUMENTS + 8 * argument)


def _unless_any_bit(argument: int, mask: int) -> Instructions:
    return [_load(argument), (_JSET, 0, 1, mask), _REFUSED, _ALLOWED]


def _commands(types: tuple[int, ...]) -> Instructions:
    """Refuse an ioctl that puts characters into a terminal's input, and those of these types."""
    lines = [_load(1)]
    for command in (_TIOCSTI, _TIOCLINUX):
        lines += [(_JEQ, 0, 1, command), _REFUSED]
    lines.append((_AND, 0, 0, _COMMAND_TYPE))
    for number in types:
        lines += [(_JEQ, 0, 1, number << 8), (_RET, 0, 0, _ERRNO | errno.EOPNOTSUPP)]
    return [*lines, _ALLOWED]


def _only_zero(argument: int, *, otherwise: tuple[int, int, int, int] = _REFUSED) -> Instructions:
    return [_load(argument), (_JEQ, 0, 1, 0), _ALLOWED, otherwise]


def _only_of_the_caller(kind: int) -> Instructions:
    """Allow `kind`, one process or thread, with the id zero. Groups and users include other processes."""
    return [_load(0), (_JEQ, 0, 3, kind), _load(1), (_JEQ, 0, 1, 0), _ALLOWED, _REFUSED]


def _families(allowed: frozenset[Family]) -> Instructions:
    """Allow these families; of netlink, routing alone."""
    lines = [_load(0)]
    for family in sorted(allowed - {Family.NETLINK}):
        lines += [(_JEQ, 0, 1, int(_FAMILIES[family])), _ALLOWED]
    refused = (_RET, 0, 0, _ERRNO | errno.EAFNOSUPPORT)
    if Family.NETLINK in allowed:
        lines += [(_JEQ, 1, 0, int(_FAMILIES[Family.NETLINK])), refused, _load(2), (_JEQ, 0, 1, 0), _ALLOWED]
    return [*lines, refused]


def _pairs() -> Instructions:
    """Allow stream and seqpacket pairs: a datagram socket of a pair could still send to a path."""
    return [_load(1), (_AND, 0, 0, _SOCK_TYPE), (_JEQ, 1, 0, _STREAM), (_JEQ, 0, 1, _SEQPACKET), _ALLOWED, _REFUSED]
