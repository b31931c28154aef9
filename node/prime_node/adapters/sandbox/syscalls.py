"""Numbers of the system calls that a filter checks, by architecture (from the kernel's asm/unistd.h)."""

from __future__ import annotations

import platform
from dataclasses import dataclass


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
