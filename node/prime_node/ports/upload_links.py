"""The connections over which a machine uploads: what the system knows of each, and how fast it may send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LinkReading:
    """One connection now. Example: LinkReading(3, 0.055, 0.040, 1_448_000, 43_440)."""

    link: int
    """Number that names the connection for as long as it is open."""
    round_trip_s: float
    """Round-trip time, smoothed over the last acknowledgements."""
    round_trip_s_min: float
    """Smallest round-trip time to the same host of the last minutes."""
    acked_bytes: int
    """Bytes that the other side has acknowledged, since the connection was made."""
    unacked_bytes: int
    """Bytes that were sent and are not acknowledged."""


class UploadLinks(Protocol):
    """Connections of one machine."""

    def readings(self) -> Sequence[LinkReading]:
        """Return a reading of each open connection that has measured a round trip."""
        ...

    def limit(self, link: int, bytes_per_s: float) -> None:
        """Send at most this fast on a connection, without bursts; 0 lifts the limit. One that is closed is left alone."""
        ...
