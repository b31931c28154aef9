"""The codec's kernels: compiled once per installation, before anything that has a deadline, and not in every process at once.

Who waits for whom: the first process that finds nothing compiled holds a lock beside numba's cache while two children compile,
one the decoder and one the encoder, since numba compiles one function at a time in a process. Whoever comes meanwhile waits for
the lock, LOCK_S_MAX at most; then all load machine code. Lock and children fall with their process, so a killed one leaves the
work to the next. Who has compiled clears away what was compiled of older sources.

Nothing ends because of a compiler: a process whose children fail, or are killed for memory, codes without kernels.

    python -m prime_node.cli.kernels        what the set-up and `up` run, so that neither imports numba itself
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from prime_protocol.codec.api import give_up_kernels
from prime_protocol.codec.compiling import cache_place, ready_decoder, ready_encoder, warm_up

log = logging.getLogger(__name__)
Say = Callable[[str], None]

COMPILE_S_MAX = 900.0
"""A compiler that takes longer hangs: on two busy cores it takes 20 s."""
LOCK_S_MAX = COMPILE_S_MAX + 60.0
"""Who holds the lock for longer hangs, or was stopped."""
LOOK_S = 0.1
"""How often a process that waits looks whether the lock is free."""
KEPT_S = 14 * 86_400.0
"""What other sources were compiled to, after its last start."""
COMPILED = re.compile(r"(\w+\.\w+-(\w{8})-\d+\.py\w+\.(nbi|\d+\.nbc)|kernels-(\w{8})\b.*\.compiled)")
"""The files that numba writes for a kernel, and our own mark. Each name carries the checksum of the kernels' sources."""

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
"""Its standard input is a pipe that only its parent holds open."""


def ready_kernels(say: Say = log.info) -> None:
    """For a process that decodes or encodes: compile what is not compiled, and load it. Does nothing where numba is missing.

    Where numba finds no folder to write to, this process compiles for itself; where nothing compiles, it does without.
    """
    if compile_once(say):
        warm_up()
    else:
        give_up_kernels()


def compile_once(say: Say) -> bool:
    """Returns when the cache holds the kernels, or False where they do not compile."""
    place = cache_place()
    if place is None:
        return True
    folder, done = Path(place[0]), Path(place[0]) / f"kernels-{place[1]}.compiled"
    if done.exists():
        with suppress(OSError):  # another user's
            done.touch()
        return True
    with _turn(folder / "kernels.lock", say):
        if done.exists():
            return True
        say("compiling the codec's kernels, once per installation (10 to 20 s)")
        began_s = time.monotonic()
        with _compiling(ready_decoder) as decoder, _compiling(ready_encoder) as encoder:
            codes = [_code(decoder, began_s), _code(encoder, began_s)]
        if any(codes):
            log.warning(
                "the codec's kernels do not compile here (exit codes %s; -9: killed, mostly for want of memory). This process "
                "goes on without them, much slower with updates; free memory or see the errors above, and restart it",
                codes,
            )
            return False
        done.touch()
        _clear(folder, place[1])
        say(f"compiled the codec's kernels in {time.monotonic() - began_s:.1f} s")
        return True


def _compiling(half: Callable[[], None]) -> subprocess.Popen[bytes]:
    """Leaving its context ends it."""
    program = _CHILD.format(module=half.__module__, name=half.__name__)
    return subprocess.Popen([sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, start_new_session=True)


def _code(process: subprocess.Popen[bytes], began_s: float) -> int:
    """The exit code; a child that hangs is killed."""
    try:
        return process.wait(max(0.0, began_s + COMPILE_S_MAX - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def _turn(path: Path, say: Say) -> Iterator[None]:
    """One process at a time. Where no lock can be had, several may compile the same: that costs time only."""
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
    """A lock that another process holds; after LOCK_S_MAX without it."""
    until_s = time.monotonic() + LOCK_S_MAX
    while time.monotonic() < until_s:
        time.sleep(LOOK_S)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
    log.warning(
        "a process has held %s for %.0f s, so it hangs or was stopped: going on beside it; `fuser %s` names it",
        path,
        LOCK_S_MAX,
        path,
    )


def _clear(folder: Path, key: str) -> None:
    """Remove what was compiled of sources that nobody starts any more. A folder belongs to the sources in one place, but
    containers may share it that hold different ones in that place: each start marks its own as used."""
    found = [(path, match[2] or match[4]) for path in folder.iterdir() if (match := COMPILED.fullmatch(path.name))]
    since_s = time.time() - KEPT_S
    used = {sources for path, sources in found if path.suffix == ".compiled" and path.stat().st_mtime > since_s}
    for path, sources in found:
        if sources not in used and not key.startswith(sources):
            with suppress(OSError):  # another user's
                path.unlink()


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only what may be written
    except PermissionError:  # another user's
        return os.open(path, os.O_RDONLY)


if __name__ == "__main__":
    compile_once(lambda text: print(text, flush=True))
