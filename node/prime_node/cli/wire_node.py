"""Parts of a worker for its contributor: the limits on its links and its engine, and its page on loopback."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.files import replace
from prime_node.inside import read_inside
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import Follower
    from prime_node.broadcast.swarm.peer import Peer
    from prime_node.worker.config import WorkerConfig
    from prime_node.worker.control import WorkLimits
    from prime_node.worker.status import Traffic
    from prime_node.worker.worker import Worker

log = logging.getLogger(__name__)

PAGE_FILE = "page.json"
"""File in the worker's folder that holds the page's address, readable by its owner only."""
PAGE_FILE_BYTES_MAX = 1_024
STOP_S = 0.2
_ADDRESS = re.compile(r"http://(127\.0\.0\.1|\[::1\]):[0-9]{1,5}/#[A-Za-z0-9_-]{43}", re.ASCII)


def limited_settings(settings: WorkerConfig, folder: Path) -> WorkerConfig:
    """Return the settings with the contributor's limits on the engine, as they are at its start."""
    from prime_node.worker.control import read_control

    try:
        limits = read_control(folder).limits or settings.limits
    except LocalError:
        return settings  # the worker waits, and says why
    found = {"threads": limits.threads, "gpu_memory_share": limits.gpu_memory_share}
    return settings.model_copy(update={name: value for name, value in found.items() if value is not None})


def limit_links(settings: WorkerConfig, follower: Follower, peer: Peer | None, limits: WorkLimits) -> None:
    """Limit downloads and uploads from now on."""
    swarm = settings.swarm
    found = {"upload_mbit_per_s": limits.upload_mbit_per_s, "download_mbit_per_s": limits.download_mbit_per_s}
    swarm = swarm.model_copy(update={name: value for name, value in found.items() if value is not None})
    follower.rate.change(swarm.download_bytes_per_s)
    if peer is not None:
        peer.service.uplink.rate.change(swarm.upload_bytes_per_s)


def links_of(follower: Follower, peer: Peer | None) -> Traffic:
    """Return the present state of the links to peers, and what they have moved."""
    from prime_node.worker.status import Traffic

    received, keys, now = follower.received, follower.run.keys.current, follower.download
    operators = {*keys.coordinator, *keys.trainer, *(source.name for source in follower.pool.lasting)}
    traffic = Traffic(
        down_bytes=sum(received.values()),
        peer_bytes=sum(received[name] for name in received.keys() - operators),
        done_bytes=0 if now is None else now.bytes_done,
        all_bytes=0 if now is None else now.bytes_total,
    )
    if peer is None:
        return traffic
    up_bytes = peer.service.uplink.served_bytes
    return changed(traffic, peers=peer.num_linked, up_bytes=up_bytes, text=peer.describe())


@contextlib.asynccontextmanager
async def node_page(worker: Worker, link: str) -> AsyncIterator[None]:
    """Serve the worker's page on loopback while the context is open, unless it is off. A page that fails stops no work."""
    settings = worker.config.page
    forget_address(worker.folder)  # of a start that was killed
    if not settings.enabled:
        yield
        return
    from prime_node.adapters.web.aiohttp_server import AiohttpServer
    from prime_node.pages.loopback import LoopbackGate, is_loopback_host
    from prime_node.ports.web import CallerBounds
    from prime_node.worker.page.node_view import NodePages

    gate, server = LoopbackGate(), AiohttpServer()
    routes = NodePages(worker, gate, link).routes()
    bounds = CallerBounds(is_host=is_loopback_host)
    try:
        port = await server.start(routes, host=settings.host, port=settings.port, bounds=bounds)
    except LocalError as error:
        log.warning("no page in the browser: %s", error)
        yield
        return
    address = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}/"
    gate.on_key = lambda key: write_address(worker.folder, address, key)
    gate.renew()
    shown = f"{address}#{gate.key}" if sys.stderr.isatty() else f"{address} (`prime-node open` shows the whole address)"
    worker.say(f"this machine's page: {shown}")
    try:
        yield
    finally:
        forget_address(worker.folder)
        await server.stop(grace_s=STOP_S)


def forget_address(folder: Path) -> None:
    """Remove the page's address. A file that stays leads to no page, and stops no work."""
    try:
        (folder / PAGE_FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("page %s: %s", folder / PAGE_FILE, error)


def write_address(folder: Path, address: str, key: str) -> None:
    """Write the page's address and the key of its next session, for `prime-node open`."""
    before = os.umask(0o077)
    try:
        replace(folder / PAGE_FILE, json.dumps({"address": address, "key": key}).encode())
    except OSError as error:
        log.warning("page %s: %s", folder / PAGE_FILE, error)
    finally:
        os.umask(before)


def read_address(folder: Path) -> str:
    """Return an address that opens the page once. Raises OSError, and ValueError for a file that holds none.

    The worker writes the file and is confined; the browser that gets the address is not. If a hostile run took the worker over,
    any other text could be an option of the browser's program, or lead it elsewhere.
    """
    if not (folder / PAGE_FILE).exists():
        raise FileNotFoundError(PAGE_FILE)
    try:
        found = json.loads(read_inside(folder.resolve(), PAGE_FILE, bytes_max=PAGE_FILE_BYTES_MAX) or b"{}")
    except RecursionError:
        found = None
    shown = f"{found.get('address')}#{found.get('key')}" if isinstance(found, dict) else ""
    if _ADDRESS.fullmatch(shown) is None:
        raise ValueError("it holds no address of a page on this machine; start the worker again")
    return shown
