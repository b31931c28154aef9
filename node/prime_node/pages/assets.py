"""A page's files, compressed once. Their paths hold a digest of all of them, so that browsers keep them without asking.

Each page has a folder `assets` of its own; `shared` has the files of all pages.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from prime_node.ports.web import Request, Response
from prime_protocol.errors import ErrorCode, RemoteError

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
def page_files(package: str) -> PageFiles:
    """Return the files of a page: the shared ones, and those in the folder `assets` of its package."""
    folders = resources.files(__package__).joinpath("shared"), resources.files(package).joinpath("assets")
    files = [file for folder in folders for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES]
    found = {file.name: file.read_bytes() for file in files}
    assert len(found) == len(files), "a page's file has the name of a shared one"
    digest = hashlib.sha256(b"".join(name.encode() + found[name] for name in sorted(found))).hexdigest()[:12]
    index = found.pop(INDEX).replace(b"{digest}", digest.encode())
    return PageFiles(
        digest,
        zipped(index),
        {name: zipped(data.replace(b"{digest}", digest.encode())) for name, data in found.items()},
    )


def index_answer(request: Request, package: str) -> Response:
    """Return the document of a page."""
    return zipped_answer(request, page_files(package).index, TYPES["html"])


def file_answer(request: Request, package: str) -> Response:
    """Return one of a page's files, by the parameter `name` of the path. Raises RemoteError(NOT_FOUND)."""
    digest, _, name = request.params["name"].partition("-")
    files = page_files(package)
    if digest != files.digest or name not in files.files:
        raise RemoteError(ErrorCode.NOT_FOUND, "the page has no such file; load the page again")
    kind = TYPES[name.rpartition(".")[2]]
    return zipped_answer(request, files.files[name], kind, caching="public, max-age=31536000, immutable")


def zipped_answer(
    request: Request, data: bytes, kind: str = "application/json", *, caching: str = "no-cache"
) -> Response:
    """Return compressed data, decompressed for a caller that cannot read them."""
    headers = {"Cache-Control": caching, "Vary": "Accept-Encoding", **PAGE_HEADERS}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(gzip.decompress(data), content_type=kind, headers=headers)
    return Response(data, content_type=kind, headers={"Content-Encoding": "gzip", **headers})


def zipped(data: bytes, level: int = 9) -> bytes:
    """Compress data; the same data give the same bytes."""
    return gzip.compress(data, level, mtime=0)
