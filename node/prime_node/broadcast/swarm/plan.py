"""What a download asks the machine's links to peers: which pieces first, and from which peers."""

from __future__ import annotations

from typing import Protocol


class DownloadPlan(Protocol):
    """The choices of one machine among many that download the same encoding: implemented by the links to peers."""

    def share(self, encoding: str, num_pieces: int) -> tuple[float, float]:
        """Return the part of an encoding of so many pieces that this machine requests first."""
        ...

    def parents(self, sent_bytes: int) -> frozenset[str] | None:
        """Return the peers to ask exclusively at first for so many bytes: our parents in the tree. None: all peers."""
        ...

    async def prepare(self) -> None:
        """Prepare the links to peers for requests that come soon."""
        ...


class NoPeers:
    """Implementation of DownloadPlan for a machine without links to peers."""

    def share(self, encoding: str, num_pieces: int) -> tuple[float, float]:
        """Return an empty part: no other machine requests the rest."""
        return 0.0, 0.0

    def parents(self, sent_bytes: int) -> frozenset[str] | None:
        """Return None: all sources are asked."""
        return None

    async def prepare(self) -> None:
        """Do nothing."""
