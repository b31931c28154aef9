"""The packages: built twice they have the same bytes, the sdist has all of the project, and the README has no dead link."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.source_tree import ROOT

RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "release.py"))
HOOK: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "readme_hook.py"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return RELEASE["Packages"](ROOT, tmp_path_factory.mktemp("packages"))


def test_two_builds_and_a_build_of_the_sdist_have_the_same_bytes(packages: Any, tmp_path: Path) -> None:
    assert RELEASE["same_twice"](packages, tmp_path).startswith("wheel sha256:")


def test_the_sdist_has_every_file_of_the_project(packages: Any) -> None:
    with tarfile.open(packages.sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no git checkout, so nothing lists the project's files")
    kept = {path for path in listed.stdout.splitlines() if not path.startswith(".") and (ROOT / path).exists()}
    assert sorted(kept - held) == []


def test_the_readme_of_the_packages_has_no_relative_link(packages: Any) -> None:
    with zipfile.ZipFile(packages.wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(name).decode()
    assert "Train one model by reinforcement learning" in text
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []


def test_links_of_the_readme_become_absolute_with_the_projects_address() -> None:
    text = "![Curve](docs/demo.png)\n[guide](docs/operating.md), [site](https://example.org), [below](#settings)\n"
    absolute = HOOK["packaged_readme"](text, "https://host/own", "0.1.0")
    assert absolute == (
        "![Curve](https://host/own/raw/v0.1.0/docs/demo.png)\n"
        "[guide](https://host/own/blob/v0.1.0/docs/operating.md), [site](https://example.org), [below](#settings)\n"
    )
    assert HOOK["packaged_readme"](text, "", "0.1.0") == "guide, [site](https://example.org), [below](#settings)\n"


def test_an_index_would_render_the_readme(packages: Any, tmp_path: Path) -> None:
    try:
        RELEASE["renders"](packages, tmp_path)
    except RELEASE["NotPossible"] as reason:
        pytest.skip(str(reason))


def test_an_audit_without_an_answer_for_one_package_still_names_the_unsafe_ones() -> None:
    rows = [
        {"name": "old", "version": "1.0", "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["1.1"], "aliases": []}]},
        {"name": "own", "skip_reason": "Dependency not found on PyPI and could not be audited: own (1.0)"},
        {"name": "safe", "version": "2.0", "vulns": []},
    ]
    report = json.dumps({"dependencies": rows, "fixes": []})
    assert RELEASE["unsafe_and_unknown"](report) == (["old 1.0: PYSEC-2026-1"], ["own"])
