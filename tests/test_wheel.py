"""The wheel is small, and holds nothing that only tests and benchmarks need."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.source_tree import PACKAGES, ROOT, imports_of, modules, parsed

from prime_node.cli.main import CONTROLS

pytestmark = pytest.mark.xdist_group("source tree")
BYTES_MAX = 1_638_500
"""The aim is 800,000 bytes. Code alone takes 940,000, docstrings and comments 460,000, the names and hashes of 650 files
140,000. Lower the bound whenever the wheel shrinks.
The page in the browser takes 40,000: its own files 22,000, its history and its live changes the rest. Standbys take 10,000,
gateways 15,000, the archived journal 12,000, the rewards that a trainer keeps 4,000, the checks of `upgrade` 1,500, auditors
5,000, direct uploads 7,000, look-ups of names 2,000, bounds on what strangers send over libp2p 1,000,
places that networks share 2,000, rarer lines between peers 700,
calls with several heartbeats 2,700, bounds on what a hostile tokenizer takes 3,400, folders that another run used 500,
leases that a gateway has passed on 2,600, no further coordinator without TLS 300, packets
of gateways that arrive in part 2,200, GPUs that torch has no kernels for 1,500, settings of strangers 300, errors in the
background 600, a decoder that is compiled while a worker starts 600, 8-bit moments 1,200, advice on
mistyped links 200."""

ENTRY_POINTS = ("prime_node", "prime_node.__main__", "prime_node.cli.main")
FOR_OTHER_PROGRAMS = {
    "encode_checkpoint": "the encoder in one call, as SPEC.md describes it",
    "shipped_calibration": "the default of `prime-node new`, for programs that make a run",
}
"""Public functions that no module of the wheel calls, and what they are for."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= BYTES_MAX


def test_the_wheel_holds_both_packages_and_nothing_for_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    product = {name: folder for name, folder in PACKAGES.items() if name != "prime_lab"}
    modules = {
        f"{package}/{path.relative_to(folder)}" for package, folder in product.items() for path in folder.rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == set(product)
    assert any(name.startswith("prime_node/_configs/") for name in names)


def test_each_module_is_reached_from_an_entry_point() -> None:
    """By imports, also inside functions, or by a name in a text: of a module that is imported or started by its name."""
    product = {name: path for name, path in modules() if not name.startswith("prime_lab")}
    reached, rest = set[str](), list(ENTRY_POINTS)
    while rest:
        name = rest.pop()
        if name in product and name not in reached:
            reached.add(name)
            rest += (part for found in names_in(name, product[name]) for part in packages_of(found))
    assert sorted(product.keys() - reached) == [], "move what only tests and benchmarks need to lab/"


def names_in(module: str, path: Path) -> set[str]:
    """Return the dotted names that a module imports, or that its texts may mean: `prime_node.cli.` and `verify` mean one."""
    nodes = list(ast.walk(parsed(path)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    starts = {text for text in texts if re.fullmatch(r"prime_\w+(\.\w+)*\.", text)}
    imported = {name for _, name in imports_of(module, parsed(path), is_package=path.name == "__init__.py")}
    return imported | texts | {start + text for start in starts for text in texts}


def packages_of(name: str) -> list[str]:
    """Return a dotted name and each package that contains it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def test_each_public_function_is_used_in_the_wheel() -> None:
    """A decorator may register a function, so functions with decorators count as used."""
    defined, used = set[str](), {f"{name}_worker" for name in CONTROLS}
    for module, path in modules():
        if module.startswith("prime_lab"):
            continue
        for node in parsed(path).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.decorator_list:
                defined.add(node.name)
        for each in ast.walk(parsed(path)):
            if isinstance(each, ast.Name):
                used.add(each.id)
            elif isinstance(each, ast.Attribute):
                used.add(each.attr)
            elif isinstance(each, ast.alias) and each.asname:
                used.add(each.name)
            elif isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.isidentifier():
                used.add(each.value)
    unused = {name for name in defined - used if name[0] != "_"}
    assert unused == FOR_OTHER_PROGRAMS.keys(), "move what only tests and benchmarks need to lab/"
