"""Reads the modules of all packages and their imports, by parsing alone: nothing is imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "prime_protocol": ROOT / "protocol" / "prime_protocol",
    "prime_node": ROOT / "node" / "prime_node",
    "prime_lab": ROOT / "lab" / "prime_lab",
}


def within(module: str, package: str) -> bool:
    """Return whether a module is a package or inside it."""
    return module == package or module.startswith(f"{package}.")


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and the file of each module."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file. Tests that read all modules share it: they are one group of pytest-xdist."""
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module at any depth. `ast.walk` visits their expressions too, which takes ten times as long."""
    rest = [tree]
    while rest:
        node = rest.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            rest += getattr(node, field, ())


def imports_of(module: str, tree: ast.AST, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute dotted name of each import, the imported name included."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
