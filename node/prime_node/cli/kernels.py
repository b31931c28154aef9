"""Compilation of the codec's kernels: once per installation, before anything with a deadline, and in one process at a time.

Concurrency: the first process that finds nothing compiled holds a lock file in numba's cache folder while its children compile.
One compiles the decoder and one, for trainers alone, the encoder, because numba compiles one function at a time per process.
Other processes wait for the lock, at most LOCK_S_MAX; then all load machine code. The lock and the children end with their
process, so if it is killed the next process does the work. The process that compiled also removes the output of older sources.
A worker does not wait: it joins and loads its engine meanwhile, and decodes without kernels until they are there.

A compiler failure ends no process: a process whose children fail, or are killed for lack of memory, codes without kernels.

The set-up and `up` run `python -m prime_node.cli.kernels`, so that neither imports numba itself.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from prime_node.files import write_durably
from prime_protocol.codec.api import use_kernels
from prime_protocol.codec.compiling import cache_place, ready_decoder, ready_encoder, warm_up
from prime_protocol.digest import digest_of

log = logging.getLogger(__name__)
Say = Callable[[str], None]

COMPILE_S_MAX = 900.0
"""Limit after which a compiler counts as hung; compiling takes 20 s on two busy cores."""
LOCK_S_MAX = COMPILE_S_MAX + 60.0
"""Limit after which a lock holder counts as hung or suspended."""
LOOK_S = 0.1
"""Interval at which a waiting process tries the lock."""
KEPT_S = 14 * 86_400.0
"""Time for which the output of other sources is kept after their last use."""
COMPILED = re.compile(r"(\w+\.\w+-(\w{8})-\d+\.py\w+\.(nbi|\d+\.nbc)|kernels-(\w{8})\b.*\.compiled)")
"""File names of numba's output for a kernel, and of our own marker. Each contains the checksum of the kernels' sources."""

_CHILD = """
import gc, os, threading
def end_with_parent():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
gc.disable()
from {module} import {name}
{name}()
"""
"""Program of a compiling child. Its standard input is a pipe that only its parent holds open."""


def ready_kernels(say: Say = log.info, *, encodes: bool = False) -> None:
    """Compile the kernels if necessary and load them, for a process that decodes, or also encodes.

    Do nothing without numba. If numba finds no writable folder, this process compiles for itself. If compilation fails, it runs
    without kernels.
    """
    if not compile_once(say, encodes=encodes):
        use_kernels(False)
    (warm_up if encodes else ready_decoder)()


def begin_kernels() -> Callable[[], None]:
    """Begin to compile the decoder in a child if necessary, before this process confines itself.

    Return a function that waits for the child and loads the decoder, in 0.3 s. Until then this process decodes without kernels.
    """
    place = cache_place()
    if place is None or _found(place, encodes=False):
        return ready_decoder
    use_kernels(False)
    log.info("compiling the codec's kernels meanwhile, once per installation (10 to 60 s)")
    began_s, child = time.monotonic(), _compiling(compile_decoder)

    def finish() -> None:
        with child:
            code = child.wait()
        if code != 0:
            log.warning("the codec's kernels are not compiled (exit code %d): updates are applied much slower", code)
            return
        use_kernels(True)
        ready_decoder()
        log.info("compiled the codec's kernels in %.1f s", time.monotonic() - began_s)

    return finish


def compile_decoder() -> None:
    """Compile the decoder in a process of its own, which ends with exit code 1 if it does not compile."""
    if not compile_once(lambda text: None, encodes=False):
        sys.exit(1)


def _found(place: tuple[str, str], *, encodes: bool) -> bool:
    """Return whether numba's cache holds the kernels, intact, and mark them as used."""
    for done in _markers(place)[: 1 if encodes else 2]:
        if _is_intact(done):
            with suppress(OSError):  # the file belongs to another user
                done.touch()
            return True
    return False


def _markers(place: tuple[str, str]) -> tuple[Path, Path]:
    """Return the files that say that both halves are compiled, and that the decoder is."""
    return Path(place[0]) / f"kernels-{place[1]}.compiled", Path(place[0]) / f"kernels-{place[1]}.decoder.compiled"


def compile_once(say: Say, *, encodes: bool = True) -> bool:
    """Compile the kernels, or the decoder alone, unless the cache holds them. Return False if they do not compile."""
    place = cache_place()
    if place is None or _found(place, encodes=encodes):
        return True
    folder, done = Path(place[0]), _markers(place)[0 if encodes else 1]
    with _turn(folder / "kernels.lock", say):
        if _found(place, encodes=encodes):
            return True
        if done.exists():
            log.warning("the compiled kernels in %s are damaged and are compiled again: check the disk", folder)
            for path in (done, *_compiled(folder, place[1])):
                with suppress(OSError):  # the file belongs to another user
                    path.unlink()
        say("compiling the codec's kernels, once per installation (10 to 60 s)")
        began_s = time.monotonic()
        with ExitStack() as children:
            halves = (ready_decoder, ready_encoder) if encodes else (ready_decoder,)
            codes = [_code(each, began_s) for each in [children.enter_context(_compiling(half)) for half in halves]]
        if any(codes):
            log.warning(
                "the codec's kernels do not compile here (exit codes %s; -9: killed, usually for lack of memory). This process "
                "continues without them and applies updates much slower; free memory or see the errors above, then restart",
                codes,
            )
            return False
        marks = [f"{digest_of(path.read_bytes())} {path.name}\n" for path in _compiled(folder, place[1], ".nbc")]
        write_durably(done, "".join(marks).encode())
        _clear(folder, place[1])
        say(f"compiled the codec's kernels in {time.monotonic() - began_s:.1f} s")
        return True


def _compiled(folder: Path, key: str, *suffixes: str) -> list[Path]:
    """Return numba's files for the sources of a key: the index of each kernel, .nbi, and its machine code, .nbc."""
    found = [(path, COMPILED.fullmatch(path.name)) for path in folder.iterdir()]
    kinds = suffixes or (".nbi", ".nbc")
    return [path for path, match in found if match and match[2] and key.startswith(match[2]) and path.suffix in kinds]


def _is_intact(done: Path) -> bool:
    """Return whether everything is compiled, and as it was written. The marker of an earlier release has no digests.

    An index is not in the marker, because another machine with the same folder adds its machine code to it.
    """
    try:
        marks = [line.split() for line in done.read_bytes().decode("ascii", "replace").splitlines()]
        for digest, name in marks:
            if digest_of((done.parent / Path(name).name).read_bytes()) != digest:
                return False
        for path in _compiled(done.parent, done.name.removeprefix("kernels-"), ".nbi"):
            with path.open("rb") as file:  # as numba reads it
                pickle.load(file)
                pickle.load(file)
    except Exception:  # noqa: BLE001 (pickle raises almost any)
        return False
    return True


def _compiling(half: Callable[[], None]) -> subprocess.Popen[bytes]:
    """Start a child that compiles one half. Leaving its context ends it."""
    program = _CHILD.format(module=half.__module__, name=half.__name__)
    return subprocess.Popen([sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, start_new_session=True)


def _code(process: subprocess.Popen[bytes], began_s: float) -> int:
    """Return the exit code of a child, and kill a child that hangs."""
    try:
        return process.wait(max(0.0, began_s + COMPILE_S_MAX - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def _turn(path: Path, say: Say) -> Iterator[None]:
    """Let one process compile at a time. Without a lock several may compile the same kernels, which only costs time."""
    with ExitStack() as stack:
        try:
            descriptor = _open(path)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is compiling the codec's kernels: waiting for it")
                _wait_for(descriptor, path)
        except OSError as error:
            log.info("no lock on %s: %s", path, error.strerror)
        yield


def _wait_for(descriptor: int, path: Path) -> None:
    """Wait for a lock that another process holds; after LOCK_S_MAX continue without it."""
    until_s = time.monotonic() + LOCK_S_MAX
    while time.monotonic() < until_s:
        time.sleep(LOOK_S)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
    log.warning(
        "a process has held %s for %.0f s, so it hangs or was stopped; continuing without the lock; `fuser %s` shows the process",
        path,
        LOCK_S_MAX,
        path,
    )


def _clear(folder: Path, key: str) -> None:
    """Remove the output of sources that are no longer used.

    A folder belongs to the sources at one path, but containers that share it may hold different sources at that path. Each
    start therefore marks its own output as used.
    """
    found = [(path, match[2] or match[4]) for path in folder.iterdir() if (match := COMPILED.fullmatch(path.name))]
    since_s = time.time() - KEPT_S
    used = {sources for path, sources in found if path.suffix == ".compiled" and path.stat().st_mtime > since_s}
    for path, sources in found:
        if sources not in used and not key.startswith(sources):
            with suppress(OSError):  # the file belongs to another user
                path.unlink()


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only files open for writing
    except PermissionError:  # the file belongs to another user
        return os.open(path, os.O_RDONLY)


if __name__ == "__main__":
    compile_once(lambda text: print(text, flush=True))
