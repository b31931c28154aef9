"""Resources that clients share and must not use up for each other: memory and turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prime_node.ports.web import BodyShare
from prime_protocol.errors import ErrorCode, RemoteError

BUCKETS_MAX = 65_536
"""Networks remembered; the longest unused one is dropped first."""
BUSY_RETRY_S = 2.0


@dataclass(slots=True)
class _Used:
    num_bytes: int = 0
    num_bodies: int = 0


class Shares:
    """Bytes held, counted by the names of their shares. A name is dropped when nothing counts against it."""

    def __init__(self) -> None:
        self._used: dict[str, _Used] = {}

    def open(self, shares: Sequence[BodyShare]) -> HeldBytes:
        """Begin to hold a body. Raises RemoteError(UNAVAILABLE) if too much is held already."""
        for share in shares:
            used = self._used.get(share.name)
            if used is not None and used.num_bodies >= share.bodies_max:
                raise _busy(share)
        for share in shares:
            self._used.setdefault(share.name, _Used()).num_bodies += 1
        return HeldBytes(self, tuple(shares))

    def num_bytes(self, name: str) -> int:
        """Return how many bytes count against a share."""
        used = self._used.get(name)
        return 0 if used is None else used.num_bytes

    def grow(self, shares: Sequence[BodyShare], num_bytes: int) -> None:
        """Count more bytes. Raises RemoteError(UNAVAILABLE) if a share has no room; nothing is counted then."""
        for share in shares:
            if self._used[share.name].num_bytes + num_bytes > share.bytes_max:
                raise _busy(share)
        for share in shares:
            self._used[share.name].num_bytes += num_bytes

    def shrink(self, shares: Sequence[BodyShare], num_bytes: int) -> None:
        """Release what `open` and `grow` took."""
        for share in shares:
            used = self._used[share.name]
            used.num_bytes -= num_bytes
            used.num_bodies -= 1
            if not used.num_bodies:
                del self._used[share.name]


class HeldBytes:
    """One body, or one answer, that counts against its shares until it is closed."""

    def __init__(self, shares: Shares, names: tuple[BodyShare, ...]) -> None:
        self._shares, self._names = shares, names
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises RemoteError(UNAVAILABLE)."""
        self._shares.grow(self._names, num_bytes)
        self._num_bytes += num_bytes

    def close(self) -> None:
        """Release all counted bytes. Idempotent."""
        self._shares.shrink(self._names, self._num_bytes)
        self._names, self._num_bytes = (), 0


def _busy(share: BodyShare) -> RemoteError:
    return RemoteError(
        ErrorCode.UNAVAILABLE,
        f"too many bytes in transfer at once: the share of {share.name} is full",
        retry_after_s=BUSY_RETRY_S,
    )


class Turns:
    """Token buckets by network name. A bucket may go into debt, and its debt is how long the next caller waits."""

    def __init__(self, *, per_second: float, burst: float) -> None:
        self._per_second, self._burst = per_second, burst
        self.levels: dict[str, tuple[float, float]] = {}  # name -> (tokens, at), longest unused first

    def take(self, name: str, now_s: float) -> float:
        """Take a turn. Return the seconds until it comes, 0 if at once."""
        level = self._level(name, now_s) - 1.0
        self._set(name, level, now_s)
        return max(0.0, -level / self._per_second)

    def try_take(self, name: str, now_s: float) -> bool:
        """Take a turn only if it comes at once. Return whether it was taken."""
        level = self._level(name, now_s) - 1.0
        if level < 0.0:
            return False
        self._set(name, level, now_s)
        return True

    def _level(self, name: str, now_s: float) -> float:
        tokens, at_s = self.levels.get(name, (self._burst, now_s))
        return min(self._burst, tokens + (now_s - at_s) * self._per_second)

    def _set(self, name: str, level: float, now_s: float) -> None:
        self.levels.pop(name, None)
        self.levels[name] = (level, now_s)
        if len(self.levels) > BUCKETS_MAX:
            del self.levels[next(iter(self.levels))]
