"""`prime-node upgrade`: install a newer release next to this one, and keep this one if the new one does not start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from prime_node.cli.missing_extra import recorded_installation
from prime_node.cli.place import given_link
from prime_node.cli.say import say
from prime_node.inside import read_inside
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.identity import PublicKey

INSTALLER = "install.py"
FILE_BYTES_MAX = 1 << 20
FILE_S_MAX = 120.0
"""Seconds for one small file of a release: a source that sends a byte a minute would take years."""
_VERSION = re.compile(r"\d{1,6}\.\d{1,6}\.\d{1,6}")


def upgrade(
    source: Annotated[
        str | None, typer.Option("--from", help="Folder or URL of the release [that of the last one].")
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            help="Join link: keep this version if the new one fails for that run; - reads it from standard input."
        ),
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Show what is new, and install nothing.")] = False,
) -> None:
    """Install the newest release after a check of its signature. The version before it is kept.

    Exit code 3: the release is not signed by the key of the first installation, is older, or does not start; nothing has changed.
    """
    folder, kept = _installation()
    where = source or kept["source"]
    text = _read(where, "release.json")
    try:
        PublicKey(bytes.fromhex(kept["key"])).verify(_read(where, "release.json.sig"), text)
    except (RemoteError, ValueError) as error:
        raise LocalError(f"{where}: release.json is not signed by the key of this installation ({error})") from None
    release = json.loads(text)
    running = Path(sys.prefix).name.partition("-")[0]
    if _number_of(release["version"]) < _number_of(running):
        raise LocalError(f"{where}: {release['version']} is older than {running}, which is installed")
    if release["version"] == running:
        say(f"prime-node {running} is up to date")
        return
    say(f"{release['version']} is there", *release["notes"].splitlines())
    if check:
        return
    _run_installer(_read(where, INSTALLER), release, where, given_link(link), folder, kept)


def _installation() -> tuple[Path, dict[str, Any]]:
    """Return what the installer has recorded, and where. Raises LocalError for an installation by other means."""
    if (found := recorded_installation()) is None:
        raise LocalError(
            f"{sys.prefix} was not made by install.py of a release as this user, so only what made it can upgrade it: "
            "pip, uv, pipx, git or that user"
        )
    folder, kept = found
    if lacking := [name for name in ("source", "key", "bin", "roles") if not kept.get(name)]:
        raise LocalError(
            f"{folder / 'install.json'} lacks {', '.join(lacking)}: call `python3 -I install.py --role ROLE` of a release "
            "once, which writes it again"
        )
    return found


def _number_of(version: str) -> tuple[int, ...]:
    """Return a version in a form to compare. Raises LocalError for another form."""
    if _VERSION.fullmatch(version) is None:
        raise LocalError(f"{version[:100]!r} is no version of the form 1.2.3")
    return tuple(map(int, version.split(".")))


def _base_python() -> str:
    """Return the Python that this environment was made with, and which has no packages of it. Raises LocalError."""
    folder = Path(sys.base_prefix) / "bin"
    named = (folder / f"python{sys.version_info[0]}.{sys.version_info[1]}", folder / "python3")
    for path in (Path(getattr(sys, "_base_executable", "") or sys.executable), *named):
        if path.is_file() and not path.is_relative_to(sys.prefix):
            return str(path)
    raise LocalError(
        f"{folder} has no python3 any more, with which this was installed: call install.py with another Python"
    )


def _read(source: str, name: str) -> bytes:
    """Return a small file of a release, from a folder or by HTTP. Raises LocalError."""
    from http.client import HTTPException

    try:
        if source.startswith(("https://", "http://")):
            data: bytes | None = _downloaded(f"{source.rstrip('/')}/{name}")
        else:
            data = read_inside(Path(source), name, bytes_max=FILE_BYTES_MAX)
    except (OSError, ValueError, HTTPException) as error:
        raise LocalError(f"{source}: {name} cannot be read ({error})") from None
    if data is None or len(data) > FILE_BYTES_MAX:
        raise LocalError(f"{source}: {name} is missing, or larger than {FILE_BYTES_MAX} bytes")
    return data


def _downloaded(url: str) -> bytes:
    """Return what an address sends, up to one byte too many. Raises OSError, ValueError and HTTPException."""
    from concurrent.futures import Future
    from threading import Thread
    from urllib.error import HTTPError
    from urllib.request import urlopen

    found: Future[bytes] = Future()

    def read() -> None:
        try:
            with urlopen(url, timeout=60) as answer:
                found.set_result(answer.read(FILE_BYTES_MAX + 1))
        except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
            if isinstance(error, HTTPError):
                error.close()  # it is the answer, too
            found.set_exception(error)

    Thread(target=read, daemon=True).start()  # the timeout above is for each packet, also of the header
    try:
        return found.result(FILE_S_MAX)
    except TimeoutError:
        raise TimeoutError(f"it took more than {FILE_S_MAX:.0f} s") from None


def _run_installer(
    installer: bytes, release: dict[str, Any], source: str, link: str, folder: Path, kept: dict[str, Any]
) -> None:
    """Run the release's own installer, whose digest is signed. Raises LocalError if it changes nothing.

    It reads the link from standard input, because other users see arguments and a link may hold an invitation.
    """
    from hashlib import sha256

    if sha256(installer).hexdigest() != release["files"].get(INSTALLER):
        raise LocalError(f"{INSTALLER} has another digest than release.json")
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "install.py"
        program.write_bytes(installer)
        roles = [word for role in kept["roles"] for word in ("--role", role)]
        options = ["--key", kept["key"], "--bin", kept["bin"], "--from", source, "--link", "-", "--to", str(folder)]
        command = [_base_python(), "-I", str(program), *roles, *options]
        ran = subprocess.run(command, input=link, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise LocalError(ran.stderr.strip().removeprefix("install: ") or "the installer failed without a message")
    say(*ran.stdout.splitlines(), "a service uses the old version until `prime-node service install` is called again")
