"""bubblewrap (github.com/containers/bubblewrap): a command in namespaces of its own.

It gives what Landlock cannot: no path leads to a socket outside, /proc shows only the command's own processes, /tmp and /dev/shm
are its own and vanish with it, and there is no network but by name. A process that Landlock already binds can mount nothing, so
it can start nothing this way: `find_bubblewrap` tells.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_node.adapters.sandbox.links import links_on_the_way

TRY_S_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a command sees of the file system, each thing under its own path. What does not exist is left out."""

    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    folder: Path = Path("/")
    """Where it starts."""
    tmp_bytes: int | None = None
    """Size of its /tmp, and of its /dev/shm; None is half of the machine's memory."""
    switches_user: bool = False
    """Whether the command, which root starts, takes another user: it keeps the capabilities for that until it has, and may pass
    through the folders above what is named."""
    network: bool = False
    """Whether it shares the host's network. Without, it has a loopback interface of its own."""


@functools.cache
def find_bubblewrap() -> tuple[str, str]:
    """(path of the program, why it does not serve); one of the two is empty. Runs it once to find out."""
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
    said = tried.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {tried.returncode}"]
    return "", f"bubblewrap does not run here: {said[-1][:200]}"


def wrap(command: Sequence[str], view: View, *, program: str) -> list[str]:
    """The command line that runs `command` inside. Killing it kills all that runs inside; other signals do not reach that."""
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
    for path, target in links.items():  # programs find what they look for under both names
        line += ["--symlink", str(target), str(path)]
    return [*line, "--chdir", str(view.folder), "--", *command]


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
    """Whether the command has its own: /proc always, /dev but for the devices that are named and the host's shared memory."""
    return path.parts[:2] == ("/", "proc") or (path.parts[:2] == ("/", "dev") and option == "--ro-bind")
