"""scripts/install.py and `prime-node upgrade`: only what is signed is run, and what does not start is taken back."""

from __future__ import annotations

import base64
import contextlib
import ensurepip
import hashlib
import json
import os
import re
import runpy
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.source_tree import ROOT

from prime_node.cli.missing_extra import recorded_installation
from prime_node.cli.upgrade import upgrade
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey

INSTALL: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "install.py"))
WHEELS_OF_DEBIAN = Path("/usr/share/python-wheels")
KEY = SigningKey(b"a key of releases for this test.")
PIP = next(
    path
    for place in (Path(ensurepip.__file__).parent / "_bundled", WHEELS_OF_DEBIAN)
    for path in place.glob("pip-*.whl")
)
STARTS = "import sys\ndef main():\n    print('{version}')\n"
FAILS = "import sys\ndef main():\n    sys.exit('no such module: something')\n"


def release(folder: Path, version: str, program: str = STARTS, key: SigningKey = KEY) -> Path:
    """Write a signed release of a tiny wheel whose `prime-node` prints its version."""
    folder.mkdir()
    name, info = f"prime_node-{version}", f"prime_node-{version}.dist-info"
    files = {
        "prime_tiny.py": program.format(version=version),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: prime-node\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nprime-node = prime_tiny:main\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,", ""])}).items():
            wheel.writestr(path, text)
    for lock in ("verifier", "operator", "envs"):
        (folder / f"{lock}.txt").write_text("# nothing\n")
    shutil.copy(PIP, folder)
    (folder / "install.py").write_bytes((ROOT / "scripts" / "install.py").read_bytes())
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    text = json.dumps({"version": version, "python": ["3.11", "3.15"], "notes": f"News of {version}", "files": digests})
    (folder / "release.json").write_text(text)
    (folder / "release.json.sig").write_bytes(key.sign(text.encode()))
    return folder


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def run_installer(
    folder: Path, home: Path, *options: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Call the installer of a release in the release's folder, from where nothing may be imported."""
    command = [python, "-I", "install.py", "--role", "verifier", "--key", KEY.public.raw.hex(), *options]
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def plant(folder: Path) -> Path:
    """Put modules of a stranger into a folder. Return the file that they would make."""
    made = folder / "planted-code-has-run"
    text = f"open({str(made)!r}, 'w').close()\n"
    modules = re.findall(r"^(?:import|from) ([a-z_]+)", (ROOT / "scripts" / "install.py").read_text(), re.MULTILINE)
    assert "argparse" in modules
    for module in {*modules, "__future__", "ensurepip", "pip", "runpy", "venv"}:
        (folder / f"{module}.py").write_text(text)
    return made


def test_the_installer_verifies_as_the_library_does() -> None:
    for _ in range(8):
        key, message = SigningKey(secrets.token_bytes(32)), secrets.token_bytes(40)
        signature = key.sign(message)
        assert INSTALL["is_signed"](message, signature, key.public.raw)
        changed = bytearray(signature)
        changed[secrets.randbelow(64)] ^= 1 << secrets.randbelow(8)
        assert not INSTALL["is_signed"](message, bytes(changed), key.public.raw)
        assert not INSTALL["is_signed"](message + b"x", signature, key.public.raw)
        assert not INSTALL["is_signed"](message, signature, KEY.public.raw)
    beyond = int.from_bytes(signature[32:], "little") + INSTALL["Q"]
    assert not INSTALL["is_signed"](message, signature[:32] + beyond.to_bytes(32, "little"), key.public.raw)


def test_nothing_of_a_release_is_used_that_is_not_signed(tmp_path: Path) -> None:
    forged = release(tmp_path / "forged", "0.1.0", key=SigningKey(secrets.token_bytes(32)))
    planted = plant(forged)
    plain = subprocess.run([sys.executable, str(forged / "install.py")], capture_output=True, text=True)
    assert (plain.returncode, plain.stdout) == (1, "")
    assert "call `python3 -I install.py ...`" in plain.stderr
    ran = run_installer(forged, tmp_path / "home")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "release.json is not signed by the key" in ran.stderr
    assert not planted.exists()
    changed = release(tmp_path / "changed", "0.1.0")
    (changed / "verifier.txt").write_text("evil==1.0 --hash=sha256:00\n")
    ran = run_installer(changed, tmp_path / "home")
    assert "verifier.txt has another digest than release.json" in ran.stderr
    assert not (tmp_path / "home" / ".local" / "share" / "prime-node" / "current").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_upgrade_keeps_the_old_version_until_the_new_one_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    one = release(tmp_path / "first", "0.1.0")
    planted = plant(one)
    first = run_installer(one, home)
    assert first.returncode == 0, first.stderr
    monkeypatch.chdir(one)
    program, place = home / ".local" / "bin" / "prime-node", home / ".local" / "share" / "prime-node"

    def version() -> str:
        return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.strip()

    assert version() == "0.1.0"
    found = f"{first.stdout.splitlines()[-1]} && command -v prime-node"  # as a reader copies the last line
    ran = subprocess.run(["sh", "-c", found], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert ran.stdout.strip() == str(program), first.stdout
    again = run_installer(one, home)
    assert again.stdout == "prime-node 0.1.0 is installed already\n"
    both = run_installer(one, home, "--role", "operator")
    assert "0.1.0 is installed for operator, verifier" in both.stdout, both.stderr
    assert (place / "current").readlink() == Path("versions/0.1.0-operator-verifier")
    monkeypatch.setattr(sys, "prefix", str(place / "versions" / "0.1.0-operator-verifier"))
    upgrade(str(one))
    assert "prime-node 0.1.0 is up to date" in capfd.readouterr().out
    with pytest.raises(LocalError, match="does not work here: `prime-node --version` ended with 1: no such module"):
        upgrade(str(release(tmp_path / "broken", "0.2.0", FAILS)))
    assert version() == "0.1.0"
    assert not (place / "versions" / "0.2.0").exists()
    with pytest.raises(LocalError, match="not signed by the key of this installation"):
        upgrade(str(release(tmp_path / "forged", "0.3.0", key=SigningKey(secrets.token_bytes(32)))))
    newer = str(release(tmp_path / "newer", "0.2.1"))
    upgrade(newer, check=True)
    assert version() == "0.1.0"
    upgrade(newer)
    assert version() == "0.2.1"
    assert "News of 0.2.1" in capfd.readouterr().out
    assert json.loads((place / "install.json").read_bytes())["roles"] == ["operator", "verifier"]
    assert not planted.exists()


def test_no_installer_of_an_older_release_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    record = {"source": "nowhere", "key": KEY.public.raw.hex(), "roles": ["verifier"], "bin": str(tmp_path / "bin")}
    (tmp_path / "install.json").write_text(json.dumps(record))
    older, equal = release(tmp_path / "older", "0.1.9"), release(tmp_path / "equal", "0.2.0")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "versions" / "0.2.0-verifier"))
    for check in (True, False):
        with pytest.raises(LocalError, match=r"0\.1\.9 is older than 0\.2\.0, which is installed"):
            upgrade(str(older), check=check)
        upgrade(str(equal), check=check)
        assert capfd.readouterr().out == "prime-node 0.2.0 is up to date\n"
    assert not (tmp_path / "versions").exists()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(LocalError, match="only what made it can upgrade it"):
        upgrade(str(older))
    monkeypatch.undo()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / "0.2.0"))
    with pytest.raises(LocalError, match="only what made it can upgrade it"):
        upgrade(str(older))


def test_an_incomplete_record_is_said_before_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"source": "nowhere", "key": KEY.public.raw.hex(), "roles": ["verifier"], "bin": str(tmp_path / "bin")}
    (tmp_path / "install.json").write_text(json.dumps(record))
    assert INSTALL["recorded_roles"](tmp_path) == ["verifier"]
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "versions" / "0.1.0"))
    found = recorded_installation()
    assert found is not None
    assert found[1]["roles"] == ["verifier"]
    newer = release(tmp_path / "newer", "0.2.0", FAILS)
    with pytest.raises(LocalError, match=r"0\.2\.0 does not work here"):  # the installer was called with the role
        upgrade(str(newer))
    for name in record:
        (tmp_path / "install.json").write_text(json.dumps({key: record[key] for key in record if key != name}))
        with pytest.raises(LocalError, match=f"install.json lacks {name}: call `python3 -I install.py --role ROLE`"):
            upgrade(str(newer))


def test_the_cpu_build_of_torch_brings_no_package_without_a_digest(tmp_path: Path) -> None:
    entries = INSTALL["joined"](
        ["# made\nnumpy==2.0 \\\n    --hash=1\ntorch==2.1 \\\n    --hash=2\n", "numpy==2.0 \\\n    --hash=1\n"]
    )
    assert [entry.split()[0] for entry in entries] == ["numpy==2.0", "torch==2.1"]
    install, make = INSTALL["pip_of"](tmp_path / "versions", tmp_path / "pip.whl")
    assert {"--no-deps", "--only-binary"} <= set(install), "pip builds no package, and looks for none"
    assert install[1] == make[1] == "-I"


@pytest.mark.slow
def test_a_python_without_pip_and_ensurepip_installs_a_release(tmp_path: Path) -> None:
    """Such is the Python of a new Debian or Ubuntu. Before, the installer asked for python3-venv, and so for root."""
    library = tmp_path / "lib" / Path(os.__file__).parent.name
    library.mkdir(parents=True)
    for path in Path(os.__file__).parent.iterdir():
        if path.name not in ("ensurepip", "site-packages", "dist-packages"):
            (library / path.name).symlink_to(path)
    (tmp_path / "bin").mkdir()
    python = str(shutil.copy(Path(sys.executable).resolve(), tmp_path / "bin" / "python3"))
    lacks = subprocess.run([python, "-I", "-c", "import ensurepip"], capture_output=True, text=True)
    assert "No module named 'ensurepip'" in lacks.stderr
    ran = run_installer(release(tmp_path / "release", "0.1.0"), tmp_path / "home", python=python)
    assert ran.returncode == 0, ran.stderr
    version = tmp_path / "home" / ".local" / "share" / "prime-node" / "current"
    subprocess.run([str(version / "bin" / "python"), "-m", "pip", "--version"], check=True)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("nvidia-smi") is not None, reason="needs no CPU build here")
def test_where_the_cpu_build_of_torch_is_not_to_be_had_the_lock_s_own_build_is_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    entries = ["numpy==2.0 --hash=1", "torch==2.1 --hash=2", "triton==3 --hash=3"]
    add = INSTALL["add_torch_for_cpus"]
    assert add(["true"], entries, "0.1.0") == entries[:1]
    capsys.readouterr()
    warns = "import sys; sys.exit('WARNING: Retrying (9)\\nERROR: no address')"
    assert add([sys.executable, "-c", warns], entries, "0.1.0") == entries
    printed = capsys.readouterr().out
    assert "could not be installed: ERROR: no address\nit is replaced by the CUDA build" in printed


def test_the_installer_replaces_no_command_of_another_program(tmp_path: Path) -> None:
    folder = release(tmp_path / "release", "0.1.0")
    foreign = tmp_path / "home" / ".local" / "bin" / "prime-node"
    foreign.parent.mkdir(parents=True)
    foreign.symlink_to("/usr/bin/env")
    ran = run_installer(folder, tmp_path / "home")
    assert "is not a link of this installation" in ran.stderr
    assert foreign.readlink() == Path("/usr/bin/env")
    (tmp_path / "file").touch()
    ran = run_installer(folder, tmp_path / "home", "--bin", "../bin", "--to", "../file/below")
    assert (ran.returncode, ran.stderr[:9]) == (1, "install: "), ran.stderr


ANSWERS = {
    "no HTTP": b"\x00garbage\r\n\r\n",
    "a header line without end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "broken chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a file of this machine": b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
    "a terminal's commands": b"HTTP/1.1 404 \x1b]0;owned\x07\r\nContent-Length: 0\r\n\r\n",
    "nothing more": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na",
}


def test_a_hostile_source_ends_neither_program_with_a_traceback_nor_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, four answers gave tracebacks, one wrote to the terminal, and one byte a minute held both for years."""
    answer, close = b"", threading.Event()
    record = {"source": "nowhere", "key": KEY.public.raw.hex(), "roles": ["verifier"], "bin": str(tmp_path / "bin")}
    (tmp_path / "install.json").write_text(json.dumps(record))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "versions" / "0.2.0"))

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4_096)
                    connection.sendall(answer)
                    if answer == ANSWERS["nothing more"]:
                        close.wait()

    monkeypatch.setattr("prime_node.cli.upgrade.FILE_S_MAX", 0.2)
    read_file = INSTALL["read_file"]
    monkeypatch.setitem(read_file.__globals__, "FILE_S_MAX", 0.2)
    os.mkfifo(tmp_path / "release.json")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        source = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for what, answer in ANSWERS.items():  # noqa: B007 - the server sends it
            with pytest.raises(LocalError, match="cannot be read") as failed:
                upgrade(source)
            with pytest.raises(INSTALL["Stop"], match="cannot be read") as stopped:
                read_file(source, "release.json")
            assert INSTALL["shown"](str(stopped.value)).isprintable(), what
            assert str(failed.value)[:60] == str(stopped.value)[:60]
        close.set()
        listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(INSTALL["Stop"], match="not a file"):
        read_file(str(tmp_path), "release.json")


def test_two_installations_do_not_remove_each_other_s_version(tmp_path: Path) -> None:
    """Before, the second one removed the version that the first one was making, or had just made."""
    folder = release(tmp_path / "release", "0.1.0")
    with INSTALL["alone"](tmp_path / "to"):
        ran = run_installer(folder, tmp_path / "home", "--to", str(tmp_path / "to"))
    assert ran.stderr.startswith("install: another installation works in")


def test_an_installation_by_other_means_says_what_can_upgrade_it() -> None:
    with pytest.raises(LocalError, match="only what made it can upgrade it"):
        upgrade()


SEES = """
import pathlib, sys
def main():
    if "--version" in sys.argv:
        print("{version}")
        return
    seen = b""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            seen += (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            pass
    pathlib.Path("SEEN").write_bytes(seen)
    sys.exit("no way to " + sys.stdin.readline())
"""
"""A new version whose doctor writes down all arguments and environments that it sees, and fails."""
UPGRADES = "import sys; sys.prefix = sys.argv.pop(1); from prime_node.cli.main import main; main()"


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads the list of processes in /proc")
def test_an_upgrade_shows_no_process_the_invitation(tmp_path: Path) -> None:
    """Before, the installer and the doctor of the new version had it among their arguments, and the error repeated it."""
    record = {"source": "nowhere", "key": KEY.public.raw.hex(), "roles": ["verifier"], "bin": str(tmp_path / "bin")}
    (tmp_path / "install.json").write_text(json.dumps(record))
    newer = release(tmp_path / "newer", "0.2.0", SEES.replace("SEEN", str(tmp_path / "seen")))
    invite = "A" * 40
    link = f"http://192.0.2.1:8400/#{'0' * 64}.{invite}"
    place = str(tmp_path / "versions" / "0.1.0")
    ran = subprocess.run(
        [sys.executable, "-c", UPGRADES, place, "upgrade", "--from", str(newer), "--link", "-"],
        input=f"{link}\n",
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert f"no way to {link}" in ran.stderr, ran.stderr  # the doctor got it
    assert "`prime-node doctor - --no-measure` ended with 1" in ran.stderr
    seen = (tmp_path / "seen").read_bytes()
    assert f"{newer}\0--link\0-\0".encode() in seen
    assert invite.encode() not in seen
