"""A worker that can hurt only itself: `join` in a hostile run, without the check that would have stopped the run first."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.builder import build_spec, role_keys

from prime_node.adapters.sandbox import landlock, namespaces
from prime_node.cli.wire_sandbox import level_here
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import EnvironmentSpec

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or landlock.abi() < landlock.ABI_SCOPES, reason="needs Landlock of Linux 6.12"
    ),
    pytest.mark.timeout(300),
]
SHARED = f"prime-test-{os.getpid()}"
ABSOLUTE = ("/tmp/prime-test-evil.sh", "/dev/shm/prime-test-evil", "/etc/prime-test-evil")
OURS = "written by the run"


class Contributor:
    """A machine with a home that holds secrets, and a run that tries to read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, self.outside = folder / "home", folder / "outside"
        for made in (self.home / ".ssh", self.home / ".prime-node", self.outside):
            made.mkdir(parents=True, mode=0o700)
        (self.home / ".ssh" / "id_ed25519").write_text("secret")
        (self.home / ".prime-node" / "identity.key").write_text("11" * 32 + "\n")
        (self.home / ".prime-node" / "identity.key").chmod(0o600)
        (self.home / ".bashrc").write_text("mine")
        self.place = folder / "home" / ".prime-node" / "runs" / "hostile"

    def everything(self) -> dict[str, tuple[int, float, bytes]]:
        """Return mode, time and bytes of all files outside the worker's own folder."""
        return {
            str(path): (path.stat().st_mode, path.stat().st_mtime, path.read_bytes())
            for path in self.folder.rglob("*")
            if path.is_file() and self.place not in path.parents
        }


@pytest.fixture
def contributor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Contributor]:
    """The home is outside /tmp, which is another and empty one inside: files written there would vanish anyway."""
    folder = Path(tempfile.mkdtemp(prefix="prime-test-", dir="/var/tmp"))
    made = Contributor(folder)
    shared = Path("/dev/shm") / SHARED
    shared.write_bytes(b"secret")
    monkeypatch.chdir(made.outside)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as abstract:
        by_path.bind("agent.sock")
        abstract.bind(f"\0{SHARED}")
        by_path.listen()
        abstract.listen()
        yield made
    shared.unlink()
    shutil.rmtree(folder)


@pytest.fixture
def hostile_run(contributor: Contributor) -> Iterator[str]:
    """Return its join link. Its model files have names like paths to other places."""
    key = SigningKey(bytes(32))
    names = [
        *("config.json", "../../../../.bashrc", "../../identity.key", "../../../../.ssh/authorized_keys"),
        *(str(contributor.outside / "absolute.sh"), str(contributor.home / ".config/autostart/evil.desktop")),
        *(*ABSOLUTE, "../../../../../outside/up.sh", "zz.json"),
    ]
    data = OURS.encode()
    spec = build_spec(
        role_keys(key, key, key, key),
        {"config.json": data},
        vocab_size=8,
        environments=(EnvironmentSpec(name="a", id="reasoning_gym"),),
        sampling={"completion_tokens_max": 8, "stop_token_ids": (1,)},
    )
    described = spec.model_dump(mode="json")
    described["model_files"] = [{"name": name, "digest": digest_of(data), "size": len(data)} for name in names]
    envelope = seal(json.dumps(described).encode(), PayloadType.RUN_SPEC, key)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = envelope.to_bytes() if self.path == "/v1/run" else data
            self.send_response(200 if "Range" not in self.headers else 206)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: this server is the attacker's."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/#{envelope.digest}"
    for name in ABSOLUTE:
        Path(name).unlink(missing_ok=True)
    server.shutdown()
    server.server_close()


def joined(contributor: Contributor, link: str, *settings: str, left_out: str = "none") -> dict[str, Any]:
    """Return what the hostile run's code could do in a real `prime-node join`."""
    command = [sys.executable, str(Path(__file__).with_name("hostile_join.py")), left_out, "join", link]
    for setting in settings:
        command += ["--set", setting]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    variables |= {"HOME": str(contributor.home), "MY_TOKEN": "in-the-env"}
    variables |= {"PRIME_TEST_ATTACKED": str(contributor.folder), "PRIME_TEST_SHARED": SHARED}
    ran = subprocess.run(
        [*command, "--folder", str(contributor.place), "--engine", "transformers"],
        env=variables,
        cwd=contributor.outside,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 42, ran.stdout + ran.stderr
    report: dict[str, Any] = json.loads((contributor.place / "report").read_text())
    return report


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["none", "namespaces", "landlock"])
def test_a_hostile_run_writes_and_reads_nothing_outside_even_if_one_wall_more_is_missing(
    contributor: Contributor, hostile_run: str, left_out: str
) -> None:
    if left_out == "landlock" and namespaces.WHAT not in level_here().up:
        pytest.skip("this user may not make namespaces here, so no wall would be left")
    before = contributor.everything()
    report = joined(contributor, hostile_run, left_out=left_out)
    assert contributor.everything() == before
    assert not any(Path(name).exists() for name in ABSOLUTE)
    assert (contributor.place / "model" / "config.json").read_text() == OURS
    # Files in the process's own, empty /tmp and /dev/shm vanish with it.
    inside = {"config.json", "zz.json", *ABSOLUTE[:2]}
    assert [name for name, result in report["files"].items() if result.startswith("done") and name not in inside] == []
    allowed = {"socket file"} if left_out == "namespaces" and landlock.abi() < landlock.ABI_UNIX_PATHS else set()
    allowed |= (
        {"environment of the parent", "root of the parent", "abstract socket", "kill the parent"}
        if left_out == "landlock"
        else set()
    )
    done = {name for name, result in report["attacks"].items() if result.startswith("done")}
    assert done <= allowed, report["attacks"]


@pytest.mark.slow
def test_libp2p_and_multicast_dns_work_in_a_confined_process(tmp_path: Path) -> None:
    """The two have their own tests, which run inside."""
    pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")
    tests = Path(__file__).resolve().parents[2]
    program = """
import sys
from pathlib import Path
from prime_node.cli.wire_sandbox import Needs, confine_role
from prime_node.config import SandboxSettings
confine_role(SandboxSettings(also_read=(Path(sys.argv[1]),)), Path(sys.argv[2]), Needs())
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[3:]]))
"""
    over_libp2p = (
        "tests/node/test_swarm_libp2p.py::test_a_newcomer_that_knows_one_peer_joins_after_the_coordinator_has_ended"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tests), str(tmp_path), "tests/node/test_mdns.py", over_libp2p],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        cwd=tests,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_confined_root_without_its_own_file_system_starts_an_environment_as_another_user(tmp_path: Path) -> None:
    """The filter lets it change no owner, so the folder is made by the user that owns it."""
    if os.geteuid() != 0:
        pytest.skip("only root gives environments to another user")
    program = """
import os, sys
from pathlib import Path
from prime_node.adapters.environments import restrictions
from prime_node.cli.wire_sandbox import Needs, confine_role
from prime_node.config import SandboxSettings
from prime_node.scratch import Scratch
confine_role(SandboxSettings(unsafe_no_namespaces=True), Path(sys.argv[1]), Needs(environments=True, vllm=sys.argv[2] == "vllm"))
folder = restrictions._own_folder(Scratch("environments", mode=0o711).path, 65534)
print(folder.stat().st_uid, oct(folder.stat().st_mode))
"""
    variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    for engine in ("transformers", "vllm"):
        ran = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), engine],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.stdout.split() == ["65534", "0o40700"], ran.stderr


def test_a_confined_root_can_still_give_environments_to_another_user_and_end_them(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives environments to another user")
    program = """
import os, subprocess, sys
from pathlib import Path
from prime_node.cli.wire_sandbox import Needs, confine_role
from prime_node.config import SandboxSettings
from prime_node.scratch import Scratch
confine_role(SandboxSettings(), Path(sys.argv[1]), Needs(environments=True))
folder = Scratch("environments").path
os.chown(folder, 65534, 65534)
child = subprocess.Popen(["sleep", "60"], user=65534, group=65534, extra_groups=[], cwd=folder)
child.kill()
print(child.wait(), subprocess.run(["touch", "made"], user=65534, group=65534, extra_groups=[], cwd=folder).returncode)
"""
    variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=variables, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == ["-9", "0"], ran.stderr


def test_without_walls_the_same_run_does_all_of_it(contributor: Contributor, hostile_run: str) -> None:
    """This shows that the test above passes because of the restriction."""
    report = joined(contributor, hostile_run, "worker.sandbox.unsafe_off=true")
    assert (contributor.outside / "absolute.sh").read_text() == OURS
    assert (contributor.home / ".bashrc").read_text().startswith(OURS)
    refused = {name for name, result in report["attacks"].items() if not result.startswith("done")}
    of_root = set() if os.geteuid() == 0 else {"set the core pattern", "write back caches"}
    assert refused <= of_root | {"raw disk", "root of the parent", "replace by rename"}, report["attacks"]


def test_the_folder_of_the_users_own_program_is_closed_unless_pythonpath_names_it(contributor: Contributor) -> None:
    """A program that uses the Python API and is started from another folder, as cron does."""
    project, place = contributor.home / "project", contributor.place
    project.mkdir()
    place.mkdir(parents=True)
    (project / ".env").write_text("secret")
    (project / "run.py").write_text(
        "import logging, sys\nfrom pathlib import Path\n"
        "from prime_node.cli.wire_sandbox import Needs, confine_role\nfrom prime_node.config import SandboxSettings\n"
        "logging.basicConfig(level=logging.INFO)\nconfine_role(SandboxSettings(), Path(sys.argv[1]), Needs())\n"
        "print(Path(sys.argv[2]).read_text())\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"HOME": str(contributor.home), "OPENBLAS_NUM_THREADS": "1"}

    def ran(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(project / "run.py"), str(place), str(project / ".env")]
        return subprocess.run(command, env=variables | more, cwd="/", capture_output=True, text=True, check=False)

    closed, named = ran(), ran(PYTHONPATH=str(project))
    assert "Error" in closed.stderr.splitlines()[-1]
    assert closed.stdout == ""
    assert named.stdout == "secret\n"
    assert f"may read the folders of PYTHONPATH: {project}" in named.stderr
