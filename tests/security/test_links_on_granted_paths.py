"""Symbolic links on granted paths, nested in any way, cost no wall, and lead to what they lead to outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.security.test_sandbox import inside

from prime_node.adapters.sandbox import bubblewrap, landlock, namespaces
from prime_node.adapters.sandbox.links import links_on_the_way
from prime_node.cli.wire_sandbox import level_here

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or landlock.abi() < landlock.ABI_SCOPES, reason="needs Landlock of Linux 6.12"
)
SYSTEM = tuple(map(Path, ("/usr", "/bin", "/lib", "/lib64")))
WAYS = {
    "a link in a linked folder": "way/inner/rows",
    "a link to a link": "chain/rows",
    "a link through a link": "through/rows",
    "a link upwards": "data/up/rows",
    "a link to a file": "way/file",
    "no link": "data/rows",
}


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder in which all ways lead to the file data/rows or its copy."""
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    for name in ("data/rows", "data/deep/rows"):
        (tmp_path / name).write_text("rows")
    (tmp_path / "secret").write_text("secret")
    links: dict[str, str | Path] = {
        "way": tmp_path / "data",
        "data/inner": "deep",
        "first": "way",
        "chain": tmp_path / "first",
        "through": "first/inner",
        "data/up": "../data/deep/..",
        "data/file": tmp_path / "first" / "rows",
    }
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    return tmp_path


def test_every_link_is_found_at_its_real_place(linked: Path) -> None:
    data = linked / "data"
    assert links_on_the_way([linked / "through" / "rows"]) == {linked / "through": data / "deep"}
    assert links_on_the_way([linked / "way" / "inner" / "rows"]) == {
        linked / "way": data,
        data / "inner": data / "deep",
    }


def test_links_that_lead_to_each_other_end_the_search(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert links_on_the_way([tmp_path / "a" / "x", Path("/proc/self/root/proc"), Path("/dev/fd/0")]) == {}


@pytest.mark.parametrize("way", WAYS)
def test_links_on_a_granted_path_do_not_cost_the_own_file_system(linked: Path, way: str) -> None:
    if namespaces.WHAT not in level_here().up:
        pytest.skip("this user may not make namespaces here")
    program = """
grants = (*USUAL["read"], Path(told["path"]))
level = confine(SandboxRules(**(USUAL | {"read": grants}), own_root=True))
print(json.dumps([level.sentence(), "own file system" in level.up, Path(told["path"]).read_text(),
    os.path.exists(told["secret"])]))
"""
    path = linked / WAYS[way]
    sentence, up, read, leaks = inside(linked / "mine", program, path=str(path), secret=str(linked / "secret"))
    assert (up, read, leaks) == (True, "rows", False), sentence


@pytest.mark.parametrize("way", WAYS)
def test_links_on_a_granted_path_work_in_bubblewrap(linked: Path, way: str) -> None:
    program, why = bubblewrap.find_bubblewrap()
    if not program:
        pytest.skip(why)
    for switches_user in (False, True):
        view = bubblewrap.View(read=(*SYSTEM, linked / WAYS[way]), switches_user=switches_user)
        command = ["/bin/sh", "-c", f"cat {linked / WAYS[way]}; cat {linked}/secret"]
        ran = subprocess.run(
            bubblewrap.wrap(command, view, program=program), capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.stdout == "rows", ran.stderr
