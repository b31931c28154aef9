"""A role that has confined itself can give no process namespaces; a launcher, started before that, does, and does no more."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.security.hostile_world import BOUNDS, hostile, model, package, tried

from prime_node.adapters.environments.launcher import ORDER_BYTES_MAX, Launcher, Plan
from prime_node.adapters.sandbox import bubblewrap
from prime_node.cli.wire_environments import end_environments, open_launcher, start_environments
from prime_protocol.errors import LocalError

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")]


def test_a_launched_process_has_all_walls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(package(tmp_path / "package")))
    key = tmp_path / "run" / "worker.key"
    key.parent.mkdir()
    key.write_text("secret")
    launcher = open_launcher(BOUNDS, hidden=[key.parent])
    if launcher is None:
        pytest.skip(bubblewrap.find()[1])
    made = start_environments([hostile()], model(tmp_path / "model"), hidden=[], settings=BOUNDS, launcher=launcher)
    world = made["hostile"]
    try:
        assert not any("namespaces" in each for each in world.process.ready["missing"])
        assert tried(world, "read", str(key)).startswith("refused")
        assert tried(world, "listing", str(tmp_path)) == "did: package"
        assert tried(world, "open_socket", "2,2,0").startswith("refused")
        assert tried(world, "survive", "654321") == "did: started"
    finally:
        end_environments(made)
        launcher.close()
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if b"654321" in _bytes(each)]


CONFINED = """
import sys
from pathlib import Path
from prime_node.adapters.sandbox import bubblewrap
from prime_node.cli.wire_sandbox import Needs, confine_role
from prime_node.config import SandboxSettings
from prime_node.cli.wire_environments import end_environments, open_launcher, start_environments
from prime_node.envs.settings import EnvironmentSettings
from prime_protocol.run_spec import EnvironmentSpec
place = Path(sys.argv[1])
settings = EnvironmentSettings()
launcher = open_launcher(settings, hidden=[place])
if launcher is None:
    sys.exit(77)
confine_role(SandboxSettings(), place, Needs(environments=True))
bubblewrap.find.cache_clear()
assert bubblewrap.find()[1], "a confined process starts none itself"
spec = EnvironmentSpec(name="spell", id="reasoning_gym", options={"task": "spell_backward"})
made = start_environments([spec], place / "model", hidden=[place], settings=settings, launcher=launcher)
assert made["spell"].score(0, made["spell"].answer(0), finished=True) == 1.0
first = made["spell"].process.pid
launcher.kill(first)
while made["spell"].process.pid == first:
    try: made["spell"].prompt(1)
    except Exception as error: print(error)
assert made["spell"].answer(0)
assert not any("namespaces" in each for each in made["spell"].process.ready["missing"])
end_environments(made)
launcher.close()
"""


def test_a_confined_role_starts_isolated_environments_again_and_again(tmp_path: Path) -> None:
    model(tmp_path / "model")
    variables = os.environ | {"TMPDIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", CONFINED, tmp_path], capture_output=True, text=True, check=False, env=variables
    )
    if ran.returncode == 77:
        pytest.skip(bubblewrap.find()[1])
    assert ran.returncode == 0, ran.stderr


def sleeper() -> Launcher:
    return Launcher({False: Plan(["/bin/sleep", "987654"], {"PATH": "/bin"}, None)})


def test_an_order_brings_no_command_and_a_bad_one_starts_nothing() -> None:
    launcher = sleeper()
    try:
        made = launcher.start(network=False)
        arguments = Path(f"/proc/{made.pid}/cmdline")
        assert arguments.read_bytes().split(b"\0")[:2] == [b"/bin/sleep", b"987654"]
        orders: list[object] = [{"network": True}, {}, {"line": ["/bin/true"]}, {"kill": "x"}, {"kill": 1}, [], 7]
        for order in orders:
            socket.send_fds(launcher._channel, [json.dumps(order).encode()], [])
            assert "pid" not in json.loads(launcher._channel.recv(ORDER_BYTES_MAX))
        with pytest.raises(LocalError, match="does not start"):
            launcher.start(network=True)
        assert arguments.exists(), "what runs goes on"
        launcher.kill(made.pid)
        assert not arguments.exists()
        for stream in (made.stdin, made.stdout, made.stderr):
            stream.close()
    finally:
        launcher.close()


def test_what_it_started_ends_with_its_role() -> None:
    launcher = sleeper()
    made = launcher.start(network=False)
    for stream in (made.stdin, made.stdout, made.stderr):
        stream.close()
    launcher.close()
    assert not Path(f"/proc/{made.pid}").exists()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
