"""The roles, the ports that they depend on, and the adapters behind those ports.

A program can `await prime_node.join(link)` and `await prime_node.verify(target)`: docs/python.md.

Imports only go down the layers that `tests/test_floors.py` checks; `prime_protocol` is the lowest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prime_node.cli.api import join_run as join
    from prime_node.cli.api import verify_checkpoint as verify

__all__ = ["__version__", "join", "verify"]

__version__ = "0.1.0"

_API = {"join": "join_run", "verify": "verify_checkpoint"}

if not TYPE_CHECKING:  # a type checker would otherwise accept any name

    def __getattr__(name: str) -> object:
        """Import the API on first use: `import prime_node` alone stays light."""
        if name not in _API:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module("prime_node.cli.api"), _API[name])
