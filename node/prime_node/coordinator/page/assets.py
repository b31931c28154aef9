"""The page's own files, compressed once. Their paths hold a digest of all of them, so that browsers keep them without asking."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

TYPES = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""Headers of everything that a browser shows: own scripts and styles only, no frames, no strings that become code."""


@dataclass(frozen=True, slots=True)
class PageFiles:
    """The files by name, and the digest that their paths begin with."""

    digest: str
    index: bytes
    """The document, compressed. It names the other files under /page/DIGEST-NAME."""
    files: dict[str, bytes]
    """Name -> compressed bytes."""


@cache
def page_files() -> PageFiles:
    """Return the page's files."""
    folder = resources.files(__package__).joinpath("assets")
    found = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES}
    digest = hashlib.sha256(b"".join(name.encode() + found[name] for name in sorted(found))).hexdigest()[:12]
    index = found.pop(INDEX).replace(b"{digest}", digest.encode())
    return PageFiles(
        digest,
        zipped(index),
        {name: zipped(data.replace(b"{digest}", digest.encode())) for name, data in found.items()},
    )


def zipped(data: bytes, level: int = 9) -> bytes:
    """Compress data; the same data give the same bytes."""
    return gzip.compress(data, level, mtime=0)
