"""Names from outside that become names of files. SPEC.md, section "Names of files".

A name from a peer becomes a path only through `file_name`. prime_node/inside.py opens the files and checks again, by
other means, that a name is one component of a path.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
"""Letters, digits, `_`, `.` and `-` of ASCII. Such a name is not hidden, not an option, and not a path to another folder."""
MODEL_FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|jinja|txt|model|md)$"
"""File types that hold data. Code and pickles are excluded."""
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))})
"""Names that Windows opens as a device in every folder, whatever follows the first dot."""


def file_name(name: str) -> str:
    """Return `name` if every system accepts it as the name of one file in a folder. Raises RemoteError(MALFORMED)."""
    if fault := _fault(name):
        raise RemoteError(ErrorCode.MALFORMED, f"{name[:80]!r} is not a valid file name: {fault}")
    return name


def _fault(name: str) -> str:
    """Return what is wrong with a name, or an empty text."""
    if not 1 <= len(name) <= limits.NAME_CHARS_MAX:
        return f"it has {len(name)} characters, 1 to {limits.NAME_CHARS_MAX} are allowed"
    if not re.fullmatch(FILE_NAME[1:-1], name):
        return "ASCII letters, digits, '_', '.' and '-' are allowed, but '.' and '-' not at the start"
    if name.endswith("."):
        return "Windows drops a trailing dot"
    if name.partition(".")[0].lower() in _DEVICES:
        return "Windows opens it as a device"
    return ""


def _model_file_name(name: str) -> str:
    """Raise ValueError for a bad name, as pydantic requires."""
    if fault := _fault(name):
        raise ValueError(fault)
    folded = name.lower()
    if folded.endswith(".index.json") or folded == "adapter_config.json" or folded.startswith("provenance"):
        raise ValueError("a file of this name makes an engine read other files, or collides with a file of an export")
    return name


def may_be_listed(name: str) -> bool:
    """Return whether a run may have a model file of this name."""
    try:
        return re.fullmatch(MODEL_FILE_NAME[1:-1], _model_file_name(name)) is not None
    except ValueError:
        return False


ModelFileName = Annotated[
    str,
    Field(min_length=1, max_length=limits.NAME_CHARS_MAX, pattern=MODEL_FILE_NAME),
    AfterValidator(_model_file_name),
]
"""Name of a file next to the weights."""
