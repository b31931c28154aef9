"""The only place where adapters are chosen. Everything is imported on use: `verify` must not wait for torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import JoinLink, PinnedRun, RunSpec, open_run_spec

if TYPE_CHECKING:
    from prime_node.adapters.folder_source import FolderSource
    from prime_node.adapters.http_client import HttpClient
    from prime_node.adapters.system_clock import SystemClock
    from prime_node.broadcast.audit import AuditReport
    from prime_node.broadcast.follower import Follower
    from prime_node.ports.engine import Engine, Scorer
    from prime_node.ports.environment import Environment, Tokenizer


def clock() -> SystemClock:
    from prime_node.adapters.system_clock import SystemClock

    return SystemClock()


# Where things come from


@contextlib.asynccontextmanager
async def connect(link: JoinLink, key: SigningKey | None) -> AsyncIterator[tuple[HttpClient, PinnedRun]]:
    """A client of the coordinator, and the run, checked against the link. Raises PeerError or Unreachable."""
    from prime_node.adapters.http_client import HttpClient

    async with HttpClient(link.url, run=link.run, clock=clock(), key=key) as client:
        pinned = open_run_spec(await client.run_spec(), pinned=link.run)
        client.bounds = pinned.spec.limits
        yield client, pinned


@contextlib.asynccontextmanager
async def public_source(url: str) -> AsyncIterator[HttpClient]:
    """The public half of a coordinator or of a mirror."""
    from prime_node.adapters.http_client import HttpClient

    parts = urlsplit(url)
    base = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    async with HttpClient(base, run=parts.fragment, clock=clock()) as client:
        yield client


def folder_source(folder: Path) -> FolderSource:
    from prime_node.adapters.folder_source import FolderSource

    return FolderSource(folder)


async def audit_folder(folder: Path, run: PinnedRun, *, chain: bool) -> AuditReport:
    from prime_node.broadcast.audit import audit

    return await audit(folder_source(folder), run.digest, chain=chain)


async def get_json(url: str) -> dict[str, Any] | None:
    """A JSON object of our own coordinator; None where it does not answer."""
    import aiohttp

    try:
        async with aiohttp.request("GET", url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
            if answer.status != 200:
                return None
            body = await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    try:
        value = json.loads(body or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def follower(run: PinnedRun, client: HttpClient, folder: Path, *, policies_kept: int) -> Follower:
    from prime_node.broadcast.follower import Follower

    return Follower(run, [(client.url, client)], folder / "checkpoints", clock=clock(), policies_kept=policies_kept)
