"""`prime-node join` without the check of names (E1), and with a run's code in the process: tests the restrictions alone.

Started by test_confined_roles.py. `python hostile_join.py LEFT_OUT join LINK ...`: LEFT_OUT names restrictions that are
also missing: "landlock", "namespaces" or "none". After the last model file is written, the process tries what a hostile run's
code would try, writes the outcomes to the file REPORT in its folder, and ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prime_protocol.names

prime_protocol.names.ModelFileName = str  # before anything imports it

from prime_node.adapters.models import model_folder  # noqa: E402
from prime_node.broadcast.follow import pinned  # noqa: E402
from prime_node.cli.main import main  # noqa: E402

LAST = "zz.json"
REPORT = "report"
OUTCOMES: dict[str, str] = {}
ATTACKED = Path(os.environ["PRIME_TEST_ATTACKED"])


def tried(action: Callable[[], Any]) -> str:
    """Return the outcome as one word."""
    try:
        return f"done: {str(action())[:200]}"
    except OSError as error:
        return type(error).__name__


def found(value: object) -> object:
    """Return a value that exists. Raises OSError if there is nothing."""
    if not value:
        raise FileNotFoundError
    return value


def attacks() -> dict[str, str]:
    """Return the attempts, none of which may succeed."""
    home, outside = ATTACKED / "home", ATTACKED / "outside"

    def reach(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(str(path))

    return {
        "read a key": tried((home / ".ssh" / "id_ed25519").read_text),
        "read another run's key": tried((home / ".prime-node" / "identity.key").read_text),
        "list the home": tried(lambda: found([path for path in home.iterdir() if path.name == ".ssh"])),
        "append to .bashrc": tried(lambda: (home / ".bashrc").open("a").write("evil")),
        "replace by rename": tried(lambda: Path("model").rename(home / ".profile")),
        "link a secret": tried(lambda: os.link(home / ".ssh" / "id_ed25519", "stolen")),
        "change a mode": tried(lambda: (home / ".ssh" / "id_ed25519").chmod(0o777)),
        "touch": tried(lambda: os.utime(home / ".bashrc", (0, 0))),
        "write outside": tried(lambda: (outside / "new").write_text("evil")),
        "shared memory": tried((Path("/dev/shm") / os.environ["PRIME_TEST_SHARED"]).read_bytes),
        "socket file": tried(lambda: reach(outside / "agent.sock")),
        "abstract socket": tried(lambda: reach(Path("\0" + os.environ["PRIME_TEST_SHARED"]))),
        "kill the parent": tried(lambda: os.kill(os.getppid(), signal.SIGCONT)),
        "environment of the parent": tried(Path(f"/proc/{os.getppid()}/environ").read_bytes),
        "root of the parent": tried(lambda: list(Path(f"/proc/{os.getppid()}/root/etc").iterdir())),
        "set the core pattern": tried(lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))),
        "write back caches": tried(lambda: os.close(os.open("/proc/sys/vm/drop_caches", os.O_WRONLY))),
        "raw disk": tried(lambda: found([path.open("rb").read(1) for path in Path("/dev").glob("[vs]d[a-z]")])),
        "own variables": tried(lambda: found(os.environ.get("MY_TOKEN"))),
        "own variables as they came": tried(lambda: found(b"in-the-env" in Path("/proc/self/environ").read_bytes())),
    }


def write_anywhere(folder: Path, name: str, data: bytes) -> None:
    """Treat a name as a path, as before the check. A refusal does not end the attack."""

    def write() -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    OUTCOMES[name] = tried(write)
    if name == LAST:
        os.chdir(folder.parent)
        (folder.parent / REPORT).write_text(json.dumps({"files": OUTCOMES, "attacks": attacks()}))
        os._exit(42)


def leave_out(restriction: str) -> None:
    """Remove this restriction, to simulate another mistake in addition to the first."""
    from prime_node.adapters.sandbox import landlock, namespaces
    from prime_node.adapters.sandbox.rules import Restriction

    if restriction == "landlock":
        landlock.restrict_access = lambda rules: []
    if restriction == "namespaces":
        namespaces.enter_namespaces = lambda view: Restriction(namespaces.WHAT, False, "left out by a test")


if __name__ == "__main__":
    model_folder.require_listed = lambda files: None
    pinned.is_stored = lambda folder, file: False
    pinned.store_model_file = write_anywhere
    leave_out(sys.argv[1])
    sys.argv[1:2] = []
    main()
