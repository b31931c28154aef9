"""A transport that sends nothing while its gate is closed: that of a coordinator that may no longer lead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class GatedTransport:
    """A transport that asks `may_send` before each write and cuts the connection where it returns False.

    What was handed to the system before stays sent; bytes that wait for a slow reader were written while the gate was open.
    """

    def __init__(self, transport: Any, may_send: Callable[[], bool]) -> None:
        self._transport, self._may_send = transport, may_send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data, or cut the connection."""
        if self._may_send():
            self._transport.write(data)
        else:
            self._transport.abort()

    def writelines(self, data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send data, or cut the connection."""
        if self._may_send():
            self._transport.writelines(data)
        else:
            self._transport.abort()
