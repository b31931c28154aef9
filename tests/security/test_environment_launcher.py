"""A role that has confined itself can give no process namespaces; a launcher, started before that, does, and does no more."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.security.hostile_world import BOUNDS, hostile, model, package, tried

from prime_node.adapters.environments.child import Start
from prime_node.adapters.environments.launcher import ORDER_BYTES_MAX, Launched, Launcher, Plan
from prime_node.adapters.environments.process import EnvironmentProcess, ProcessEnvironment
from prime_node.adapters.environments.restrictions import NOBODY, ProcessRestrictions, around_command
from prime_node.adapters.sandbox import bubblewrap
from prime_node.adapters.sandbox.bubblewrap import kill_wrapped
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
        pytest.skip(bubblewrap.find_bubblewrap()[1])
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
bubblewrap.find_bubblewrap.cache_clear()
assert bubblewrap.find_bubblewrap()[1], "a confined process starts none itself"
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


@pytest.mark.slow
def test_a_confined_role_starts_isolated_environments_again_and_again(tmp_path: Path) -> None:
    model(tmp_path / "model")
    variables = os.environ | {"TMPDIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", CONFINED, tmp_path], capture_output=True, text=True, check=False, env=variables
    )
    if ran.returncode == 77:
        pytest.skip(bubblewrap.find_bubblewrap()[1])
    assert ran.returncode == 0, ran.stderr


KEYS = """
import os, sys
from pathlib import Path
from prime_node.adapters.sandbox import bubblewrap
from prime_node.cli.wire_environments import open_launcher, start_environments
from prime_node.cli.wire_sandbox import confine_role, worker_needs
from prime_node.config import SandboxSettings
from prime_node.envs.grants import grant_of
from prime_node.envs.settings import EnvironmentSettings
from prime_node.worker.config import WorkerConfig
from prime_protocol.run_spec import EnvironmentSpec
place, closed = Path(sys.argv[1]), Path("/proc/self/environ")
names = ("judge", "other")
specs = [EnvironmentSpec(name=name, id="reasoning_gym", options={"task": "probe"}) for name in names]
settings = EnvironmentSettings(unsafe_network=(grant_of(specs[0]),))
assert b"key-of-a-judge" in closed.read_bytes()
if sys.argv[2] == "without":
    bubblewrap.find_bubblewrap = lambda: ("", "it is switched off here")
launcher = open_launcher(settings, hidden=[place])
if launcher is None and sys.argv[2] == "with":
    sys.exit(77)
confine_role(SandboxSettings(), place, worker_needs(WorkerConfig(), settings, launcher))
forgotten = not [name for name in os.environ if name.startswith("PRIME_ENVIRONMENT_")]
assert forgotten is (b"key-of-a-judge" not in closed.read_bytes())
if launcher is not None:
    assert forgotten
    assert b"key-of-a-judge" not in Path("/proc/self/environ").read_bytes()
made = start_environments(specs, place / "model", hidden=[place], settings=settings, launcher=launcher)
for name in names:
    try:
        made[name].score(0, "variable NAME_OF_KEY", finished=True)
    except Exception as error:
        print(name, error)
print("forgotten" if forgotten else "kept")
if launcher is not None:  # a run that took the role over asks for more than the settings grant
    taken = EnvironmentSettings(unsafe_network=(grant_of(specs[1]),))
    try:
        start_environments(specs[1:], place / "model", hidden=[place], settings=taken, launcher=launcher)
    except Exception as error:
        print(error)
"""


@pytest.mark.parametrize("launcher", ["with", "without"])
def test_a_confined_role_forgets_the_keys_of_judges_and_its_environments_still_get_them(
    tmp_path: Path, launcher: str
) -> None:
    """Without a launcher the role must keep them, because it starts the processes itself."""
    model(tmp_path / "model")
    tmp_path.chmod(0o755)  # without a launcher they run as another user in the role's view of files
    variables = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    variables |= {"PYTHONPATH": str(package(tmp_path / "package")), "PRIME_ENVIRONMENT_NAME_OF_KEY": "key-of-a-judge"}
    ran = subprocess.run(
        [sys.executable, "-c", KEYS, tmp_path, launcher], capture_output=True, text=True, check=False, env=variables
    )
    if ran.returncode == 77:
        pytest.skip(bubblewrap.find_bubblewrap()[1])
    assert ran.returncode == 0, ran.stderr
    judge, other, kept, *more = ran.stdout.splitlines()
    assert more == (["environment other may not use the network"] if launcher == "with" else [])
    assert judge.endswith("did: key-of-a-judge")
    assert other.endswith("did: None")
    assert kept == ("forgotten" if launcher == "with" else "kept")


def test_roles_that_hand_no_keys_on_forget_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_node.cli.wire_sandbox import forget_secrets

    monkeypatch.setenv("PRIME_ENVIRONMENT_A", "a")
    monkeypatch.setenv("PRIME_ENVIRONMENT_B", "b")
    forget_secrets(["PRIME_ENVIRONMENT_B"], keys_of_judges=True)
    assert "PRIME_ENVIRONMENT_A" not in os.environ
    assert "PRIME_ENVIRONMENT_B" in os.environ


def restrictions(**changes: Any) -> ProcessRestrictions:
    bounds = {
        name: value for name, value in BOUNDS.model_dump().items() if name in ProcessRestrictions.__dataclass_fields__
    }
    return ProcessRestrictions(**{"read": (), "hidden": (), "network": False, "loopback": True, **bounds, **changes})


@contextlib.contextmanager
def launching(script: str, plan: Plan) -> Iterator[Launcher]:
    """Start a launcher whose processes run a shell script. Only bubblewrap confines them."""
    if why := bubblewrap.find_bubblewrap()[1]:
        pytest.skip(why)
    launcher = Launcher({False: plan}, ["/bin/sh", "-c", script])
    try:
        yield launcher
    finally:
        launcher.close()


def answer_of(made: Launched | subprocess.Popen[bytes]) -> str:
    """Return everything that a process prints until it ends."""
    assert made.stdin is not None
    assert made.stdout is not None
    assert made.stderr is not None
    with made.stdin, made.stdout, made.stderr:
        return made.stdout.read().decode()


def test_an_order_brings_no_command_and_a_bad_one_starts_nothing() -> None:
    with launching("echo up; exec sleep 987654", Plan(restrictions())) as launcher:
        made = launcher.start(network=False)
        assert made.stdout.readline() == b"up\n"
        arguments = Path(f"/proc/{made.pid}/cmdline")
        assert b"\0--\0/bin/sh\0-c\0echo up; exec sleep 987654\0" in arguments.read_bytes()
        narrow = {"network": False, "loopback": False}
        orders: list[object] = [
            *(
                {"network": True, "loopback": False, "read": []},
                {},
                {"line": ["/bin/true"]},
                {"kill": "x"},
                {"kill": 1},
            ),
            *([], 7, {**narrow, "read": 1}, {**narrow, "read": ["\0"]}, {**narrow, "read": ["relative"]}, narrow),
        ]
        for order in orders:
            with Path(os.devnull).open("rb") as pipe:
                socket.send_fds(launcher.channel, [json.dumps(order).encode()], [pipe.fileno()] * 3)
            assert "pid" not in json.loads(launcher.channel.recv(ORDER_BYTES_MAX)), order
        with pytest.raises(LocalError, match="does not start"):
            launcher.start(network=True)
        assert arguments.exists(), "what runs goes on"
        launcher.kill(made.pid)
        assert not arguments.exists()
        answer_of(made)


def test_what_it_started_ends_with_its_role() -> None:
    with launching("echo up; exec sleep 987654", Plan(restrictions())) as launcher:
        made = launcher.start(network=False)
        assert made.stdout.readline() == b"up\n"
    answer_of(made)
    assert not Path(f"/proc/{made.pid}").exists()


@pytest.mark.parametrize("direct", [False, True], ids=["launched", "direct"])
def test_a_process_killed_in_its_set_up_leaves_nothing(direct: bool) -> None:
    """bubblewrap's inner process survived its outer one when that was killed early, and held the pipes open."""
    script = "echo up; exec sleep 987653"
    with launching(script, Plan(restrictions())) as launcher:
        for attempt in range(40):
            made: Launched | subprocess.Popen[bytes]
            if direct:
                line, _, _ = around_command(["/bin/sh", "-c", script], Path("/tmp"), restrictions(), imports=[])
                pipe = subprocess.PIPE
                made = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
            else:
                made = launcher.start(network=False)
            assert made.stdout is not None
            select.select([made.stdout], [], [], 0.0005 * attempt)
            if isinstance(made, Launched):
                made.kill()
            else:
                kill_wrapped(made)
            answer_of(made)


def test_a_process_sees_the_files_of_its_own_environments_and_no_others(tmp_path: Path) -> None:
    """bubblewrap alone keeps the others away: the script never confines itself."""
    data, other = tmp_path / "data", tmp_path / "data" / "other.jsonl"
    data.mkdir()
    (data / "mine.jsonl").write_text("mine")
    other.write_text("other")
    with launching(f"ls {data}; cat {data}/*", Plan(restrictions(), (str(data),))) as launcher:
        made = launcher.start(network=False, read=[str(data / "mine.jsonl")])
        assert answer_of(made) == "mine.jsonl\nmine"
        made = launcher.start(network=False)
        assert "mine" not in answer_of(made)


def test_an_order_opens_nothing_outside_the_plan(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "data" / "run"
    run.mkdir(parents=True)
    for path in (tmp_path / "secret", run / "worker.key", data / "rows"):
        path.write_text("secret")
    (data / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "way").symlink_to(data)
    refused = [
        *(tmp_path / "secret", run / "worker.key", data / "link", data, data / ".." / "secret", data / "gone"),
        *(tmp_path / "way" / "rows", Path("/etc/shadow"), Path("/"), data / "run" / ".." / "rows"),
    ]
    with launching("exec true", Plan(restrictions(hidden=(str(run),)), (str(data),))) as launcher:
        for path in refused:
            with pytest.raises(LocalError, match="does not start"):
                launcher.start(network=False, read=[str(path)])
        answer_of(launcher.start(network=False, read=[str(data / "rows")]))


def test_a_role_that_was_taken_over_widens_no_walls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role sends a process weaker restrictions. That worked before the launcher wrote them into the command line."""
    monkeypatch.setenv("PYTHONPATH", str(package(tmp_path / "package")))
    monkeypatch.setenv("PRIME_ENVIRONMENT_KEY_OF_A_JUDGE", "secret")
    launcher = open_launcher(BOUNDS, hidden=[tmp_path / "run"])
    if launcher is None:
        pytest.skip(bubblewrap.find_bubblewrap()[1])
    wide = asdict(
        restrictions(read=("/",), network=True, memory_bytes_max=2**40, processes_max=10**6, open_files_max=10**5)
    )
    hello = {
        "environments": [hostile().model_dump()],
        "model": {},
        "folder": "/",
        "restrictions": wide,
        "grade_together": True,
    }
    process = EnvironmentProcess(lambda _: Start(launch=partial(launcher.start, network=False)), hello)
    world = ProcessEnvironment(process, "hostile")
    try:
        assert tried(world, "raise_limits").startswith("refused")
        assert re.match("refused: MemoryError", tried(world, "memory_bomb", str(2**31)))
        assert re.match("refused: OSError EMFILE", tried(world, "open_bomb"))
        assert tried(world, "open_socket", "2,2,0").startswith("refused")
        assert "refused" in tried(world, "read", "/etc/shadow")
        assert tried(world, "user") == f"did: {NOBODY if os.geteuid() == 0 else os.geteuid()}"
        assert "secret" not in tried(world, "read", "/proc/self/environ")
    finally:
        process.close()
        launcher.close()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
