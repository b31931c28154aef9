"""The operator of a run: signs their orders and invitations with a key of the run's folder. Commands and page use it.

A signed document, such as a key ring, is handed to a run's coordinator, which may be stopped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prime_node.cli.run_dir import RunDir
from prime_node.cli.run_status import named_keys
from prime_node.cli.target import answering
from prime_node.files import write_durably
from prime_node.folder_lock import FolderInUse, FolderLock
from prime_node.inside import place
from prime_node.keyfile import load_key
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.invite import Invite
from prime_protocol.requests import AdminRequest
from prime_protocol.run_spec import JoinLink, PinnedRun

if TYPE_CHECKING:
    from prime_node.cli.wire import HttpClient

    Send = Callable[[HttpClient], Awaitable[None]]


DAY_MS = 86_400_000
ENDING_MIN = 6
"""Minimum number of final characters that may stand for a key id."""
KEY_ID_MIN = 50
"""Minimum length of a complete key id."""


@dataclass(frozen=True, slots=True)
class Operator:
    """The operator of one run, on a machine with the run's folder."""

    run_dir: RunDir
    run: PinnedRun
    link: JoinLink
    key: SigningKey

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the operator of the run in a folder. Raises LocalError."""
        run_dir = RunDir(folder)
        return cls(run_dir, run_dir.load_run(), run_dir.join_link(), _key(run_dir))

    async def order(self, request: AdminRequest) -> None:
        """Have the coordinator carry out an action. Raises RemoteError, and LocalError if the coordinator does not answer."""
        from prime_node.cli import wire

        with answering(f"the coordinator at {self.link.url}"):
            async with wire.client(self.link, self.key) as client:
                client.also_at(self.run.spec.coordinators)
                await client.admin(request)

    async def whole_key(self, ending: str) -> str:
        """Return the only key id with this ending. Raises LocalError if there is none or more than one."""
        if len(ending) >= KEY_ID_MIN:
            return ending
        found = await named_keys(self.link.url, ending) if len(ending) >= ENDING_MIN else []
        if len(found) != 1:
            raise LocalError(
                f"{len(found) or 'no'} keys end in {ending!r}, and {ENDING_MIN} characters or more must name one: "
                f"`prime-node status {self.run_dir.path}` shows their last 8, with --json all of them"
            )
        return found[0]

    def invite(self, *, keys: int, days: float) -> JoinLink:
        """Return a join link with an invitation for a number of keys. This needs no network."""
        invitation = Invite(
            run=self.run.digest,
            invite=secrets.token_hex(16),
            keys_max=keys,
            expires_at_ms=time.time_ns() // 1_000_000 + round(days * DAY_MS),
        )
        return replace(self.link, invite=seal(invitation, PayloadType.INVITE, self.key).to_base64())


def _key(run_dir: RunDir) -> SigningKey:
    for role in ("coordinator", "root"):
        if run_dir.key(role).exists():
            return load_key(run_dir.key(role))
    raise LocalError(
        f"{run_dir.path} holds neither keys/coordinator.key nor keys/root.key: run this where one of them is"
    )


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
