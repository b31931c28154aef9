"""A real environment process with a hostile package (probes.py), and the things outside that it must not reach."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.environments.child import EnvironmentFailed
from prime_node.adapters.environments.process import ProcessEnvironment
from prime_node.adapters.sandbox import bubblewrap
from prime_node.cli.wire_environments import end_environments, start_environments
from prime_node.envs.settings import EnvironmentSettings
from prime_protocol.run_spec import EnvironmentSpec

HERE = Path(__file__).parent
BOUNDS = EnvironmentSettings(
    memory_bytes_max=2**30,
    processes_max=128,
    file_bytes_max=2**20,
    open_files_max=128,
    tmp_bytes_max=2**24,
    unsafe_grade_together=True,
)
"""Settings of the probes, which are a package's code: they run in the process of environments, not in one for an answer."""


def package(folder: Path) -> Path:
    """Write the hostile package under a name that environments import, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in (("reasoning_gym", "probes"), ("bombs", "bombs")):
        (folder / f"{name}.py").write_bytes((HERE / f"{file}.py").read_bytes())
    return folder


def model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_tiny_model(folder, hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)


def hostile(task: str = "probe", name: str = "hostile") -> EnvironmentSpec:
    return EnvironmentSpec(name=name, id="reasoning_gym", options={"task": task})


@contextlib.contextmanager
def running(
    place: Path,
    *,
    isolated: bool = True,
    task: str = "probe",
    settings: EnvironmentSettings = BOUNDS,
    hidden: tuple[Path, ...] = (),
) -> Iterator[ProcessEnvironment]:
    """Start a hostile environment, with bubblewrap if `isolated`, otherwise as on a machine without it."""
    if isolated and (why := bubblewrap.find_bubblewrap()[1]):
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package(place / "package")))
        if not isolated:
            patch.setattr(bubblewrap, "find_bubblewrap", lambda: ("", "it is switched off here"))
        made = start_environments([hostile(task)], model(place / "model"), hidden=hidden, settings=settings)
        try:
            yield made["hostile"]
        finally:
            end_environments(made)


def tried(world: ProcessEnvironment, probe: str, argument: str = "") -> str:
    """Return the outcome of a probe: "did: ..." or "refused: ..."."""
    try:
        world.score(0, f"{probe} {argument}", finished=True)
    except EnvironmentFailed as error:
        return str(error).removeprefix("RuntimeError: ").strip()
    raise AssertionError("a probe gives no reward")


@dataclass(frozen=True)
class Outside:
    """Things that belong to the user, not to environments."""

    folder: Path
    key: Path
    """Key in the role's folder, which is hidden."""
    own: Path
    """File of the user that every user may read and write."""
    abstract: str
    path_sockets: tuple[str, ...]
    tcp: str
    udp: str
    shared: str
    """Name in /dev/shm."""
    pid: int
    """Id of a process of the same user."""


@contextlib.contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    run = folder / "run"
    run.mkdir()
    key, own = run / "trainer.key", folder / "notes.txt"
    key.write_text("secret")
    own.write_text("secret")
    own.chmod(0o666)
    folder.chmod(0o777)
    name, shared = f"prime-test-{os.getpid()}", f"prime-test-{os.getpid()}"
    Path("/dev/shm", shared).write_text("secret")
    paths = [f"/tmp/{name}.sock", str(folder / "docker.sock")]
    if os.access("/run", os.W_OK):
        paths.append(f"/run/{name}.sock")
    with contextlib.ExitStack() as stack:
        for address in (f"\0{name}", *paths):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
            if not address.startswith("\0"):
                Path(address).chmod(0o777)
                stack.callback(Path(address).unlink)
        tcp = stack.enter_context(socket.socket())
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"SECRET": "secret"})
        assert victim.stdin is not None
        stack.callback(victim.stdin.close)
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        stack.callback(Path("/dev/shm", shared).unlink)
        yield Outside(
            folder,
            key,
            own,
            name,
            tuple(paths),
            f"127.0.0.1:{tcp.getsockname()[1]}",
            f"127.0.0.1:{udp.getsockname()[1]}",
            shared,
            victim.pid,
        )
        assert victim.poll() is None, "nobody ended it"
        assert (key.read_text(), own.read_text()) == ("secret", "secret")


NO_MODEL_FILES = [
    "../x.json",
    "../../.bashrc",
    "..",
    ".",
    "",
    "/etc/cron.d/x.json",
    "/x.json",
    "a/b.json",
    "a\\b.json",
    "C:x.json",
    "\\\\server\\share\\x.json",
    "x.json/",
    "~/x.json",
    "$HOME.json",
    ".hidden.json",
    "-rf.json",
    "x.py",
    "x.pkl",
    "x.so",
    "x.bin",
    "x.sh",
    "x.pth",
    "x.json.py",
    "x",
    "json",
    ".json",
    "x.JSON",
    "x.json\0",
    "x\0.json",
    "x.json\n",
    "x\n.json",
    "x\r.json",
    "x.json ",
    " x.json",
    "x.json.",
    "x.json:stream.json",
    "x\u202ejson.md",
    "x\u200b.json",
    "x\uff0e.json",
    "ö.json",
    "x\x1b[2J.json",
    "\u2025/x.json",
    "con.json",
    "CON.json",
    "nul.txt",
    "aux.tokenizer.json",
    "PRN.md",
    "com1.json",
    "LPT9.model",
    "x" * 196 + ".json",
    "x" * 10_000 + ".json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "adapter_config.json",
    "PROVENANCE.dsse.json",
]
NEVER = set("/\\\0\n ~")
"""Characters that no name of a file contains."""
