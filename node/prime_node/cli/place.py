"""Location of a trusted role's run: a run directory made by `prime-node new`, or a join link with a key of its own."""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from prime_node.cli.run_dir import RunDir
from prime_node.files import disk_faults
from prime_node.folder_lock import FolderLock
from prime_node.inside import read_regular, refuse_links
from prime_node.keyfile import load_key
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.invite import invited_run
from prime_protocol.run_spec import JoinLink, PinnedRun

log = logging.getLogger(__name__)

HOME = Path.home() / ".prime-node"
"""Folder of a contributor's key, and of its roles' data if no folder is named."""
LINK_CHARS_MAX = 2**14
"""Characters of a join link that are read from standard input or a file."""

Link = Annotated[str, typer.Argument(help="Join link, http://host:port/#<64 hex digits>; - or a file: its first line.")]
Run = Annotated[str, typer.Argument(help="Run directory, or join link (then --key and --folder are needed).")]
GatewayRun = Annotated[str, typer.Argument(help="Run directory, or join link (then --set gateway.key=FILE is needed).")]
Key = Annotated[
    Path | None, typer.Option("--key", help="Private key of the role; the run directory's own if left out.")
]
OwnKey = Annotated[Path | None, typer.Option(help="Key file, made on first use [FOLDER/identity.key].")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Where the role keeps its state.")]


@dataclass(frozen=True, slots=True)
class Place:
    """Run, key and folder of a role."""

    link: JoinLink
    key: SigningKey
    folder: Path
    lock: FolderLock
    """Lock that is held as long as the process lives."""


def find_place(run: str, role: str, *, key: Path | None, folder: Path | None) -> Place:
    """Find the run, key and folder of a role. Raises LocalError if something is missing."""
    if is_url(run):
        if key is None or folder is None:
            raise LocalError(f"with a join link, {role} needs --key FILE and --folder DIR")
        return Place(parse_link(run), load_key(key), folder, FolderLock(folder))
    run_dir = RunDir(Path(run))
    run_dir.load_run()
    refuse_links(run_dir.model)
    place = folder or run_dir.path / role
    return Place(run_dir.join_link(), load_key(key or run_dir.key(role)), place, FolderLock(place))


def worker_folders() -> list[Path]:
    """Return the folders, below HOME, in which workers have run, the newest last."""
    found = [path.parent for path in (HOME / "runs").glob("*/status.json")]
    return sorted(found, key=lambda folder: (folder / "status.json").stat().st_mtime)


def given_link(text: str) -> str:
    """Return the join link of an argument: `-` is the first line of standard input, and a path that of the file.

    Other users see neither, but they see an argument: a link that holds an invitation gets a warning. Raises LocalError.
    """
    if text == "-":
        return sys.stdin.readline(LINK_CHARS_MAX) if sys.stdin else ""  # None if it is closed
    if (file := _named_file(text)) is not None:
        with disk_faults(file):
            return read_regular(file, bytes_max=LINK_CHARS_MAX).decode("utf-8", "replace").partition("\n")[0]
    with contextlib.suppress(ValueError):  # it is named where the link is used
        if JoinLink.parse(text).invite:
            log.warning(
                "other users of this machine see the invitation in this argument; `-` or a file in its place hides it"
            )
    return text


def _named_file(text: str) -> Path | None:
    """Return the file or folder that an argument names; None if there is none."""
    try:
        file = Path(text).expanduser()
        return file if text and not is_url(text) and file.exists() else None
    except (OSError, RuntimeError):  # too long for a name, or the home of no user
        return None


def parse_link(text: str) -> JoinLink:
    """Parse a join link. Raises LocalError because a person typed or pasted it."""
    try:
        return JoinLink.parse(text)
    except ValueError as error:
        raise LocalError(str(error)) from None


def invite_for(link: JoinLink, setting: str) -> str:
    """Return the invitation to send to a run: the link's, or else the one of the setting worker.invite if it is for this run.

    An invitation admits anyone who reads it, so no other run gets it. Raises LocalError if the setting is damaged.
    """
    if link.invite or not setting:
        return link.invite
    try:
        run = invited_run(setting)
    except RemoteError as error:
        raise LocalError(f"worker.invite is damaged: {error}") from None
    if run == link.run:
        return setting
    log.warning("worker.invite is for run %s: it is not sent to run %s", run[:12], link.run[:12])
    return ""


def coordinator_hosts(link: JoinLink, run: PinnedRun) -> tuple[str, ...]:
    """Return the host names under which clients reach a run's coordinator: with TLS, they ask no address without it."""
    asked = [url for url in run.spec.coordinators if url.startswith("https:") or link.url.startswith("http:")]
    return tuple(urlsplit(url).hostname or "" for url in (link.url, *asked))


def is_url(target: str) -> bool:
    """Return whether the target is an http or https address."""
    return target.startswith(("http://", "https://"))


def named_in(target: str) -> str | None:
    """Return the run's digest that the target itself names: the fragment of a join link, without an invitation.

    Raises LocalError for an address that is none.
    """
    try:
        return urlsplit(target).fragment.partition(".")[0] or None if is_url(target) else None
    except ValueError as error:
        raise LocalError(f"{target[:120]!r} is not an address: {error}") from None
