"""Everything that acts: the roles, the ports that they stand on, and the adapters behind those ports.

Imports only go down the floors that `tests/test_floors.py` holds; `prime_protocol` is the ground.
"""

from __future__ import annotations

__version__ = "0.1.0"
