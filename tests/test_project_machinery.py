"""Workflows, templates and hooks are valid by their schemas, pin their actions, and run scripts that exist."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.source_tree import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("fault.yml", "wish.yml")],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
}
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+$")


@pytest.mark.skipif(
    find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed: pip install '.[dev]'"
)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_valid_by_their_schema(schema: str) -> None:
    files = list(map(str, SCHEMAS[schema]))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_action_is_pinned_by_its_digest() -> None:
    uses = [line.strip(" -") for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]
    assert len(uses) > 10
    assert [line for line in uses if not PINNED.search(line) and not line.startswith("uses: ./")] == []


def test_every_script_of_a_workflow_and_every_hook_s_tool_exists() -> None:
    texts = [path.read_text() for path in WORKFLOWS]
    named = {path for text in texts for path in re.findall(r"(?<![\w/])\./([\w./-]+)", text)}
    assert {".ci/run", "scripts/fuzz/all"} < named
    assert [path for path in named if not (ROOT / path).is_file()] == []
    tools = re.findall(r"entry: (\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    check = (ROOT / "scripts" / "check").read_text()
    assert [tool for tool in tools if tool not in check] == []


def test_workflows_have_no_more_rights_than_they_need() -> None:
    for path in WORKFLOWS:
        head = path.read_text().split("jobs:")[0]
        assert "permissions:\n  contents: read\n" in head, path.name
    writes = {path.name: re.findall(r"[\w-]+: write", path.read_text()) for path in WORKFLOWS}
    assert {name: found for name, found in writes.items() if found} == {
        "release.yml": ["attestations: write", "id-token: write"]
    }


def test_owners_and_templates_name_what_exists() -> None:
    paths = [
        line.split()[0].strip("/") for line in (GITHUB / "CODEOWNERS").read_text().splitlines() if line.startswith("/")
    ]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    template = (GITHUB / "pull_request_template.md").read_text()
    assert [path for path in re.findall(r"`\.?/?([\w./]+)`", template) if not (ROOT / path).exists()] == []


def test_ci_runs_few_failed_tests_once_more_and_names_the_unstable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A test of this folder passes the second time; a broken one fails again; many failures are not run again."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    rerun = importlib.import_module("rerun")
    monkeypatch.setattr(rerun, "ROOT", tmp_path)
    monkeypatch.setattr(rerun, "FAILED", tmp_path / "lastfailed")
    assert rerun.main() == 1
    (tmp_path / "test_some.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    good, bad = "test_some.py::test_good@test_some.py", "test_some.py::test_bad"
    for names, result in (([good], 0), ([good, bad], 1), ([], 1), ([good] + [bad + str(n) for n in range(3)], 1)):
        (tmp_path / "lastfailed").write_text(json.dumps(dict.fromkeys(names, True)))
        assert rerun.main() == result
    out = capfd.readouterr().out
    assert out.count("== unstable") == 1
    assert "== unstable (failed, then passed): test_some.py::test_good\n" in out
