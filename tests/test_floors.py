"""The house has floors: an import may only go down, and siblings never import each other.

Every module of all packages is parsed, not imported, so a forbidden import inside a function counts as well.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.source_tree import PACKAGES, imports_of, modules, within

# From the top down. Packages on one line are siblings. `prime_node` is the version in the bare package.
FLOORS = (
    {"prime_lab"},
    {"__main__"},
    {"cli"},
    {"replay"},
    {"worker", "coordinator", "validator", "trainer", "adapters"},
    {"broadcast"},
    {"training_data", "algo", "envs"},
    {"config", "folder_lock", "keyfile", "observe", "other_programs", "patience", "traces"},
    {"at_desk", "fair_places", "files", "memory", "pages", "power", "scratch"},
    {"inside"},
    {"ports"},
    {"carrier"},
    {"prime_node"},
    {"prime_protocol"},
)
API = {"prime_node.join", "prime_node.verify"}  # the package itself passes them on from the commands
HEIGHT = {unit: len(FLOORS) - depth for depth, floor in enumerate(FLOORS) for unit in floor}
# The same within a package: its sub-packages and modules, from the top down.
ROOMS = {
    "prime_node.broadcast": (
        {"audit", "publish", "seed"},
        {"follow"},
        {"swarm"},
        {"routes"},
    ),
}

# The protocol takes bytes and returns values: code that acts, waits, reads a clock or draws random numbers stays outside.
FORBIDDEN_IN_PROTOCOL = {
    *(
        "asyncio",
        "datetime",
        "http",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "secrets",
        "selectors",
        "shutil",
    ),
    *("signal", "socket", "ssl", "subprocess", "tempfile", "time", "urllib.error", "urllib.request"),
}
WIRE_LIBRARIES = {"blake3", "cryptography", "numpy", "pydantic", "pydantic_core", "safetensors", "zstandard"}
# Third-party systems live in adapters, one a file. These few live elsewhere too.
ALSO_ALLOWED = {
    "prime_protocol.codec": {"llvmlite", "numba"},
    "prime_node.algo": {"torch"},
    "prime_node.config": {"pydantic_settings"},
    "prime_node.cli": {"rich", "typer"},
    "prime_node.cli.plot": {"matplotlib", "plotext"},
    "prime_node.cli.doctor": {"torch"},  # asks it what it can run on
    "prime_lab.noise_on_device": {"torch", "triton"},  # compares a kernel of an adapter
    "prime_lab.s3_server": {"obstore"},  # waits until the server that it started stores an object
}
# A library that comes with another one is no second system, and torch's tensors are the language of several.
COMES_WITH = {
    "httpx": "verifiers",
    "jinja2": "transformers",
    "multiaddr": "libp2p",
    "tokenizers": "transformers",
    "trio": "libp2p",
    "uvloop": "aiohttp",
}
TENSORS = {"torch"}

READS_ITS_OWN_SOURCE = {"prime_protocol.codec.kernels.base"}  # for the key of numba's cache of compiled code

PICKS_ADAPTERS = {
    f"prime_node.cli.{name}"
    for name in (
        "lifetime",  # the loop
        "wire",
        "wire_adapters",
        "wire_coordinator",
        "wire_environments",
        "wire_gateway",
        "wire_gpus",
        "wire_classes",
        "wire_identity",
        "wire_measurement",
        "wire_new",
        "wire_node",
        "wire_own_code",
        "wire_sandbox",
        "wire_scorers",
        "wire_store",
        "wire_swarm",
        "wire_training",
        "wire_replay",
        "wire_restrictions",
        "wire_rows",
    )
}

READS_ENVIRONMENT = {"prime_node.config", "prime_node.observe"}
PASSES_ENVIRONMENT = {
    "prime_node.cli.up_session",  # reads which GPUs it may use, to hand them on
    "prime_node.cli.supervisor",  # hands its own on to the processes that it starts
    "prime_node.cli.launch",  # so does this one
    "prime_node.cli.main",  # numpy's threads are set before it is imported
    "prime_node.cli.run_trial",  # and here, in a child process
    "prime_node.cli.api",  # and here, where a program calls join
    "prime_node.cli.wire_sandbox",  # takes secrets out of it, and points libraries to the role's folder
    "prime_node.adapters.sandbox.system_paths",  # PYTHONPATH says which folders of sys.path the user has named
    "prime_node.adapters.storage.s3_blobs",  # obstore reads the same variables, and signs too little
    "prime_node.adapters.environments.variables",  # and this one, without possible secrets
    "prime_node.adapters.environments.verifiers_v1",  # verifiers reads keys of endpoints there, and its own is made on the spot
    "prime_node.adapters.engines.vllm_engine",  # vLLM can be set up through the environment alone
    "prime_node.adapters.engines.vllm_runner",  # the same
}


def unit_of(module: str) -> str:
    """Return the unit of a module. Examples: `prime_node.worker.loop` -> `worker`, `prime_protocol.codec` -> `prime_protocol`.

    The unit of an entry point is `__main__`.
    """
    parts = module.split(".")
    if parts[-1] == "__main__" or module in API:
        return "__main__"
    return parts[1] if parts[0] == "prime_node" and len(parts) > 1 else parts[0]


def room_fault(module: str, name: str) -> str:
    """Return why a module may not import a name of its own package; empty if it may."""
    for package, floors in ROOMS.items():
        if not (within(module, package) and within(name, package)):
            continue
        heights = {room: len(floors) - depth for depth, floor in enumerate(floors) for room in floor}
        ours, theirs = ((*dotted.removeprefix(package).split("."), "")[1] for dotted in (module, name))
        if ours and ours not in heights:
            return f"{package}.{ours} stands on no floor"
        if ours and theirs in heights and ours != theirs and heights[theirs] >= heights[ours]:
            return f"{package}.{ours} may not import {name}: that is not below it"
    return ""


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Return the violations of this module against its layer, as `module:line: why`."""
    tree = ast.parse(source)
    unit = "__main__" if module == "prime_node" else unit_of(module)
    if unit not in HEIGHT:
        return [f"{module}:1: {unit} stands on no floor"]
    found: list[tuple[int, str]] = []
    systems: set[str] = set()
    allowed = WIRE_LIBRARIES.union(*(more for package, more in ALSO_ALLOWED.items() if within(module, package)))
    for line, name in imports_of(module, tree, is_package=is_package):
        top = name.split(".")[0]
        if top in PACKAGES:
            target = name if unit_of(name) in HEIGHT else "prime_node"  # `from prime_node import __version__`
            if unit_of(target) != unit and HEIGHT[unit_of(target)] >= HEIGHT[unit]:
                found.append((line, f"{unit} may not import {name}: that is not below it"))
            if fault := room_fault(module, name):
                found.append((line, fault))
            if unit == "cli" and module not in PICKS_ADAPTERS and within(name, "prime_node.adapters"):
                found.append((line, f"only prime_node.cli.wire picks adapters, not {name}"))
        elif top in sys.stdlib_module_names:
            if (
                unit == "prime_protocol"
                and module not in READS_ITS_OWN_SOURCE
                and any(within(name, acts) for acts in FORBIDDEN_IN_PROTOCOL)
            ):
                found.append((line, f"prime_protocol may not import {name}"))
        elif unit == "adapters":
            systems |= {COMES_WITH.get(top, top)} - allowed - TENSORS
        elif top not in allowed:
            found.append((line, f"{unit} may not import {top}: third-party systems live in prime_node.adapters"))
    if len(systems) > 1:
        found.append((1, f"an adapter holds one system, and this one holds {', '.join(sorted(systems))}"))
    if module not in READS_ENVIRONMENT | PASSES_ENVIRONMENT:
        found += [(line, "only config and observe read the environment") for line in environment_reads(source, tree)]
    return [f"{module}:{line}: {why}" for line, why in sorted(set(found))]


def environment_reads(source: str, tree: ast.AST) -> Iterator[int]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if not names.intersection(re.findall(r"\w+", source)):  # spares most files the walk through their nodes
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
            yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            yield node.lineno


class AtImport(ast.NodeTransformer):
    """Leaves what runs when a module is imported."""

    def visit_FunctionDef(self, node: ast.AST) -> None:
        return None

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else node


def imported_by(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Return which of these modules each of them imports when it is imported. Values: source, and whether it is a package."""
    found = dict[str, set[str]]()
    for module, (source, is_package) in sources.items():
        tree = AtImport().visit(ast.parse(source))
        names = {name for _, name in imports_of(module, tree, is_package=is_package)}
        found[module] = {name if name in sources else name.rpartition(".")[0] for name in names} & sources.keys()
        found[module].discard(module)
    return found


def test_no_modules_import_each_other() -> None:
    """Which of them can be imported would depend on which comes first. Before, no peer could start with libp2p."""
    graph = imported_by({module: (path.read_text(), path.name == "__init__.py") for module, path in modules()})
    assert len(graph) > 400
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_no_module_imports_itself() -> None:
    """A merge of two modules leaves such an import in a function: its names are there already."""
    found = [
        f"{path}:{line}: imports itself"
        for module, path in modules()
        if path.name != "__init__.py"
        for line, name in imports_of(module, ast.parse(path.read_text()))
        if name.startswith(f"{module}.")
    ]
    assert not found, "\n".join(found)


def test_modules_that_import_each_other_are_found() -> None:
    later = "def f():\n    import {0}\nif TYPE_CHECKING:\n    from p import {0}\n"
    for source, is_found in (("from p.{0} import x", True), ("from p import {0}", True), (later, False)):
        graph = imported_by({"p.a": (source.format("b"), False), "p.b": (source.format("a"), False)})
        assert (graph == {"p.a": {"p.b"}, "p.b": {"p.a"}}) is is_found


def test_every_module_keeps_to_its_floor() -> None:
    found = [
        violation
        for module, path in modules()
        for violation in violations(module, path.read_text(), is_package=path.name == "__init__.py")
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("prime_protocol.step", "import prime_node.ports.clock"),
        ("prime_protocol.step", "import asyncio"),
        ("prime_protocol.step", "def now():\n    from time import time"),
        ("prime_protocol.step", "import torch"),
        ("prime_protocol.step", "from urllib import request"),
        ("prime_protocol.rollout", "import numba"),
        ("prime_node.ports.engine", "from prime_node import config"),
        ("prime_node.ports.engine", "from ..worker import loop"),
        ("prime_node.worker.loop", "from prime_node.coordinator.state import tick"),
        ("prime_node.worker.loop", "from ..trainer import loop"),
        ("prime_node.worker.loop", "import prime_node.adapters.engines.transformers_engine"),
        ("prime_node.worker.loop", "import aiohttp"),
        ("prime_node.adapters.storage.sqlite_store", "from prime_node.coordinator.state.tick import State"),
        ("prime_node.adapters.everything", "import aiohttp\nimport vllm"),
        ("prime_node.observe", "from prime_node.config import Settings"),
        ("prime_node.algo.loss", "from prime_node import training_data"),
        ("prime_node.algo.loss", "import transformers"),
        ("prime_node.cli.up", "from prime_lab import world"),
        ("prime_node.worker.loop", "import prime_lab.memory_store"),
        ("prime_node.worker.loop", "from prime_node import join"),
        ("prime_node.cli.up", "from prime_node import adapters"),
        ("prime_node.trainer.loop", "import os\nos.environ['HOME']"),
        ("prime_node.trainer.loop", "from os import getenv"),
        ("prime_node.attic.box", "import json"),
        ("prime_node.broadcast.swarm.download", "from prime_node.broadcast.follow.heads import Heads"),
        ("prime_node.broadcast.publish.publisher", "from prime_node.broadcast import audit"),
        ("prime_node.broadcast.routes", "from .swarm import have_set"),
        ("prime_node.broadcast.attic", "from prime_node.broadcast import routes"),
    ],
)
def test_a_forbidden_import_is_caught(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "prime_protocol.envelope",
            "from urllib.parse import urlsplit\nfrom prime_protocol.digest import Digest\nimport blake3",
        ),
        ("prime_protocol.codec.kernels", "from numba import njit"),
        (
            "prime_node.worker.loop",
            "import asyncio\nfrom prime_node.broadcast import follower\nfrom . import spool",
        ),
        ("prime_node.adapters.storage.postgres_store", "import asyncpg\nimport numpy"),
        ("prime_node.adapters.engines.vllm_engine", "import os\nimport torch\nimport vllm\nos.environ['A'] = 'B'"),
        ("prime_node.algo.loss", "import torch"),
        ("prime_node.cli.wire", "from prime_node.adapters import http_server"),
        ("prime_node.cli.main", "from prime_node import __version__\nimport typer"),
        (
            "prime_node.broadcast.seed.seeder",
            "from prime_node.broadcast.follow import update_paths\nfrom ..swarm import download",
        ),
        ("prime_node.broadcast.swarm.download", "from prime_node.broadcast import routes\nfrom . import have_set"),
        ("prime_node", "from prime_node.cli.api import join_run as join"),
    ],
)
def test_an_import_that_goes_down_is_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_a_relative_import_in_a_package_starts_from_the_package_itself() -> None:
    assert violations("prime_node.worker", "from . import loop", is_package=True) == []
    assert len(violations("prime_node.worker", "from .. import trainer", is_package=True)) == 1


def test_the_whole_protocol_imports_without_torch_and_without_anything_that_acts() -> None:
    names = [module for module, _ in modules() if within(module, "prime_protocol")]
    heavy = ("torch", "transformers", "vllm", "aiohttp", "asyncio", "prime_node")
    program = (
        f"import importlib, sys\nsys.path.insert(0, {str(PACKAGES['prime_protocol'].parent)!r})\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {heavy!r} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert ran.stdout.split() == []
