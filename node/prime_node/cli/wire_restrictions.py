"""The sandbox of an environment process, from inside. Imports nothing that starts a thread."""

from __future__ import annotations

from pathlib import Path


def confined(order: str) -> tuple[Path, list[str], tuple[str, ...] | None]:
    """Confine this process irrevocably to what `order`, an argument of its command line, names.

    Returns its folder, what the system does not enforce, one clause each, and the environments that may use the network, None if
    this process has none.
    """
    from prime_node.adapters.environments.restrictions import confine_here, read_order

    restrictions, folder = read_order(order)
    return folder, confine_here(restrictions, folder), restrictions.network_grants if restrictions.network else None
