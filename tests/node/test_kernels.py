"""The codec's kernels are compiled once per installation, and all other processes then find them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prime_node.cli import kernels
from prime_protocol.codec import api

CODES_EVERYTHING = """
from collections.abc import Callable

import numpy as np
from numba.core import event
from prime_protocol.codec import Mode, decode_chunk, encode_tensor, mode_of

compiled, modes = [], set()


class Listener(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].__name__)

    def on_end(self, event):
        pass


event.register("numba:compile", Listener())
rng = np.random.default_rng(0)
base = (rng.standard_normal(300_000).astype("<f4").view("<u4") >> 16).astype("<u2")
few, most, all_ = base.copy(), base.copy(), base.copy()
few[::50] += 1
most[base & 0x7FFF < 0x3F00] += 3
all_ += rng.integers(0, 1000, base.size).astype("<u2")
for new, old in [(base, None), (base, base), *((new, base) for new in (few, most, all_))]:
    for dtype in ("bf16", "fp16"):
        out = np.empty_like(base)
        for chunk in encode_tensor(new, old, dtype=dtype):
            for data in (chunk.data, memoryview(bytearray(chunk.data))):
                decode_chunk(data, out, old, dtype=dtype, start=chunk.start, count=chunk.count)
            modes.add(mode_of(chunk.data))
        assert np.array_equal(out, new)
assert modes >= {Mode.SKIP, Mode.CLASS, Mode.FULL}, modes
print(*compiled)
"""


def test_after_the_first_process_none_compiles_anything() -> None:
    kernels.compile_once(print)
    coding = subprocess.run([sys.executable, "-c", CODES_EVERYTHING], capture_output=True, text=True, check=True)
    assert coding.stdout.split() == []


def test_the_second_process_waits_for_the_first_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cache_place", lambda: (str(tmp_path), "key"))
    messages: list[str] = []
    waits = threading.Event()

    def say(text: str) -> None:
        messages.append(text)
        waits.set()

    with (tmp_path / "kernels.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threading.Thread(target=kernels.compile_once, args=(say,))
        second.start()
        assert waits.wait(20)
        (tmp_path / "kernels-key.compiled").touch()
    second.join(20)
    assert not second.is_alive()
    assert messages == ["another process is compiling the codec's kernels: waiting for it"]


def test_a_process_that_waits_for_a_hung_one_compiles_itself_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "cache_place", lambda: (str(tmp_path), "key"))
    monkeypatch.setattr(kernels, "LOCK_S_MAX", 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with (tmp_path / "kernels.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert kernels.compile_once(lambda text: None)
    assert "hangs or was stopped" in caplog.text
    assert (tmp_path / "kernels-key.compiled").exists()


def test_a_compiling_process_removes_the_code_of_unused_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, before, beside = "0123abcd", "4567cdef", "89ab0123"
    stale = {f"decode.apply-{before}-61.py311.nbi", f"full.merge-{before}-22.py311.1.nbc", f"kernels-{before}.compiled"}
    stale.add(f"kernels-{before}-{now}.compiled")
    kept = {f"decode.apply-{now}-61.py311.nbi", f"full.merge-{now}-22.py312.2.nbc", f"kernels-{now}-{before}.compiled"}
    kept |= {"base.cpython-311.pyc", "other.f-12.py311.nbi", "kernels.lock"}
    kept |= {f"decode.apply-{beside}-61.py311.nbi", f"kernels-{beside}-{now}.compiled"}  # another container's
    for name in stale | kept:
        (tmp_path / name).touch()
        if before in name:
            os.utime(tmp_path / name, (0, 0))
    monkeypatch.setattr(kernels, "cache_place", lambda: (str(tmp_path), f"{now}-89abcdef"))
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert kernels.compile_once(lambda text: None)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, f"kernels-{now}-89abcdef.compiled"}


@pytest.mark.parametrize(("script", "code"), [("exit 1", 1), ("kill -9 $$", -9)], ids=["fails", "is_killed"])
def test_where_a_compiler_ends_early_the_process_codes_without_kernels_and_the_next_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, code: int
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    cache = tmp_path / "cache"
    monkeypatch.setattr(kernels, "cache_place", lambda: (str(cache), "key"))
    monkeypatch.setattr(sys, "executable", str(compiler))
    monkeypatch.setattr(api, "disabled", False)
    kernels.ready_kernels()
    assert f"do not compile here (exit codes [{code}]" in caplog.text
    assert api.load_kernels() is None
    assert [path.name for path in cache.iterdir()] == ["kernels.lock"]


def test_where_no_lock_can_be_had_the_kernels_are_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.lock").mkdir()  # cannot be opened as a file, as another file system might refuse it
    monkeypatch.setattr(kernels, "cache_place", lambda: (str(tmp_path), "key"))
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert kernels.compile_once(lambda text: None)
    assert (tmp_path / "kernels-key.compiled").exists()


def test_a_process_that_only_decodes_has_the_decoder_compiled_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, compiled = tmp_path / "compiler", tmp_path / "compiled"
    compiler.write_text(f'#!/bin/sh\necho "$3" | grep -o "ready_[a-z]*$" >> {compiled}\n')
    compiler.chmod(0o700)
    monkeypatch.setattr(kernels, "cache_place", lambda: (str(tmp_path), "key"))
    monkeypatch.setattr(sys, "executable", str(compiler))
    for encodes in (False, False, True, True, False):
        assert kernels.compile_once(lambda text: None, encodes=encodes)
    first, *further = compiled.read_text().split()
    assert [first, *sorted(further)] == ["ready_decoder", "ready_decoder", "ready_encoder"]


@pytest.mark.parametrize(("compiler", "used"), [("/bin/true", True), ("/bin/false", False)])
def test_a_worker_decodes_without_kernels_until_they_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, used: bool
) -> None:
    monkeypatch.setattr(kernels, "cache_place", lambda: (str(tmp_path), "key"))
    monkeypatch.setattr(sys, "executable", compiler)
    monkeypatch.setattr(api, "disabled", False)
    finish = kernels.begin_kernels()
    assert api.load_kernels() is None
    finish()
    assert (api.load_kernels() is not None) is used
    assert ("are not compiled (exit code 1)" in caplog.text) is not used


PARENT = """
import sys
import slow
from prime_node.cli import kernels

kernels.cache_place = lambda: (sys.argv[1], "key")
kernels.ready_decoder = kernels.ready_encoder = slow.compile_slowly
kernels.compile_once(lambda text: None)
"""


def test_the_compilers_die_with_a_process_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, threading\ndef compile_slowly():\n    os.write(1, b'compiling\\n')\n    threading.Event().wait(60)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "cache")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    ) as parent:
        assert parent.stdout is not None
        try:
            assert [parent.stdout.readline() for _ in range(2)] == [b"compiling\n"] * 2
        finally:
            parent.kill()
        parent.communicate(timeout=30)  # ends when no process holds the other end


def test_without_a_folder_to_write_to_nothing_is_compiled_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cache_place", lambda: None)
    messages: list[str] = []
    kernels.compile_once(messages.append)
    assert messages == []
