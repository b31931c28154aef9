"""The C library, for system calls that Python does not offer."""

from __future__ import annotations

import ctypes
import os


def libc() -> ctypes.CDLL:
    """Return the library of this process. `checked` reads the error number of its last call."""
    return ctypes.CDLL(None, use_errno=True)


def checked(what: str, result: int) -> int:
    """Return the result of a call. Raises OSError with the name of the call if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
