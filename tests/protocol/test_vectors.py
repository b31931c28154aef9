"""Every golden vector keeps its meaning (vector_kinds.py), and frozen ones do not change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.cases_world import check_each
from tests.protocol.vector_files_world import CASES, LISTS, ROOT, VECTORS, Case
from tests.protocol.vector_kinds import KINDS

from prime_protocol import requests
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError


def assert_holds(expected: Any, found: Any) -> None:
    """Check that two values are equal, except that an object may have fields added since, which have their defaults."""
    if isinstance(expected, dict) and isinstance(found, dict):
        assert expected.keys() <= found.keys()
        for name, value in expected.items():
            assert_holds(value, found[name])
    elif isinstance(expected, list) and isinstance(found, list):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_holds(one, other)
    else:
        assert expected == found


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
        assert_holds(case["expect"], meaning(case, path.parent))


FROZEN = {
    "v1": "6a0a7b5b79b756d41c60abd17197e9c97eb0d5abf984aefcbe6b03bea4a3820a",
    "v1.1": "e6c63e9e76058948e814e9212d248d11f3443595acf4c8b6a32ffe670de2e87e",
    "v1.2": "fa568c4952420be305ca71c9c03c8ad0793665de9dd7b6491ab93fb9e7414b06",
    "v1.3": "2bbdf99a3cbd785de51c63da2f41e85a8c428b20a1bbd72a421f4178145fc862",
    "v1.4": "dea1abf1e673e633f1265fb42dcb327233f4736ba7f0d7e1655a3a42e2180d15",
    "v1.5": "862af8dcc01386272f7e184c1e6931e1024fd5b8b3847843fa68df19f8409e3b",
    "v1.6": "1c484bb476d7f13bc677be2fdc36782e64d64b5b93ebf15746b13b29dbb28967",
    "v1.7": "9c2f867c6ca3656e9d6ee4990d19addc0743f7e39b092f7b3035dcb8da0bfdf9",
    "v1.8": "16882e9d52e7e9b3ac2a047d8758bbd0b83c138907a03e2aa441ce1e00301d42",
    "v1.9": "ee41c8b517976fc2a0ed1a36837113dfcbb0f49276076acf765d8e8a2a467af7",
    "v1.10": "c6882282aa8880681836db2a7a9898a58cfd1d4d73222839ca156115dd07f82d",
    "v1.11": "b9fd6834e0027b411038265ef3706a8d08f05637114ab3cd91bc8721fbd0a7f3",
    "v1.12": "7cc23b25398eb20d1b50b64c7ee7469ef404043108c30826f845286e93b08a20",
    "v1.13": "24581ce39550c981ae98faad29e294a10860887029530a1a5c650c9688c169ee",
    "v1.14": "cb02e8176cd0a12d2fe9601696eecc25036b441ea8ae1086bf13ceea09dac5db",
    "v1.15": "62f39f420681658d89d62ecb3a44d3e6738a15a2af5b35650be5d666cf6b8c74",
    "v1.16": "fdb54fe5fe4efd882a34a74dcfc48fe1dacf193811ddb82fde2ece8fa6a4af6d",
    "v1.17": "d07cef70d8f01be149589521aef586d69a0be7a18a9b0f07d90f919111a62efd",
    "v1.18": "98cc6aa29b7addbb087a10797add9a36b77ed7968ccbff4c975852675c2a537a",
    "v1.19": "1d5fffabb40b07c14d378a0ea11ec18a0d83634751d4e95c77adb67a72381deb",
    "v1.20": "0dbf500b7c234a2bcdd556b09a6be11fc06c5ff7d56d5aed1ef6ea4091daf116",
    "v1.21": "37278f21b5712be6e2db00446f1211e879ac7ba240fd3d4d747a33786ee843ea",
}
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
