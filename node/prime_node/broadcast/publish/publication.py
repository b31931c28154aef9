"""What a publication brings with it, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Published:
    """One policy that was announced."""

    policy_version: int
    state_root: str
    raw_bytes: int
    """Bytes of all tensors."""
    encodings: Mapping[str, int]
    """Bytes of each encoding: "anchor", "delta_1" for the one from the policy before, "delta_4" and so on."""
    seconds: float
    """Duration from the start of its turn."""
    encode_seconds: float
    """Part of `seconds` until everything was encoded."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that a worker that keeps up downloads for it."""
        return self.encodings.get("delta_1", self.encodings.get("anchor", min(self.encodings.values())))

    @property
    def ratio(self) -> float:
        """Ratio of raw to sent bytes."""
        return self.raw_bytes / max(1, self.sent_bytes)


class Attachment(Protocol):
    """Further public blobs of a policy, which its provenance names."""

    def blobs(self) -> Iterator[Callable[[], bytes]]:
        """Yield a function for each blob, which reads it."""
        ...

    def drop(self) -> None:
        """Release what holds them. Idempotent."""
        ...
