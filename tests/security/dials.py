"""Records every address that this process connects or sends to, at the socket itself, for every library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

Dial = tuple[str, int]

_noting: list[list[Dial]] = []


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _noting and event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        for noted in _noting:
            noted.append((str(args[1][0]), int(args[1][1])))


sys.addaudithook(_hook)  # stays until the process ends, and does nothing outside `noted_dials`


@contextlib.contextmanager
def noted_dials() -> Iterator[list[Dial]]:
    """Record the dials of all threads while it is open."""
    noted: list[Dial] = []
    _noting.append(noted)
    try:
        yield noted
    finally:
        _noting.remove(noted)
