"""The roles, the ports that they depend on, and the adapters behind those ports.

Imports only go down the layers that `tests/test_floors.py` checks; `prime_protocol` is the lowest.
"""

from __future__ import annotations

__version__ = "0.1.0"
