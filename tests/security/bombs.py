"""More of the hostile package (probes.py): bombs, remnants on the machine, and messages to its host."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


def fork_bomb(_: str) -> str:
    made: list[int] = []
    try:
        while len(made) < 20_000:
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            made.append(pid)
    finally:
        for pid in made:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        bomb.append(len(made))
    return f"{len(made)} processes"


bomb: list[int] = []


def thread_bomb(_: str) -> str:
    gate, made = threading.Event(), 0
    try:
        while made < 50_000:
            threading.Thread(target=gate.wait, daemon=True).start()
            made += 1
    finally:
        gate.set()
    return f"{made} threads"


def memory_bomb(size: str) -> str:
    held = [bytearray(2**26) for _ in range(int(size) // 2**26)]
    return f"{len(held)} blocks"


def mapped_memory(size: str) -> str:
    held = mmap.mmap(-1, int(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for place in range(0, int(size), 4_096):
        held[place] = 1
    return "held"


def hidden_memory(size: str) -> str:
    """Take memory in ways that a limit on private writable memory does not count."""
    step, libc = 2**28, ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p

    def mapped(flags: int, descriptor: int = -1) -> int:
        place = libc.mmap(None, ctypes.c_size_t(step), 3, flags, descriptor, ctypes.c_long(0))
        if place == 2**64 - 1:
            raise OSError(ctypes.get_errno(), "mmap")
        return int(place)

    def read_only() -> None:
        place = mapped(0x22)
        assert libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(step), 1) == 0

    def file_in_memory() -> None:
        memory = os.memfd_create("bomb")
        assert os.write(memory, b"x") == 1

    worked = []
    ways = {
        "shared": lambda: mapped(0x21),
        "read-only": read_only,
        "stack": lambda: mapped(0x122),
        "memory file": file_in_memory,
    }
    for name, way in ways.items():
        try:
            for _ in range(int(size) // step):
                way()
            worked.append(name)
        except OSError:
            continue
    return f"worked {worked}"


def file_bomb(path: str) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder = Path(path or os.environ["TMPDIR"])
    written = 0
    try:
        for number in range(64):
            with (folder / f"bomb-{number}").open("wb", buffering=0) as file:
                for _ in range(64):
                    written += file.write(bytes(2**20))
    finally:
        for each in folder.glob("bomb-*"):
            each.unlink()
        if written >= 2**31:
            raise AssertionError(f"did: {written} bytes")
    return f"{written} bytes"


def open_bomb(_: str) -> str:
    made: list[int] = []
    try:
        while len(made) < 100_000:
            made.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for each in made:
            os.close(each)
    return f"{len(made)} files"


def print_bomb(size: str) -> str:
    """Write to the log: stdout and stderr are not the pipe to the host."""
    for _ in range(int(size) // 2**16):
        sys.stdout.buffer.write(b"x" * 2**16)
        sys.stderr.buffer.write(b"\x1b]0;owned\x07\xe2\x80\xae" + b"y" * 100 + b"\n")
    sys.stdout.flush()
    return "printed"


def plant(_: str) -> str:
    """Leave a file that the next Python process would load: in site-packages, next to our sources, among compiled code."""
    import prime_node
    import prime_protocol

    planted = []
    places = [entry for entry in sys.path if entry] + [
        *prime_node.__path__,
        *prime_protocol.__path__,
        os.path.join(*prime_protocol.__path__, "codec", "__pycache__"),
        sys.prefix,
        os.path.join(sys.prefix, "bin"),
        os.path.expanduser("~root"),
    ]
    for place in places:
        try:
            Path(place, "planted.pth").write_text("import os")
            planted.append(place)
        except OSError:
            continue
    planted = [place for place in planted if Path(place).resolve() != Path(os.environ["TMPDIR"]).resolve()]
    return f"planted {planted}"


def survive(seconds: str) -> str:
    """Start a process that leaves every group and session, and writes to a shared pipe while it lives."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            os.execv("/bin/sleep", ["sleep", seconds])
        os._exit(0)
    time.sleep(0.2)
    return "started"


def stop(_: str) -> str:
    os.kill(os.getpid(), signal.SIGSTOP)
    return "stopped"


def end_group(_: str) -> str:
    os.killpg(0, signal.SIGKILL)
    return "ended"


def forge(text: str) -> str:
    """Write on every descriptor: one of them is the pipe to the host."""
    for number in range(1, 32):
        try:
            os.write(number, text.encode() + b"\n")
        except OSError:
            continue
    return "forged"


def forge_often(what: str) -> str:
    times, _, text = what.partition(" ")
    for _ in range(int(times)):
        forge(text)
    return "forged"


def endless_line(size: str) -> str:
    block = b"x" * 2**20
    for number in range(3, 32):
        try:
            for _ in range(int(size) // 2**20):
                os.write(number, block)
        except OSError:
            continue
    return "written"


def say(what: str) -> str:
    """Raise an exception with a message of this length."""
    raise RuntimeError("m" * int(what))


def exit_now(_: str) -> str:
    raise SystemExit("gone")


def recurse(_: str) -> str:
    return recurse(_)


def hang(_: str) -> str:
    while True:
        time.sleep(1)


BOMBS: dict[str, Callable[[str], str]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__
}
