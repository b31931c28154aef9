"""A recipe that a stranger wrote runs no code on the machine of who re-executes it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from prime_node.cli.evidence import repeat_finding
from prime_node.replay.finding import FINDING
from prime_node.trainer.pinned_recipe import config_of
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.replay import ReplayPolicy

EVIL = "from pathlib import Path\nPath('ran').touch()\n\ndef loss(inputs): ...\n"


def recipe(trainer: dict[str, Any], code: dict[str, str]) -> tuple[bytes, ReplayPolicy]:
    """A recipe as its run pins it."""
    document = json.dumps({"code": code, "trainer": trainer}).encode()
    return document, ReplayPolicy(recipe=digest_of(document))


def test_a_recipe_imports_no_code_that_its_reader_has_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, `replay` and `evidence verify` imported each name of a recipe, also from the folder of evidence itself."""
    folder = tmp_path / "evidence_of_a_stranger"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = "evidence_of_a_stranger.evil:loss"
    document, policy = recipe({"loss": {"import_path": name}}, {name: digest_of(EVIL.encode())})
    with pytest.raises(LocalError, match="read it, and give --code"):
        config_of(document, policy)
    assert not (tmp_path / "ran").exists()
    assert config_of(document, policy, trusted_code=(name,)).loss.import_path == name
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("trainer", "code"),
    [
        ({"loss": {"import_path": "os:system"}}, {}),
        ({}, {"os:system": "0" * 64}),
        ({"cosign_keys": ["/etc/passwd"]}, {}),
        ({"device": "cuda"}, {}),
    ],
)
def test_a_recipe_pins_exactly_its_code_and_no_setting_of_a_machine(
    trainer: dict[str, Any], code: dict[str, str]
) -> None:
    document, policy = recipe(trainer, code)
    with pytest.raises(LocalError, match="settings that no recipe has"):
        config_of(document, policy)


def test_a_finding_of_a_stranger_is_read_within_bounds(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FINDING)
    with pytest.raises(LocalError, match="no readable"):
        repeat_finding(tmp_path, None, as_json=False)
