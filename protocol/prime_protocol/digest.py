"""Digests: lowercase hexadecimal BLAKE3-256, 64 characters, everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from blake3 import blake3
from pydantic import StringConstraints

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Pydantic type. `digest_of(b"")` is `af1349b9...`."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return whether a text has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of some bytes."""
    return blake3(data).hexdigest()


def digest_of_all(parts: Iterable[bytes]) -> str:
    """Return the digest of concatenated bytes."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
