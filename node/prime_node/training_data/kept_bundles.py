"""The trainer's copies of the bundles that it may have to train on again after a kill: those of the steps since its checkpoint.

A step is computed again exactly, so the same bundles must be there, and those that were left out must be left out again. If the
coordinator's disk damages one meanwhile, the copy is used. A copy is not synced: after a power loss it may be empty, and the
coordinator's is fetched. So what marks a bundle as left out is not an empty file.
"""

from __future__ import annotations

import logging
from pathlib import Path

from prime_node.files import read_or_begin, replace
from prime_protocol.digest import digest_of, is_digest

_LEFT_OUT = b"left out\n"
"""Content of the file of a bundle that was left out."""

log = logging.getLogger(__name__)


class KeptBundles:
    """Copies in a folder. Several threads may use it, for different bundles."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._step_of: dict[str, int | None] = {path.name: None for path in folder.iterdir() if is_digest(path.name)}
        """Newest step that uses a copy; None for one of an earlier process that no step has asked for."""
        self._is_full = False

    def read(self, digest: str, step: int) -> bytes | None:
        """Return a bundle, empty if it was left out; None if there is no intact copy."""
        if digest not in self._step_of:
            return None
        self._step_of[digest] = step
        data = read_or_begin(self._folder / digest)
        if data == _LEFT_OUT:
            return b""
        if digest_of(data) != digest:
            log.warning("the copy %s is damaged: it is fetched again", self._folder / digest)
            return None
        return data

    def keep(self, digest: str, data: bytes, step: int) -> None:
        """Keep a copy of a bundle; empty `data` marks one that is left out. Without room, only the coordinator has it."""
        try:
            replace(self._folder / digest, data or _LEFT_OUT)
        except OSError as error:
            if not self._is_full:
                log.warning("bundles are not kept in %s: %s", self._folder, error)
            self._is_full = True
            return
        self._step_of[digest] = step

    def forget(self, durable_step: int, step: int) -> None:
        """Delete the copies of the steps before `durable_step`, when `step` is trained. Idempotent."""
        for digest, used in list(self._step_of.items()):
            if used is None:  # asked for by no step until now: older than the checkpoint, or of a step still to come
                self._step_of[digest] = step
            elif used < durable_step:
                (self._folder / digest).unlink(missing_ok=True)
                del self._step_of[digest]
