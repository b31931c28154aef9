"""The sandbox of an environment process, from inside. Imports nothing that starts a thread."""

from __future__ import annotations

from pathlib import Path


def confined(told: str) -> tuple[Path, list[str]]:
    """Confine this process irrevocably to what `told`, an argument of its command line, names.

    Returns its folder, and what the system does not enforce, one clause each.
    """
    from prime_node.adapters.environments.walls import confine_here, read_order

    walls, folder = read_order(told)
    return folder, confine_here(walls, folder)
