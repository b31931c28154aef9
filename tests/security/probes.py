"""A hostile package: it stands in for `reasoning_gym` inside a real process of environments, and tries what it is told to try.

`score` gets "NAME ARGUMENT" as an answer; what the probe returns or raises comes back as an error, "did: ..." or "refused: ...".
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: Any) -> str:
    """A system call of x86-64."""
    ctypes.set_errno(0)
    found = LIBC.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return f"syscall {number} gave {found}"


def read(path: str) -> str:
    return Path(path).read_text(errors="replace")[:80]


def listing(path: str) -> str:
    return ",".join(sorted(os.listdir(path)))[:300]


def write(path: str) -> str:
    Path(path).write_text("planted")
    return "written"


def mode(path: str) -> str:
    os.chmod(path, 0o777)
    return "changed"


def owner(path: str) -> str:
    os.chown(path, 1, 1)
    return "changed"


def times(path: str) -> str:
    os.utime(path, (1, 1))
    return "changed"


def attribute(path: str) -> str:
    os.setxattr(path, "user.planted", b"x")
    return "changed"


def hard_link(path: str) -> str:
    os.link(path, os.path.join(os.environ["TMPDIR"], "hard"))
    return "linked"


def symbolic_link(path: str) -> str:
    name = os.path.join(os.environ["TMPDIR"], "symbolic")
    os.symlink(path, name)
    return read(name)


def fd_paths(path: str) -> str:
    """By way of /proc/self: root, cwd, and every descriptor that is a folder."""
    found = []
    for name in ("root", "cwd", *(f"fd/{number}" for number in os.listdir("/proc/self/fd"))):
        try:
            found.append(Path(f"/proc/self/{name}{path}").read_text()[:80])
        except OSError:
            continue
    if found:
        return found[0]
    raise PermissionError("no way")


def others(_: str) -> str:
    """Processes that are none of ours: name and environment variables."""
    seen = []
    for each in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "mem", "root/etc/passwd", "cwd/x", "maps", "stack"):
            try:
                command = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
                if int(each) == os.getpid() or b"bwrap" in command[0]:
                    continue
                Path(f"/proc/{each}/{name}").open("rb").read(1)
                seen.append(f"{each}/{name}")
            except OSError:
                continue
    return f"sees {seen}"


def attach(pid: str) -> str:
    return call(101, 16, int(pid), 0, 0)


def memory_of(pid: str) -> str:
    return call(310, int(pid), 0, 0, 0, 0, 0)


def kill(pid: str) -> str:
    os.kill(int(pid), signal.SIGCONT)
    return "signalled"


def kill_all(_: str) -> str:
    """What is sent to every process that may be signalled."""
    os.kill(-1, signal.SIGCONT)
    return "signalled"


def connect_abstract(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(f"\0{name}")
    return "connected"


def connect_path(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
    return "connected"


def send_path(path: str) -> str:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        one.sendto(b"x", path)
    return "sent"


def connect_tcp(address: str) -> str:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=3):
        return "connected"


def listen_tcp(port: str) -> str:
    with socket.socket() as one:
        one.bind(("0.0.0.0", int(port)))
        one.listen()
    return "listening"


def send_udp(address: str) -> str:
    host, port = address.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"x", (host, int(port)))
    return "sent"


def resolve(name: str) -> str:
    return str(socket.getaddrinfo(name, 80))


def open_socket(what: str) -> str:
    family, kind, protocol = map(int, what.split(","))
    with socket.socket(family, kind, protocol):
        return "opened"


def shared_memory(name: str) -> str:
    return read(f"/dev/shm/{name}")


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
    """To the log: stdout and stderr are not the pipe to the host."""
    for _ in range(int(size) // 2**16):
        sys.stdout.buffer.write(b"x" * 2**16)
        sys.stderr.buffer.write(b"\x1b]0;owned\x07\xe2\x80\xae" + b"y" * 100 + b"\n")
    sys.stdout.flush()
    return "printed"


def raise_limits(_: str) -> str:
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA):
        soft, hard = resource.getrlimit(which)
        resource.setrlimit(which, (soft + 1, hard + 1))
    return "raised"


def limit_other(pid: str) -> str:
    return call(302, int(pid), 7, ctypes.c_void_p(), ctypes.create_string_buffer(16))


def mount_tmpfs(_: str) -> str:
    if LIBC.mount(b"x", b"/tmp", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")
    return "mounted"


def system_call(what: str) -> str:
    number, *arguments = (int(each, 0) for each in what.split(","))
    buffer = ctypes.create_string_buffer(4_096)
    return call(
        number,
        *(ctypes.c_void_p(ctypes.addressof(buffer)) if each == -99 else ctypes.c_long(each) for each in arguments),
    )


def type_into_terminal(_: str) -> str:
    import fcntl
    import termios

    for descriptor in (0, 1, 2):
        try:
            fcntl.ioctl(descriptor, termios.TIOCSTI, b"x")
        except OSError:
            continue
        return "typed"
    with open("/dev/tty", "wb") as terminal:
        fcntl.ioctl(terminal, termios.TIOCSTI, b"x")
    return "typed"


def inherited(_: str) -> str:
    """Descriptors that lead anywhere but to pipes, our own selectors and /dev/null."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            where = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if not where.startswith(("pipe:", "anon_inode:", "socket:", "/dev/null", "/proc/")):
            found.append(where)
    return f"descriptors {found}"


def dump_core(_: str) -> str:
    return f"core limit {resource.getrlimit(resource.RLIMIT_CORE)}"


def plant(_: str) -> str:
    """Something that the next Python process would load: in site-packages, beside our sources, among compiled code."""
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


def set_user_id(_: str) -> str:
    """Whether a set-user-ID program gives what we do not have."""
    program = next(path for path in ("/usr/bin/su", "/bin/su", "/usr/bin/mount", "/bin/mount") if os.path.exists(path))
    before = Path("/proc/self/status").read_text()
    has, capabilities = "NoNewPrivs:\t1" in before, before.partition("CapEff:")[2].split()[0]
    return f"no_new_privs {has}, capabilities {capabilities}, {program}"


def run_planted(_: str) -> str:
    name = os.path.join(os.environ["TMPDIR"], "program")
    Path(name).write_bytes(Path("/bin/true").read_bytes())
    os.chmod(name, 0o755)
    subprocess.run([name], check=True)
    return "ran"


def survive(seconds: str) -> str:
    """A process that leaves every group and session, and beats on a shared pipe while it lives."""
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
    """An exception with a message as long as that."""
    raise RuntimeError("m" * int(what))


def exit_now(_: str) -> str:
    raise SystemExit("gone")


def recurse(_: str) -> str:
    return recurse(_)


def hang(_: str) -> str:
    while True:
        time.sleep(1)


PROBES: dict[str, Callable[[str], str]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name != "call"
}
ODD = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "huge": 1e300,
    "negative": -1e300,
    "text": "1.0",
    "none": None,
    "dict": {str(number): 1.0 for number in range(100_000)},
    "object": object(),
    "big": 10**400,
}


class Dataset:
    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"question": f"question {number}", "answer": "x"}

    def score_answer(self, answer: str, entry: object) -> Any:
        name, _, argument = answer.partition(" ")
        if name == "right":
            return 1.0
        try:
            found = PROBES[name](argument)
        except (OSError, AssertionError, MemoryError, RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and name in ("say", "recurse"):
                raise
            more = f" after {bomb[-1]}" if name == "fork_bomb" and bomb else ""
            code = errno.errorcode.get(getattr(error, "errno", 0) or 0, "")
            raise RuntimeError(f"refused: {type(error).__name__} {code}{more}") from None
        raise RuntimeError(f"did: {found}")


def create_dataset(task: str, seed: int, size: int, **options: object) -> Dataset:
    if task == "raise":
        raise RuntimeError("x" * 10_000_000)
    if task == "exit":
        sys.exit("gone")
    if task == "hang":
        time.sleep(1_000)
    if task == "patch":  # what is given back is no longer checked by our own code in there
        from prime_node.envs.split import SplitEnvironment

        patched: Any = SplitEnvironment
        patched.score = lambda self, index, completion, *, finished: ODD.get(completion, 1.0)
        patched.prompt = lambda self, index: [None, {"a": 1}, "\ud800", "x" * 5_000_000, 7][index]
        patched.held_out = lambda self, count: [type("Held", (), {"prompt": "p"})] * (count + 1)
    return Dataset()
