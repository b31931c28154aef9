"""A verifier or a third party's client gets the protocol without its heavy dependencies."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("aiohttp", "asyncio", "numba", "prime_node", "requests", "asyncpg", "torch", "transformers", "vllm")
CODE = """
import importlib, pkgutil, sys
import prime_protocol
for module in pkgutil.walk_packages(prime_protocol.__path__, "prime_protocol."):
    if ".codec." not in module.name:  # its kernels load numba, on first use
        importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_protocol_imports_nothing_heavy() -> None:
    loaded = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.split()
    assert "prime_protocol" in loaded
    assert not set(HEAVY) & set(loaded)
