"""The only error of this package: the bytes are not a chunk that the caller expects."""

from __future__ import annotations

from prime_protocol.errors import ErrorCode, RemoteError


class CodecError(RemoteError):
    """Malformed chunk. Example: CodecError("plane 1: 70000 bytes declared, 65536 expected")."""

    def __init__(self, reason: str) -> None:
        super().__init__(ErrorCode.MALFORMED, f"chunk: {reason}")
        self.reason = reason
