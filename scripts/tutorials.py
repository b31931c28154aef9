"""Run the commands of docs/tutorials/ as their readers do, with the packages of each role, outside of the checkout.

A block of commands below `<!-- run by scripts/tutorials.py -->` is run. `tests/e2e/test_roles.py` calls `follow` with linked
packages, `scripts/release --check` with what the tutorials' own lines install from a release folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ("docs/tutorials/operator.md", "docs/tutorials/auditor.md")
"""Their commands are those of one run."""
RESEARCHER = ("docs/tutorials/researcher.md", "docs/tutorials/reward.md")
CONTRIBUTOR = "docs/tutorials/contributor.md"
MARK = "<!-- run by scripts/tutorials.py -->"
ROLE_OF = {
    "new": "trainer",
    "coordinator": "operator",
    "trainer": "trainer",
    "validator": "validator",
    "join": "worker",
    "status": "operator",
    "verify": "verifier",
    "ledger": "verifier",
    "replay": "trainer",
}
"""The role whose packages a command gets."""
ON_ONE_MACHINE = {"up": "trainer", "status": "trainer", "verify": "trainer"}
"""The same for the researcher, who has one installation."""
IN_BACKGROUND = ("coordinator", "trainer", "validator")
"""Commands for a terminal of their own. The worker's ends with the run, so `join` is waited for."""
LAST_S = 540.0
"""Seconds that a command may take: an installation's first ones compile kernels, which takes minutes on a busy machine."""


def commands(document: str) -> list[str]:
    """Return the command lines of a document that are run, in order."""
    blocks = re.findall(rf"^{MARK}\n```\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def roles_of(document: str) -> tuple[str, ...]:
    """Return the roles that the installation line of a document names, in order."""
    (line,) = re.findall(r"^python3 -I install\.py((?: --role \w+)+)", (ROOT / document).read_text(), re.MULTILINE)
    return tuple(line.split()[1::2])


def files(document: str) -> dict[str, str]:
    """Return the files that a document has its reader save, by name."""
    found = re.findall(
        r"[Ss]ave it as `([\w.]+)`:\n\n```\w+\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL
    )
    return dict(found)


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def follow(
    programs: Mapping[str, Path],
    folder: Path,
    documents: Sequence[str] = TUTORIALS,
    role_of: Mapping[str, str] = ROLE_OF,
) -> Iterator[str]:
    """Run the tutorials in a folder. Yield each command after it has ended well, or has started in the background.

    Args:
        programs: the folder of the program `prime-node` of each role.
        folder: an empty folder; it is the home, too.
        documents: whose commands are run.
        role_of: the role of each command.

    Raises:
        AssertionError: a command failed; the message has its output and the last lines of those in the background.
    """
    port = free_port()
    with contextlib.ExitStack() as roles:
        for document in documents:
            for name, text in files(document).items():
                (folder / name).write_text(text)
            for line in commands(document):
                words = line.split()
                name = words[1] if words[0] == "prime-node" else ""
                place = f"{programs[role_of[name]]}{os.pathsep}" if name else ""
                environment = {"PATH": place + os.environ["PATH"], "HOME": str(folder), "COLUMNS": "200"}
                shell = ["sh", "-c", line.replace(":8400", f":{port}")]
                with (folder / f"{name or 'shell'}.log").open("ab") as log:
                    ran = subprocess.Popen(
                        shell, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                roles.callback(_stop, ran)
                if name not in IN_BACKGROUND:
                    _must_end_well(ran, line, folder)
                yield line


def _must_end_well(ran: subprocess.Popen[bytes], line: str, folder: Path) -> None:
    try:
        code: int | str = ran.wait(timeout=LAST_S)
    except subprocess.TimeoutExpired:
        code = f"no end after {LAST_S:.0f} s"
    if code != 0:
        logs = (f"== {path.name}\n{path.read_text()[-2_000:]}" for path in sorted(folder.glob("*.log")))
        raise AssertionError("\n".join([f"{line}: {code}", *logs]))


def _stop(ran: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(ran.pid, signal.SIGTERM)
    try:
        ran.wait(timeout=LAST_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
