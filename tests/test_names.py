"""Each public class and function has a name of its own, so that a search finds one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from tests.source_tree import modules, parsed

pytestmark = pytest.mark.xdist_group("source tree")


def test_each_public_name_exists_once() -> None:
    places = defaultdict(set)
    for module, path in modules():
        for node in parsed(path).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                places[node.name].add(module)
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1} == {}
