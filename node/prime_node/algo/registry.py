"""Lookup of algorithms: built-in ones by name, custom ones by import path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from prime_protocol.errors import LocalError

T = TypeVar("T")


def find_by_name(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Return the entry of this name. Raises LocalError with the known names."""
    if name not in known:
        raise LocalError(f"unknown {kind} {name!r}; known are {', '.join(sorted(known))}")
    return known[name]


def import_object(path: str) -> Any:
    """Return the object at "package.module.name" or "package.module:name".

    Modules are also found in the current folder, in every command. Raises LocalError that names the wrong half of the path.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise LocalError(f"import path {path!r}: expected package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: it replaces no installed module
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise LocalError(f"import path {path!r}: {error} (current folder: {here})") from None
    if not hasattr(module, name):
        raise LocalError(f"import path {path!r}: {module_name} has no {name}")
    return getattr(module, name)
