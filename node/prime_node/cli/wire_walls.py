"""The walls of a process of environments, from inside. Imports nothing that starts a thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def confined(hello: Mapping[str, Any]) -> list[str]:
    """Leave this process what its host has named, for good; what the system does not enforce of it, one clause each."""
    from prime_node.adapters.environments.walls import Walls, confine_here

    return confine_here(Walls.of(hello["walls"]), Path(hello["folder"]))
