"""docs/architecture.md agrees with the code: its paths, names, endpoints and arrows between packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.source_tree import PACKAGES, ROOT, imports_of, modules, parsed, within

from prime_node.cli.main import SUMMARIES
from prime_protocol.envelope import PayloadType

pytestmark = pytest.mark.xdist_group("source tree")
PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
LINES_MAX = 250
BASES = (PACKAGES["prime_node"], PACKAGES["prime_protocol"].parent, PACKAGES["prime_lab"].parent, ROOT, PAGE.parent)
"""Folders in which a path of the page may begin."""
ROUTES = PACKAGES["prime_node"] / "coordinator" / "api" / "routes.py"

_PATH = re.compile(r"(?<![\w./*-])(?:[\w.*-]+/)*(?:[\w*-]+\.(?:py|md)|[\w-]+/(?=[`\s(.]))")
_NAME = re.compile(r"([\w./-]+\.py)::(\w+(?:\.\w+)*)")
_DIAGRAM = re.compile(r"```mermaid\n%% imports\n(.*?)```", re.DOTALL)
_EDGE = re.compile(r'([\w/]+) -->(?:\|"[^"]*"\|)? ([\w/]+(?: & [\w/]+)*)')
_SUBGRAPH = re.compile(r'subgraph (\w+)\["[^"]*"\]')

Arrows = set[tuple[str, str]]


def found(path: str) -> Path | None:
    """Return the file or folder that a path of the page means, or None."""
    matches = [match for base in BASES for match in base.glob(path.rstrip("/"))]
    return next((match for match in matches if match.is_dir() or not path.endswith("/")), None)


def definitions(nodes: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield each name that the statements of a module or a class define, and the statements within it."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.body
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield ast.unparse(target), []


def defines(file: Path, name: str) -> bool:
    """Return whether a module defines a dotted name."""
    body = parsed(file).body
    for part in name.split("."):
        known = dict(definitions(body))
        if part not in known:
            return False
        body = known[part]
    return True


def drawn(diagram: str) -> tuple[set[str], Arrows]:
    """Return the boxes and the arrows of a flowchart. An arrow from a subgraph means one from each of its boxes."""
    groups: dict[str, set[str]] = {}
    arrows: Arrows = set()
    group: str | None = None
    for line in map(str.strip, diagram.splitlines()[1:]):
        if begun := _SUBGRAPH.fullmatch(line):
            group = begun[1]
            groups[group] = set()
        elif line == "end":
            group = None
        elif edge := _EDGE.fullmatch(line):
            targets = edge[2].split(" & ")
            arrows |= {(edge[1], target) for target in targets}
            if group is not None:
                groups[group] |= {edge[1], *targets}
        else:
            pytest.fail(f"the test cannot read this line of a diagram: {line}")
    expanded = {(box, target) for source, target in arrows for box in groups.get(source, {source})}
    return {box for arrow in expanded for box in arrow}, expanded


def dotted(box: str) -> str:
    """Return the package that a box represents. Example: "broadcast/swarm" -> "prime_node.broadcast.swarm"."""
    return box if box in PACKAGES else f"prime_node.{box.replace('/', '.')}"


@cache
def imports() -> tuple[tuple[str, str], ...]:
    """Return (module, imported name) for each import of all packages."""
    return tuple(
        (module, name)
        for module, path in modules()
        for _, name in imports_of(module, parsed(path), is_package=path.name == "__init__.py")
    )


def imported(boxes: set[str]) -> Arrows:
    """Return the arrows that the imports make between some packages."""

    def box_of(name: str) -> str | None:
        return next((box for box in boxes if within(name, dotted(box))), None)

    pairs = {(box_of(module), box_of(name)) for module, name in imports()}
    return {(source, target) for source, target in pairs if source and target and source != target}


def test_the_page_is_short_enough_to_read() -> None:
    assert len(TEXT.splitlines()) <= LINES_MAX


def test_every_path_of_the_page_exists() -> None:
    paths = {match[0] for match in _PATH.finditer(TEXT)}
    assert len(paths) > 100, "the pattern does not find the paths any more"
    assert sorted(path for path in paths if found(path) is None) == []


def test_every_name_of_the_page_is_defined_in_its_file() -> None:
    names = _NAME.findall(TEXT)
    assert len(names) > 80, "the pattern does not find the names any more"
    missing = [f"{path}::{name}" for path, name in names if (file := found(path)) and not defines(file, name)]
    assert missing == []


def test_every_endpoint_of_the_page_is_served() -> None:
    tree = parsed(ROUTES)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = set(re.findall(r"/v1/(\w+)", TEXT))
    served = texts | {text.split("/")[2] for text in texts if text.startswith("/v1/")}
    assert named
    assert named <= served


def test_every_command_of_the_page_exists() -> None:
    named = set(re.findall(r"prime-node (\w+)", TEXT))
    assert named
    assert named <= SUMMARIES.keys()


def test_every_signed_payload_has_its_signer() -> None:
    table = TEXT[TEXT.index("**Who signs what**") : TEXT.index("## Packages")]
    assert set(re.findall(r"`([A-Z_]+)`", table)) == set(PayloadType.__members__)


@pytest.mark.parametrize("diagram", _DIAGRAM.findall(TEXT))
def test_the_arrows_of_a_diagram_are_the_imports(diagram: str) -> None:
    boxes, arrows = drawn(diagram)
    exist = imported(boxes)
    assert sorted(arrows - exist) == [], "drawn, and nothing imports so"
    assert sorted(exist - arrows) == [], "imported, and not drawn"


def test_every_package_is_drawn() -> None:
    boxes, _ = drawn(_DIAGRAM.findall(TEXT)[0])
    folders = {path.parent.name for path in PACKAGES["prime_node"].glob("*/__init__.py")}
    assert boxes == folders | {"prime_protocol", "prime_lab"}
