"""Rules of the tests: they wait for conditions, use only public names of the product, and share helpers through `*_world.py`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.source_tree import modules, parsed

pytestmark = pytest.mark.xdist_group("source tree")
TESTS = Path(__file__).parent
LIBRARIES = {"_get_observed_addrs", "_teardown_if_connected", "_replace"}
"""Private names of libp2p, which the product's subclasses override, and the public method of named tuples."""
SLEEPS = {
    "security/bombs.py": "misbehaves in another process: it hangs on purpose",
    "security/probes.py": "misbehaves in another process: it hangs on purpose",
}
"""Files that may call `sleep`, and why. Shared helpers may: tests wait for conditions with them."""
SLOW_PEERS = {
    "security/test_gateway_room.py": "gateways whose packets trickle",
    "conformance/test_engine.py": "asks for a swap at several moments of a generation in another process",
    "node/standby_world.py": "asks two processes which of them leads, as a balancer does",
    "node/crowd_world.py": "pauses between two attempts, as a worker does",
    "node/test_http_client_hostile.py": "a server that sends its body slowly",
    "node/test_http_ranges.py": "a server that sends its body slowly",
    "security/test_http_walls.py": "a caller that sends its body slowly",
}
"""Files that may play a slow peer with `be_slow` of tests/time_world.py."""


@functools.cache
def nodes_of_files() -> dict[str, list[ast.AST]]:
    """Return the syntax nodes of each file of the tests."""
    paths = sorted(TESTS.rglob("*.py"))
    return {path.relative_to(TESTS).as_posix(): list(ast.walk(parsed(path))) for path in paths}


def dotted(node: ast.expr) -> str:
    """Return a dotted name as it is written; an expression that is no name is left empty."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_shared(name: str) -> bool:
    """Return whether a file may hold what several tests need."""
    return name.endswith(("_world.py", "conftest.py"))


def test_only_shared_helpers_sleep() -> None:
    """`asyncio.sleep(0)` is allowed: it lets other tasks run and takes no time. So is sleeping on a virtual clock."""
    found, slow = dict[str, int](), set[str]()
    for name, nodes in nodes_of_files().items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module in ("asyncio", "time", "trio"):
                sleeps = any(alias.name == "sleep" for alias in node.names)
            elif isinstance(node, ast.Call) and dotted(node.func) in ("asyncio.sleep", "time.sleep", "trio.sleep"):
                sleeps = ast.unparse(node.args[0]) != "0"
            else:
                if isinstance(node, ast.Name) and node.id == "be_slow":
                    slow.add(name)
                continue
            if sleeps and not is_shared(name):
                found[name] = node.lineno
    assert found.keys() == SLEEPS.keys(), f"wait for an event, or with tests/time_world.py for a condition: {found}"
    assert slow == SLOW_PEERS.keys()


def test_no_test_uses_private_names_of_the_product() -> None:
    private = {*private_names()} - LIBRARIES
    found = []
    for name, nodes in nodes_of_files().items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("prime_node", "prime_protocol", "prime_lab")
            ):
                used = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
                used = [node.attr]
            elif isinstance(node, ast.Call) and dotted(node.func).endswith("attr"):
                texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
                used = [part for text in texts if isinstance(text, str) for part in text.split(".")]
            else:
                continue
            found += [f"{name}:{node.lineno}: {one}" for one in used if one in private]
    assert found == []


def private_names() -> Iterator[str]:
    """Yield names with a leading underscore that the product defines: modules, functions, classes, attributes and constants."""
    for module, path in modules():
        yield from (part for part in module.split(".") if part.startswith("_"))
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            else:
                continue
            if name.startswith("_") and name.strip("_") and not name.endswith("__"):
                yield name


def test_helpers_come_from_shared_files() -> None:
    found = [
        f"{name}:{node.lineno}: {node.module}"
        for name, nodes in nodes_of_files().items()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests")
        if any(part.startswith("test_") for part in [*(node.module or "").split("."), *(a.name for a in node.names)])
    ]
    assert found == [], "move what several files need to a `*_world.py` or a conftest.py"


def test_there_is_one_virtual_clock() -> None:
    """Its subclasses change one thing about it. Clocks that run are subclasses of the product's SystemClock."""
    found = [
        f"{name}: {node.name}"
        for name, nodes in nodes_of_files().items()
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and not node.bases
        and {"now_ms", "monotonic_s"} <= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    ]
    assert found == ["time_world.py: VirtualClock"]


def test_a_method_without_a_docstring_implements_a_port() -> None:
    """Ruff demands docstrings elsewhere. An adapter's method does what the method of its port says."""
    documented = {
        method.name
        for name, path in modules()
        if name.startswith("prime_node.ports.")
        for method in public_methods(path)
        if ast.get_docstring(method)
    }
    found = [
        f"{name}: {method.name}"
        for name, path in modules()
        for method in public_methods(path)
        if not ast.get_docstring(method) and method.name not in documented
    ]
    assert found == []


def public_methods(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public methods of a module's public classes."""
    for found in parsed(path).body:
        if isinstance(found, ast.ClassDef) and not found.name.startswith("_"):
            for each in found.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and not each.name.startswith("_"):
                    yield each
