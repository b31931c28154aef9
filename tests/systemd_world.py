"""A real systemd as process 1 of its own namespaces, in which services are installed and run. It needs root and cgroups v2.

Its root is the machine's, with four differences: /srv is a folder of the test, /etc/systemd/system is new, the user `prime`
exists, and the folder of this Python is open to that user. Processes of the machine are not visible.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.time_world import wait_until

from prime_node.cli.service import SHARED_TMP

PROGRAM = Path("/lib/systemd/systemd")
UID = 61_234
UNITS = "/etc/systemd/system"
START = """
set -e
echo $$ > {group}/cgroup.procs
exec unshare --fork --kill-child --pid --mount --uts --ipc --cgroup bash -ec '
umount -Rl /proc && mount -t proc proc /proc
if [ {open} != / ]; then
    mkdir {folder}/open && mount --bind {python} {folder}/open && mount -t tmpfs -o mode=755 tmpfs {open}
    mkdir -p {python} && mount --bind {folder}/open {python}
fi
mount --bind {folder} /srv
mount --bind /srv/passwd /etc/passwd && mount --bind /srv/group /etc/group
mount --bind /srv/units {units}
mount --bind /srv/messages /dev/kmsg
mount -t tmpfs tmpfs /run
umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec env -i container=lxc SYSTEMD_UNIT_PATH={units} SYSTEMD_LOG_TARGET=kmsg PATH=$PATH \
    {program} --system --unit=multi-user.target --show-status=no
'
"""


def why_not() -> str:
    """Return why no systemd can be started here; empty if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a systemd of its own needs root on Linux"
    if any(Path(sys.executable).is_relative_to(shared) for shared in SHARED_TMP):
        return f"{sys.executable} is in a folder that services do not see: use a checkout elsewhere"
    if not PROGRAM.exists() or shutil.which("unshare") is None:
        return "systemd is not installed (Debian: apt-get install systemd)"
    return "" if _cgroups() else "no cgroup v2 hierarchy is mounted and writable"


class SystemdMachine:
    """A running systemd. Commands run inside, as root."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self._pid = pid

    def run(self, *command: str, code: int | None = 0) -> str:
        """Run a command inside and return its output; check its exit code unless it is None."""
        ran = subprocess.run(
            ["nsenter", "--target", str(self._pid), "--all", "--", *command],
            env={"PATH": os.environ["PATH"], "HOME": "/", "SUDO_USER": "prime"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert code in (None, ran.returncode), f"{command}: {ran.returncode}\n{ran.stdout}{ran.stderr}{self.messages()}"
        return ran.stdout + ran.stderr

    def service(self, *arguments: str, code: int | None = 0) -> str:
        """Run `prime-node service` inside."""
        return self.run(sys.executable, "-P", "-m", "prime_node", "service", *arguments, code=code)

    def is_active(self, unit: str) -> bool:
        """Return whether a unit is active."""
        return self.run("systemctl", "is-active", unit, code=None).strip() == "active"

    def property(self, unit: str, name: str) -> str:
        """Return what systemd knows of a unit. Example: property("prime-node-worker.service", "ActiveState")."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def messages(self) -> str:
        """Return systemd's own messages."""
        return (self.folder / "messages").read_text(errors="replace")


@contextlib.contextmanager
def systemd_machine(folder: Path) -> Iterator[SystemdMachine]:
    """Start a systemd, and end it with all that it started."""
    folder.chmod(0o755)
    for name in ("units", "home"):
        (folder / name).mkdir()
    os.chown(folder / "home", UID, UID)
    (folder / "messages").touch()
    (folder / "passwd").write_text(
        Path("/etc/passwd").read_text() + f"prime:x:{UID}:{UID}::/srv/home:/bin/sh\n", encoding="utf-8"
    )
    (folder / "group").write_text(Path("/etc/group").read_text() + f"prime:x:{UID}:\n", encoding="utf-8")
    for target in ("basic", "sysinit", "shutdown", "multi-user", "network-online"):
        text = "[Unit]\nDescription=Test\nDefaultDependencies=no\n"
        (folder / "units" / f"{target}.target").write_text(text, encoding="utf-8")
    group = Path(_cgroups()) / f"prime-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    python = Path(sys.base_prefix)
    script = START.format(
        group=group, folder=folder, python=python, open=_closed_folder(python), units=UNITS, program=PROGRAM
    )
    started = subprocess.Popen(["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _child(started.pid), seconds=20)
        machine = SystemdMachine(folder, _child(started.pid))
        wait_until(lambda: machine.is_active("multi-user.target"), seconds=30)
        yield machine
    finally:
        started.kill()
        started.wait()
        wait_until(lambda: _remove(group), seconds=20)


def _cgroups() -> str:
    """Return where a writable hierarchy of cgroups v2 is mounted; empty if none is."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return next((where for _, where, kind, *_ in mounts if kind == "cgroup2" and os.access(where, os.W_OK)), "")


def _closed_folder(path: Path) -> Path:
    """Return the outermost folder above a path into which other users may not go; / if there is none."""
    return next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), Path("/"))


def _child(pid: int) -> int:
    """Return the process that a process has started and that is systemd by now; 0 before."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return next((int(one) for one in children if Path(f"/proc/{one}/exe").resolve() == PROGRAM.resolve()), 0)


def _remove(group: Path) -> bool:
    """Remove a cgroup and those below it. Return whether that worked: a process may still be ending."""
    try:
        for one in sorted((path for path in group.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts)):
            one.rmdir()
        group.rmdir()
    except OSError:
        return False
    return True
