"""Handing a signed document, such as a key ring, to the coordinator of a run, which may be stopped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prime_node.cli.run_dir import RunDir
from prime_node.cli.target import answering
from prime_node.files import write_durably
from prime_node.folder_lock import FolderInUse, FolderLock
from prime_node.inside import place
from prime_protocol.envelope import Envelope
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.cli.wire import HttpClient

    Send = Callable[[HttpClient], Awaitable[None]]


async def hand_over(
    run_dir: RunDir, name: str, envelope: Envelope, send: Send, check: Callable[[], Awaitable[None]] | None = None
) -> bool:
    """Send a document to the run's coordinator, or store it under its name as the coordinator would. Return whether one runs.

    `check` is made before it is stored. Raises RemoteError if it is refused, LocalError.
    """
    try:
        lock = FolderLock(run_dir.coordinator)
    except FolderInUse:
        await send_to(str(run_dir.join_link()), send)
        return True
    path = place(run_dir.public, name)
    with lock:
        if check is not None:
            await check()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, envelope.to_bytes())
        except OSError as error:
            raise LocalError(f"{path}: {error.strerror}") from None
    return False


async def send_to(url: str, send: Send) -> None:
    """Send a document to the coordinator at an address. Raises RemoteError if it is refused, LocalError."""
    from prime_node.cli import wire

    with answering(url):
        async with wire.public_source(url) as client:
            await send(client)
