"""Every golden vector keeps its meaning (vector_kinds.py), and frozen ones do not change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from tests.cases_world import check_each
from tests.protocol.vector_files_world import CASES, LISTS, ROOT, VECTORS, Case
from tests.protocol.vector_kinds import KINDS

from prime_protocol import requests
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError


@pytest.mark.parametrize(
    "path", sorted({path for path, _ in CASES}), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_golden_vector_means_what_it_meant(path: Path) -> None:
    check_each(((str(case["name"]), case) for one, case in CASES if one == path), lambda case: means(path, case))


def means(path: Path, case: Case) -> None:
    meaning = KINDS[path.stem]
    if case.get("error") == "value_error":
        with pytest.raises(ValueError, match=r".+"):
            meaning(case, path.parent)
    elif "error" in case:
        with pytest.raises(RemoteError) as caught:
            meaning(case, path.parent)
        assert caught.value.code == ErrorCode(case["error"]), caught.value
    else:
        assert meaning(case, path.parent) == case["expect"]


FROZEN = {"v1": "b7c20df08a44b8bd718ed95058295034ca0f3b905491b02f0026f958fdbe7d01"}
"""Folder -> digest of its files. An entry never changes; a new folder adds one."""


def test_frozen_vectors_do_not_change() -> None:
    found = {}
    for folder in VECTORS.glob("v*"):
        files = {path.name: digest_of(path.read_bytes()) for path in sorted(folder.iterdir())}
        found[folder.name] = digest_of(json.dumps(files).encode())
    assert found == FROZEN


def test_every_kind_has_good_and_bad_vectors_and_every_file_is_used() -> None:
    assert {path.stem for path in LISTS} == KINDS.keys()
    for folder in sorted(VECTORS.glob("v*")):
        lists = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
        assert all(any("expect" in case for case in cases) for cases in lists.values())
        text = json.dumps(list(lists.values()))
        assert all(f'"{path.name}"' in text for path in folder.iterdir() if path.suffix != ".json")


def test_every_field_of_every_request_has_a_value_of_its_own_in_some_vector() -> None:
    signed = [
        case["expect"]["request"]
        for path, case in CASES
        if path.stem == "message" and "request" in case.get("expect", ())
    ]
    for kind in get_args(get_args(requests.Request)[0]):
        mine = [request for request in signed if request["action"] in get_args(kind.model_fields["action"].annotation)]
        assert mine, kind
        for name, field in kind.model_fields.items():
            default = json.loads(json.dumps(field.get_default(call_default_factory=True), default=lambda _: None))
            values = [request.get(name, default) for request in mine]
            assert name == "action" or any(value != default for value in values), f"{kind.__name__}.{name}"


def test_a_folder_of_vectors_is_never_written_twice(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "make_vectors.py")]
    again = subprocess.run([*script, tmp_path], capture_output=True, text=True, check=False)
    assert (again.returncode, "never changed" in again.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []
    subprocess.run([*script, tmp_path / "new"], check=True)
    folders = sorted(VECTORS.glob("v*"), key=lambda folder: [int(number) for number in folder.name[1:].split(".")])
    newest = {path.name: path for folder in folders for path in folder.iterdir()}
    for path in (tmp_path / "new").iterdir():
        kept = newest[path.name]
        assert path.suffix != ".json" or _names_in(path) == _names_in(kept)


def _names_in(path: Path) -> list[str]:
    return [case["name"] for case in json.loads(path.read_text(encoding="utf-8"))]
