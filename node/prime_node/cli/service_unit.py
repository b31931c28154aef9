"""Files that describe a role to a service manager: a systemd unit or a launchd property list. Pure functions.

A unit's restrictions must let a role confine itself further (docs/sandbox.md): it makes user and mount namespaces, and its
launcher starts bubblewrap, which mounts its own /proc. The kernel may refuse that where a part of /proc is covered, so
ProtectKernelTunables, ProtectKernelLogs and ProcSubset stay off. PrivateUsers stays off because files of others would seem to
have no owner. MemoryDenyWriteExecute stays off for compilers in the process (numba, Triton).
"""

from __future__ import annotations

import plistlib
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from prime_node.cli.lifetime import FINAL_CODES
from prime_node.cli.main import FINAL_AS_0
from prime_protocol.errors import LocalError
from prime_protocol.visible import printable

RESTART_S = 10
"""Delay before a role that ended unexpectedly is started again. There is no limit on restarts."""
LAUNCHD_RESTART_S = 60
"""The same for launchd."""
OPEN_FILES = 65_536
GPU_DEVICES = ("char-nvidia*", "char-drm", "char-kfd", "char-infiniband*", "/dev/dxg")
"""Device groups and files of GPU drivers. systemd looks up groups when the service starts."""
_PLAIN = re.compile(r"[\w@%+=:,./#-]+", re.ASCII)
HARDENED = (
    "NoNewPrivileges=yes",
    "RestrictSUIDSGID=yes",
    "RestrictRealtime=yes",
    "LockPersonality=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service @mount",
    "SystemCallFilter=seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self",
    "SystemCallErrorNumber=EPERM",
    "UMask=0077",
)
"""Restrictions that need no privileges of the service manager."""
HARDENED_BY_ROOT = (
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "PrivateMounts=yes",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectKernelModules=yes",
    "ProtectHostname=yes",
    "ProtectProc=invisible",
    "RemoveIPC=yes",
    "KeyringMode=private",
)
"""Further restrictions that only the system's service manager can make."""
KEYS_OF_CLOUDS = "IPAddressDeny=169.254.169.254 fd00:ec2::254"
"""Restriction of the addresses where clouds hand out keys. The roles in USE_BUCKETS may get those of their bucket there."""
USE_BUCKETS = ("coordinator", "gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleService:
    """One role of this machine as a service.

    Example: RoleService(name="gpu-1", role="worker", command=("prime-node", "join", LINK), ...).
    """

    name: str
    """Name that start, stop and the others take; the role, unless the user chose one."""
    role: str
    command: tuple[str, ...]
    directory: Path
    """Folder from which it was installed: relative paths in its settings begin there."""
    writes: tuple[Path, ...]
    """Folders that it may write in."""
    stop_s: int
    """Time after which a role that was asked to stop has ended by itself."""
    stopped_codes: tuple[int, ...]
    """Exit codes of a role that was stopped, besides 0."""
    user: str | None = None
    """User of a service of the whole machine; None for a service of the user who installs it."""

    def __post_init__(self) -> None:
        """Refuse what would end a line of a unit, and so add settings that root's service manager obeys. Raises LocalError."""
        for text in (*self.command, str(self.directory), *map(str, self.writes)):
            if any(unicodedata.category(character) == "Cc" for character in text):
                raise LocalError(f"{printable(text)}: a service's file cannot hold this name; rename it")
        if str(self.directory).endswith("\\"):  # the next line would continue this one
            raise LocalError(f"{self.directory}: a service cannot start in a folder of this name; rename it")


def unit_name(name: str) -> str:
    """Return the name of a service's unit, such as prime-node-worker.service."""
    return f"prime-node-{name}.service"


def job_label(name: str) -> str:
    """Return the name of a service's launchd job, such as org.prime-node.worker."""
    return f"org.prime-node.{name}"


def systemd_unit(service: RoleService, *, variables: Path | None = None) -> str:
    """Return the text of the unit. `variables` is a file of environment variables, which may be missing."""
    lines = [
        "[Unit]",
        f"Description=prime-node {service.role}",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        *([] if service.user is None else [f"User={service.user}"]),
        f"WorkingDirectory=-{str(service.directory).replace('%', '%%')}",
        f"ExecStart={' '.join(_word(word.replace('$', '$$')) for word in service.command)}",
        "Environment=PYTHONUNBUFFERED=1",
        *([] if variables is None else [f"EnvironmentFile=-{str(variables).replace('%', '%%')}"]),
        "# Exit codes: 0 done or left, 2 wrong usage, 3 this machine or its settings, 4 refused by the run. All are final.",
        "# After 6, a fault that may pass such as a database that cannot be reached, it starts again.",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={_codes(FINAL_CODES - {0})}",
        f"SuccessExitStatus={_codes(service.stopped_codes)}",
        "# SIGTERM lets the role finish its work and end its own processes. It ends by itself before this time.",
        "KillMode=mixed",
        f"TimeoutStopSec={service.stop_s}",
        "OOMPolicy=continue",
        f"LimitNOFILE={OPEN_FILES}",
        "",
        *HARDENED,
    ]
    if service.user is not None:
        lines += [*HARDENED_BY_ROOT, f"ReadWritePaths={' '.join(_word(str(folder)) for folder in service.writes)}"]
        lines += [*([] if service.role in USE_BUCKETS else [KEYS_OF_CLOUDS]), *_devices(service.role)]
    wanted_by = "default.target" if service.user is None else "multi-user.target"
    return "\n".join([*lines, "", "[Install]", f"WantedBy={wanted_by}", ""])


def launchd_plist(service: RoleService, *, log: Path) -> bytes:
    """Return the property list. launchd restarts a role after any exit code but 0, and so it gets 0 for all final ones."""
    described: dict[str, object] = {
        "Label": job_label(service.name),
        "ProgramArguments": list(service.command),
        "WorkingDirectory": str(service.directory),
        "EnvironmentVariables": {"PYTHONUNBUFFERED": "1", FINAL_AS_0: "1"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": LAUNCHD_RESTART_S,
        "ExitTimeOut": service.stop_s,
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "StandardErrorPath": str(log),
        "Umask": 0o077,
    }
    if service.user is not None:
        described["UserName"] = service.user
    return plistlib.dumps(described)


def _devices(role: str) -> list[str]:
    if role in (*USE_BUCKETS, "seed"):
        return ["PrivateDevices=yes"]
    return ["DevicePolicy=closed", *(f"DeviceAllow={group} rw" for group in GPU_DEVICES)]


def _codes(codes: tuple[int, ...] | frozenset[int]) -> str:
    return " ".join(map(str, sorted(codes)))


def _word(text: str) -> str:
    """Quote a word of a unit: systemd replaces specifiers (%h) and splits at blanks."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if _PLAIN.fullmatch(escaped) else f'"{escaped}"'
