"""The targets of `verify` and `keys`: a join link, a URL, a run directory or a published folder."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli.place import is_url, named_in
from prime_node.cli.run_dir import RunDir
from prime_node.ports.documents import RUN_NAME
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.ports.transport import ReplaySource
    from prime_protocol.identity import SigningKey


def expected_run(target: str) -> str | None:
    """Return the digest that the target's run must have: of a join link, or of the link file in a run directory.

    The link file comes with the directory, so its digest pins nothing for the user: see `named_in`.
    """
    if is_url(target):
        return named_in(target)
    run_dir = RunDir(Path(target))
    return run_dir.join_link().run if run_dir.join_link_file.exists() else None


@contextlib.asynccontextmanager
async def open_source(
    target: str, *, key: SigningKey | None = None, run: str | None = None
) -> AsyncIterator[ReplaySource]:
    """Open the source of the target's bytes. Raises LocalError if it is neither a URL nor a folder.

    `key` signs requests for what only auditors may read, to the run with digest `run`.
    """
    from prime_node.cli import wire

    if is_url(target):
        async with wire.public_source(target, key=key, run=run) as source:
            yield source
        return
    yield wire.folder_source(published_folder(target), archived=RunDir(Path(target)).archived)


@contextlib.contextmanager
def answering(source: str) -> Iterator[None]:
    """Raise LocalError if a source does not answer. `source` is its name for messages."""
    try:
        yield
    except Unreachable as error:
        raise LocalError(f"{source} does not answer: {error}") from None


def published_folder(target: str) -> Path:
    """Return the published folder of a target. Raises LocalError if nothing is published there."""
    public = RunDir(Path(target)).public
    folder = public if public.is_dir() else Path(target)
    if not (folder / RUN_NAME).is_file():
        raise LocalError(
            f"{target} holds no published checkpoint: no run.json in it. Give a run directory, its public folder or a URL"
        )
    return folder
