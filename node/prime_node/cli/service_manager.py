"""The two service managers: where each keeps the file of a service, and the commands that act on it."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prime_node.cli.service_unit import RoleService, job_label, launchd_plist, systemd_unit, unit_name
from prime_protocol.errors import LocalError

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Systemd:
    """systemd, of the machine or of one user."""

    of_user: bool
    home: Path

    def file(self, name: str) -> Path:
        """Return the path of the unit."""
        folder = self.home / ".config" / "systemd" / "user" if self.of_user else Path("/etc/systemd/system")
        return folder / unit_name(name)

    def content(self, service: RoleService) -> bytes:
        """Return the unit."""
        return systemd_unit(service, variables=self.variables_file(service.name)).encode()

    def variables_file(self, name: str) -> Path | None:
        """Return the file of the service's secret environment variables. systemd reads it as root, or as the user."""
        folder = self.home / ".config" / "prime-node" if self.of_user else Path("/etc/prime-node")
        return folder / f"{name}.env"

    def link_file(self, name: str) -> Path | None:
        """Return None: the file of variables has the invitation of a link."""
        return None

    def enable(self, name: str) -> list[Command]:
        """Return the commands that make systemd read the unit and start it at boot, or at the user's login."""
        return [self._systemctl("daemon-reload"), self._systemctl("enable", unit_name(name))]

    def disable(self, name: str) -> list[Command]:
        """Return the command that stops the service and starts it no more."""
        return [self._systemctl("disable", "--now", unit_name(name))]

    def forgotten(self) -> list[Command]:
        """Return the command that makes systemd forget the removed unit."""
        return [self._systemctl("daemon-reload")]

    def start(self, name: str) -> Command:
        """Return the command that starts the service."""
        return self._systemctl("start", unit_name(name))

    def stop(self, name: str) -> Command:
        """Return the command that stops the service."""
        return self._systemctl("stop", unit_name(name))

    def show(self, name: str) -> Command:
        """Return the command that shows the state and the newest lines."""
        return self._systemctl("status", "--no-pager", unit_name(name))

    def logs(self, name: str, *, follow: bool) -> Command:
        """Return the command that shows the journal of the service."""
        which = "--user-unit" if self.of_user else "--unit"
        return ("journalctl", which, unit_name(name), "--output=cat", *(("--follow",) if follow else ("--no-pager",)))

    def log_file(self, name: str) -> Path | None:
        """Return None: the journal holds all logs."""
        return None

    def _systemctl(self, *arguments: str) -> Command:
        return ("systemctl", *(("--user",) if self.of_user else ()), *arguments)


@dataclass(frozen=True, slots=True)
class Launchd:
    """launchd of macOS, for the machine or for one user."""

    of_user: bool
    home: Path

    def file(self, name: str) -> Path:
        """Return the path of the property list."""
        folder = self.home / "Library" / "LaunchAgents" if self.of_user else Path("/Library/LaunchDaemons")
        return folder / f"{job_label(name)}.plist"

    def content(self, service: RoleService) -> bytes:
        """Return the property list."""
        return launchd_plist(service, log=self.log_file(service.name))

    def variables_file(self, name: str) -> Path | None:
        """Return None: launchd reads no file of variables."""
        return None

    def link_file(self, name: str) -> Path:
        """Return the file of a join link that holds an invitation: `launchctl print` shows arguments and variables to all."""
        folder = (self.home / "Library" if self.of_user else Path("/Library")) / "Application Support" / "prime-node"
        return folder / f"{name}.link"

    def enable(self, name: str) -> list[Command]:
        """Return nothing: launchd reads the folder at the next start of the machine or of the session."""
        return []

    def disable(self, name: str) -> list[Command]:
        """Return the command that stops the service and unloads its file."""
        return [self.stop(name)]

    def forgotten(self) -> list[Command]:
        """Return nothing: launchd has unloaded the file."""
        return []

    def start(self, name: str) -> Command:
        """Return the command that loads the file, which starts the service."""
        return ("launchctl", "bootstrap", self._domain(), str(self.file(name)))

    def stop(self, name: str) -> Command:
        """Return the command that unloads the file, which stops the service until the next start or session."""
        return ("launchctl", "bootout", f"{self._domain()}/{job_label(name)}")

    def show(self, name: str) -> Command:
        """Return the command that shows the state."""
        return ("launchctl", "print", f"{self._domain()}/{job_label(name)}")

    def logs(self, name: str, *, follow: bool) -> Command:
        """Return the command that shows the log."""
        return ("tail", *(("-f",) if follow else ()), "-n", "1000", str(self.log_file(name)))

    def log_file(self, name: str) -> Path:
        """Return the file of the log. launchd does not rotate it."""
        return (self.home / "Library" if self.of_user else Path("/Library")) / "Logs" / f"prime-node-{name}.log"

    def _domain(self) -> str:
        return f"gui/{os.getuid()}" if self.of_user else "system"


Manager = Systemd | Launchd


def call_in_turn(commands: Iterable[Command]) -> None:
    """Run commands until one fails. Raises LocalError."""
    for command in commands:
        if code := call_manager(command):
            raise LocalError(f"`{shlex.join(command)}` failed with code {code}; its message is above")


def call_manager(command: Command) -> int:
    """Run a command of the service manager in this terminal. Raises LocalError if there is none."""
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise LocalError(
            f"this machine has no {command[0]}: services need systemd, or launchd on macOS. `--print` shows the file"
        ) from None
    except KeyboardInterrupt:  # ends a log that is followed
        return 0
