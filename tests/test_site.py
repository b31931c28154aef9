"""The documentation site's sources: each document is a page, and the reference has everything that the code has."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.source_tree import ROOT

from prime_node.cli.config import all_settings
from prime_node.cli.main import SUMMARIES
from prime_node.coordinator.api.routes import ENDPOINTS
from prime_node.coordinator.metrics import HOST_METRICS, METRICS
from prime_protocol.errors import ErrorCode
from prime_protocol.verdict import RejectReason

pytestmark = pytest.mark.slow
SITE: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "make_site.py"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    SITE["write_sources"](folder)
    return folder


def test_each_document_is_a_page(sources: Path) -> None:
    listed = {f"{name}.md" for names in SITE["PAGES"].values() for name in names}
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")} <= listed
    assert {str(path.relative_to(sources)) for path in sources.rglob("*.md")} == listed | {"index.md"}


def test_the_reference_has_what_the_code_has(sources: Path) -> None:
    reference = sources / "docs" / "reference"
    settings = (reference / "settings.md").read_text()
    names = {f"`{one.section}.{name}`" for one in all_settings() for name in one.model_fields}
    tables = {name for name in names if f"### [{name.strip('`')}" in settings}
    assert sorted(name for name in names - tables if name not in settings) == []
    for file, words in (
        ("commands.md", [f"### prime-node {name}\n" for name in SUMMARIES]),
        ("metrics.md", [f"`{one.name}`" for one in (*METRICS, *HOST_METRICS)]),
        ("endpoints.md", [f"`{one.path}`" for one in ENDPOINTS]),
        ("errors.md", [f"`{one.value}`" for one in (*ErrorCode, *RejectReason)]),
    ):
        text = (reference / file).read_text()
        assert [word for word in words if word not in text] == [], file
        assert str(ROOT) not in text, "no path of the machine that built it"


def test_a_page_says_what_runs_its_commands_and_has_no_link_to_what_is_no_page(sources: Path) -> None:
    tutorial = (sources / "docs" / "tutorials" / "operator.md").read_text()
    assert "*Run by scripts/tutorials.py.*" in tutorial
    text = "[a](../SECURITY.md) [b](../pyproject.toml) [c](https://example.org)"
    assert SITE["page"](text, ROOT / "docs" / "x.md", {"SECURITY"}) == "[a](../SECURITY.md) b [c](https://example.org)"
