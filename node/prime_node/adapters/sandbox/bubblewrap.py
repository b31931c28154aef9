"""bubblewrap (github.com/containers/bubblewrap): a command in namespaces of its own.

It adds to Landlock: no path leads to a socket outside, and /proc shows only the command's own processes. /tmp and /dev/shm are
private and vanish with it, and it has no network unless requested. A process that Landlock already confines cannot mount
anything, so it cannot start a command this way: `find_bubblewrap` reports that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_node.adapters.sandbox.links import links_on_the_way

TRY_S_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """File system that a command sees, each part under its own path. Paths that do not exist are left out."""

    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    folder: Path = Path("/")
    """Working folder."""
    tmp_bytes: int | None = None
    """Size of its /tmp, and of its /dev/shm; None is half of the machine's memory."""
    switches_user: bool = False
    """Whether the command, started by root, switches to another user. It keeps the capabilities for that until then, and may
    pass through the folders above the named paths."""
    network: bool = False
    """Whether it shares the host's network. Otherwise it has a loopback interface of its own."""


@functools.cache
def find_bubblewrap() -> tuple[str, str]:
    """Return (path of the program, why it does not work); one of the two is empty. Runs it once to find out."""
    program = shutil.which("bwrap")
    if program is None:
        return "", "bubblewrap is not installed"
    try:
        tried = subprocess.run(
            wrap(["true"], View(read=tuple(map(Path, ("/usr", "/bin", "/lib", "/lib64")))), program=program),
            capture_output=True,
            timeout=TRY_S_MAX,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", f"bubblewrap does not run here: {error}"
    if tried.returncode == 0:
        return program, ""
    output = tried.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {tried.returncode}"]
    return "", f"bubblewrap does not run here: {output[-1][:200]}"


def wrap(command: Sequence[str], view: View, *, program: str) -> list[str]:
    """Return the command line that runs `command` inside. Only killing it affects the processes inside; it kills them all."""
    line = [program, "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid"]
    line += [] if view.switches_user else ["--unshare-user-try"]
    line += ["--unshare-uts", "--unshare-cgroup-try", *([] if view.network else ["--unshare-net"])]
    line += [
        "--cap-drop",
        "ALL",
        *(["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if view.switches_user else []),
    ]
    line += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        line += [
            "--perms",
            "1777",
            *([] if view.tmp_bytes is None else ["--size", str(view.tmp_bytes)]),
            "--tmpfs",
            folder,
        ]
    binds, links = _binds(view), links_on_the_way((*view.read, *view.write, *view.devices))
    links = {place: target for place, target in links.items() if not any(one in binds for one in place.parents)}
    if view.switches_user:
        above = {folder for path in (*binds, *links) for folder in path.parents} - {Path("/")}
        for folder_above in sorted(above, key=lambda path: len(path.parts)):
            line += ["--perms", "0755", "--dir", str(folder_above)]
    for path, option in binds.items():
        line += [f"{option}-try", str(path), str(path)]
    for path, target in links.items():  # programs use either name
        line += ["--symlink", str(target), str(path)]
    return [*line, "--chdir", str(view.folder), "--", *command]


def kill_wrapped(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with its processes, and block until it has ended. Idempotent. It must lead a session of its own.

    bubblewrap's inner process asks to die with the outer one only late in its set-up. Until then it would survive the outer
    one, so both are killed. The outer one is stopped first, so that it creates no further process in between.
    """
    if process.returncode is None:
        with contextlib.suppress(OSError):  # another thread may be doing the same
            for pid in _stop(process.pid):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stop(pid: int) -> list[int]:
    """Stop a child process and return its own children. Raises OSError."""
    if sys.platform != "linux":
        return []
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def _binds(view: View) -> dict[Path, str]:
    """Choose real paths to bind, the outer before the inner: a folder bound after one of its own would hide it."""
    kinds = (("--ro-bind", view.read), ("--bind", view.write), ("--dev-bind", view.devices))
    real = {
        path.resolve(): option
        for option, paths in kinds
        for path in paths
        if not _is_made_anew(path, option) and not _is_made_anew(path.resolve(), option)
    }
    found: dict[Path, str] = {}
    for path in sorted(real, key=lambda path: len(path.parts)):
        outer = next((one for one in path.parents if one in found), None)
        if outer is None or found[outer] != real[path]:
            found[path] = real[path]
    return found


def _is_made_anew(path: Path, option: str) -> bool:
    """Return whether the command has its own: all of /proc, and /dev except for named devices and the host's shared memory."""
    return path.parts[:2] == ("/", "proc") or (path.parts[:2] == ("/", "dev") and option == "--ro-bind")
