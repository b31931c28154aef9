"""The codec's kernels: compiled once per installation, before anything that has a deadline, and not in every process at once.

Who waits for whom: the first process that finds nothing compiled holds a lock beside numba's cache while two children compile,
one the decoder and one the encoder, since numba compiles one function at a time in a process. Whoever comes meanwhile waits for
the lock; then all load machine code. A lock falls with its process, so a killed one leaves the work to the next.

    python -m prime_node.cli.kernels        what the set-up and `up` run, so that neither imports numba itself
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_protocol.codec.compiling import cache_place, ready_decoder, ready_encoder, warm_up
from prime_protocol.errors import LocalError

log = logging.getLogger(__name__)
Say = Callable[[str], None]


def ready_kernels(say: Say = log.info) -> None:
    """For a process that decodes or encodes: compile what is not compiled, and load it. Does nothing where numba is missing.

    Where numba finds no folder to write to, this process compiles for itself.
    """
    compile_once(say)
    warm_up()


def compile_once(say: Say) -> None:
    """Returns when the cache holds the kernels. Raises LocalError where they do not compile."""
    place = cache_place()
    if place is None:
        return
    folder, done = Path(place[0]), Path(place[0]) / f"kernels-{place[1]}.compiled"
    if done.exists():
        return
    with _turn(folder / "kernels.lock", say):
        if done.exists():
            return
        say("compiling the codec's kernels, once per installation (10 to 20 s)")
        began_s = time.monotonic()
        program = f"import gc; gc.disable(); from {ready_decoder.__module__} import {{0}}; {{0}}()"
        halves = [
            subprocess.Popen([sys.executable, "-c", program.format(half.__name__)], start_new_session=True)
            for half in (ready_decoder, ready_encoder)
        ]
        try:
            codes = [half.wait() for half in halves]
        finally:
            for half in halves:
                half.kill()
        if any(codes):
            raise LocalError(f"the codec's kernels do not compile here (exit codes {codes}); above is why")
        done.touch()
        say(f"compiled the codec's kernels in {time.monotonic() - began_s:.1f} s")


@contextmanager
def _turn(path: Path, say: Say) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is compiling the codec's kernels: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    compile_once(lambda text: print(text, flush=True))
