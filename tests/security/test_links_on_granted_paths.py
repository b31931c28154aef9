"""Symbolic links on granted paths, nested in any way, weaken no restriction, and have the same targets as outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.security.hostile_world import BOUNDS
from tests.security.sandbox_world import inside

from prime_node.adapters.sandbox import bubblewrap, landlock, namespaces
from prime_node.adapters.sandbox.links import links_on_the_way
from prime_node.cli.wire_environments import open_launcher
from prime_node.cli.wire_sandbox import level_here
from prime_protocol.errors import LocalError

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
    """Make a folder in which all links lead to the file data/rows or its copy."""
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
grants = (*USUAL["read"], Path(options["path"]))
level = confine(SandboxRules(**(USUAL | {"read": grants}), own_root=True))
print(json.dumps([level.sentence(), "own file system" in level.up, Path(options["path"]).read_text(),
    os.path.exists(options["secret"])]))
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


@pytest.mark.parametrize(
    ("granted", "closed"),
    [
        ({"readable": ("open/rows",)}, "run"),
        ({"data_folder": "open/rows"}, "run"),
        ({"readable": ("way/rows",)}, "run"),
        ({"readable": ("to-open",)}, "run"),
        ({"readable": ("open/rows/../../data",)}, "run"),
        ({"data_folder": "open"}, "open/run"),
    ],
    ids=["below", "a dataset", "through a link in it", "a link into it", "through it", "around what is closed"],
)
def test_environments_read_nothing_that_the_role_could_replace_by_a_link(
    tmp_path: Path, granted: dict[str, Any], closed: str
) -> None:
    """Before, a role that was taken over put a link there, and the next process of environments read what it led to."""
    for name in ("open/rows", "data/rows", closed):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "open" / "way").symlink_to(tmp_path / "data")
    (tmp_path / "way").symlink_to(tmp_path / "open" / "way")
    (tmp_path / "to-open").symlink_to(tmp_path / "open" / "rows")
    paths: dict[str, Any] = {
        name: tuple(tmp_path / one for one in granted_to) if isinstance(granted_to, tuple) else tmp_path / granted_to
        for name, granted_to in granted.items()
    }
    settings = BOUNDS.model_copy(update=paths)
    hidden, changeable = [tmp_path / closed], [tmp_path / closed, tmp_path / "open"]
    if bubblewrap.find_bubblewrap()[1]:
        pytest.skip(bubblewrap.find_bubblewrap()[1])
    with pytest.raises(LocalError, match=r"which this role may write|this role may write .* in it"):
        open_launcher(settings, hidden=hidden, changeable=changeable)


def test_a_folder_that_the_role_may_write_itself_is_granted_whole(tmp_path: Path) -> None:
    """The role cannot replace it, because the folders above it are closed to the role. A link inside it leads nowhere."""
    (tmp_path / "open").mkdir()
    (tmp_path / "run").mkdir()
    settings = BOUNDS.model_copy(update={"data_folder": tmp_path / "open"})
    changeable = [tmp_path / "run", tmp_path / "open"]
    launcher = open_launcher(settings, hidden=[tmp_path / "run"], changeable=changeable)
    if launcher is None:
        pytest.skip(bubblewrap.find_bubblewrap()[1])
    launcher.close()


def test_an_interpreter_that_the_role_could_rewrite_is_refused(tmp_path: Path) -> None:
    if bubblewrap.find_bubblewrap()[1]:
        pytest.skip(bubblewrap.find_bubblewrap()[1])
    with pytest.raises(LocalError, match="which this role may write"):
        open_launcher(BOUNDS, hidden=[tmp_path], changeable=[tmp_path, Path(sys.prefix).parent])
