"""Code builds a path from anything but constants only with the one checked function, or is listed with a reason."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.security.hostile_world import NEVER, NO_MODEL_FILES
from tests.source_tree import parsed

import prime_node
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.inside import place
from prime_protocol.errors import RemoteError

NODE = Path(str(prime_node.__file__)).parent
LOOKS_LIKE_A_FOLDER = re.compile(
    r"folder|path|dir\b|place|partial|public|home|root|parent|model$|keys$|Path\(", re.IGNORECASE
)
OWN_CONSTANTS = "the name comes from a list in the code"
OWN_FOLDER = "made from the path that the user has named"
A_DIGEST = "64 hex digits, checked as such where the join link is parsed"
ALLOWED = {
    "algo/memory_plan.py": "numbers",
    "adapters/environments/data_files.py": "resolved, and refused where it is not below the folder of datasets",
    "adapters/models/model_folder.py": OWN_CONSTANTS,
    "adapters/models/pretrained_model.py": OWN_CONSTANTS,
    "adapters/sandbox/system_paths.py": OWN_CONSTANTS,
    "adapters/storage/folder_blobs.py": "64 hex digits, checked there",
    "adapters/storage/schema_versions.py": OWN_CONSTANTS,
    "adapters/storage/sqlite_store.py": OWN_FOLDER,
    "cli/man.py": OWN_CONSTANTS,
    "cli/service_manager.py": "the name has passed the pattern NAME of cli/service.py",
    "broadcast/audit/export.py": "shards are numbered; a model file's name goes through write_inside",
    "broadcast/audit/ledger_file.py": OWN_FOLDER,
    "broadcast/follow/pinned.py": "the text of an error",
    "broadcast/seed/seed_store.py": "removes what the folder itself has listed",
    "broadcast/swarm/topology.py": "numbers",
    "cli/api.py": A_DIGEST,
    "cli/doctor.py": "numbers",
    "cli/evaluate.py": A_DIGEST,
    "cli/fetch.py": A_DIGEST,
    "cli/gather.py": "names of our own processes",
    "cli/kernels.py": OWN_FOLDER,
    "cli/key_request.py": "a role and a number",
    "cli/keys.py": "a number",
    "cli/measuring.py": "a digest, and numbers of our own pieces",
    "cli/place.py": "a role",
    "cli/run_dir.py": "a role and a number",
    "cli/seed.py": A_DIGEST,
    "cli/shipped.py": "what the user has named",
    "cli/supervisor.py": OWN_FOLDER,
    "cli/timeline.py": OWN_FOLDER,
    "cli/upgrade.py": "the version of this Python",
    "training_data/feed.py": "64 hex digits, checked as such where the batch is parsed",
    "cli/wire_new.py": OWN_CONSTANTS,
    "cli/wire_sandbox.py": OWN_CONSTANTS,
    "files.py": OWN_FOLDER,
    "keyfile.py": OWN_FOLDER,
    "observe.py": OWN_FOLDER,
    "scratch.py": "a constant and a random number",
    "adapters/environments/restrictions.py": "a random number",
    "trainer/batch.py": "numbers",
    "trainer/checkpointing.py": "two numbers of our own state",
}


def made_of_more_than_constants(path: Path) -> Iterator[int]:
    """Return the lines that build a path from anything but constants."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.BinOp(left=left, op=ast.Div(), right=part):
                is_path = LOOKS_LIKE_A_FOLDER.search(ast.unparse(left)) is not None
            case ast.Call(func=ast.Attribute(attr="with_name" | "joinpath"), args=[part, *_]):
                is_path = True
            case _:
                continue
        if is_path and not _is_constant(part):
            yield node.lineno


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


@pytest.mark.xdist_group("source tree")
def test_paths_are_made_by_the_one_function() -> None:
    files = [path for path in NODE.rglob("*.py") if "sim" not in path.parts and path.name != "inside.py"]
    found = {str(path.relative_to(NODE)): list(made_of_more_than_constants(path)) for path in files}
    new = {name: lines for name, lines in found.items() if lines and name not in ALLOWED}
    assert not new, "make the path with prime_node.inside.place, or say here why it needs no check"
    assert not [name for name in ALLOWED if not found.get(name)], "these need no exception any more"


@pytest.mark.parametrize("name", [name for name in NO_MODEL_FILES if set(name) & (NEVER - {"/"}) or ".." in name])
def test_the_one_function_refuses_what_leads_elsewhere(name: str, tmp_path: Path) -> None:
    for whole in (name, f"manifests/{name}", f"{name}/x.json"):
        with pytest.raises(RemoteError):
            place(tmp_path, whole)


def test_the_one_function_takes_folders_of_our_own(tmp_path: Path) -> None:
    assert place(tmp_path, "manifests/00000041.json") == tmp_path / "manifests" / "00000041.json"
    for absolute in ("/etc/passwd", "//x", "a//b", "a/"):
        with pytest.raises(RemoteError):
            place(tmp_path, absolute)


def test_parts_are_named_by_names_of_files_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"mine")
    parts = PartStore(tmp_path / "parts", bytes_max=2**20)
    for name in ("../secret", "/etc/passwd", ".."):
        for call in (lambda: parts.write(name, b"x"), lambda: parts.get(name, 0, 4), lambda: parts.put(name, 0, b"x")):  # noqa: B023
            with pytest.raises(RemoteError):
                call()
    assert (tmp_path / "secret").read_bytes() == b"mine"


@pytest.mark.parametrize("command", ["join", "seed", "fetch"])
def test_a_role_that_is_started_in_a_packed_folder_says_so_and_touches_nothing(command: str, tmp_path: Path) -> None:
    secret = tmp_path / "authorized_keys"
    secret.write_text("mine")
    state = tmp_path / "state"
    (state / "model").mkdir(parents=True)
    (state / "lock").symlink_to(secret)
    done = subprocess.run(
        [sys.executable, "-m", "prime_node", command, f"http://127.0.0.1:9/#{'ab' * 32}", "--folder", str(state)],
        capture_output=True, check=False, timeout=50, text=True, stdin=subprocess.DEVNULL, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "is a link or not a file" in done.stderr
    assert secret.read_text() == "mine"
    assert sorted(path.name for path in state.iterdir()) == ["lock", "model"]
