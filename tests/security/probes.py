"""A hostile package: it replaces `reasoning_gym` inside a real environment process, and tries what a test orders.

`score` gets "NAME ARGUMENT" as an answer; what the probe returns or raises comes back as an error, "did: ..." or "refused: ...".
"""

from __future__ import annotations

import ctypes
import errno
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.security import bombs
    from tests.security.bombs import BOMBS
else:
    import bombs
    from bombs import BOMBS

LIBC = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: Any) -> str:
    """Make a system call of x86-64."""
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
    """Use /proc/self: root, cwd, and every descriptor that is a folder."""
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
    """List foreign processes: name and environment variables."""
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
    """Send signals to every process that may be signalled."""
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


def raise_limits(_: str) -> str:
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA):
        soft, hard = resource.getrlimit(which)
        resource.setrlimit(which, (soft + 1, hard + 1))
    return "raised"


def limit_other(pid: str) -> str:
    return call(302, int(pid), 7, ctypes.c_void_p(), ctypes.create_string_buffer(16))


def set_affinity(pid: str) -> str:
    os.sched_setaffinity(int(pid), {min(os.sched_getaffinity(0))})
    return "changed"


def set_scheduler(pid: str) -> str:
    os.sched_setscheduler(int(pid), os.SCHED_BATCH, os.sched_param(0))
    return "changed"


def set_scheduling_parameters(pid: str) -> str:
    os.sched_setparam(int(pid), os.sched_param(0))
    return "changed"


def set_priority(pid: str) -> str:
    os.setpriority(os.PRIO_PROCESS, int(pid), 5)
    return "changed"


def user(_: str) -> str:
    return str(os.getresuid()[0])


def variable(name: str) -> str:
    return str(os.environ.get(name))


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
    """List descriptors that lead to anything but pipes, our own selectors and /dev/null."""
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


def set_user_id(_: str) -> str:
    """Test whether a set-user-ID program gives rights that we do not have."""
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


def leave_answer(_: str) -> str:
    """Try what would change how other answers are graded; return what worked."""
    parent = os.getppid()
    os.close(os.open(__file__, os.O_RDONLY))  # scorers still read files
    attempts: dict[str, Callable[[], object]] = {
        "signal the parent": lambda: os.kill(parent, signal.SIGCONT),
        "read the parent's memory": lambda: os.open(f"/proc/{parent}/mem", os.O_RDONLY),
        "write the parent's memory": lambda: os.open(f"/proc/{parent}/mem", os.O_RDWR),
        "take the parent's requests": lambda: os.open(f"/proc/{parent}/fd/0", os.O_RDONLY),
        "answer for the parent": lambda: [os.open(f"/proc/{parent}/fd/{n}", os.O_WRONLY) for n in (3, 4, 5)],
        "start a process": lambda: os.fork() or os._exit(0),
        "start a thread": lambda: threading.Thread(target=int).start(),
        "write a file": lambda: Path(os.environ["TMPDIR"], "planted").write_text("planted"),
        "write in /dev/shm": lambda: Path("/dev/shm/planted").write_text("planted"),
        "write what it inherited": lambda: [os.write(int(n), b"x") for n in os.listdir("/proc/self/fd") if int(n) > 6],
        "open a socket": lambda: socket.socket(socket.AF_INET),
    }
    worked = []
    for what, attempt in attempts.items():
        try:
            if attempt() != []:
                worked.append(what)
        except (OSError, RuntimeError):
            continue
    return f"worked {worked}"


PROBES: dict[str, Callable[[str], str]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name != "call"
} | BOMBS
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
            more = f" after {bombs.bomb[-1]}" if name == "fork_bomb" and bombs.bomb else ""
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
    if task == "patch":  # our own code in there no longer checks the result
        from prime_node.envs.split import SplitEnvironment

        patched: Any = SplitEnvironment
        patched.score = lambda self, index, completion, *, finished: ODD.get(completion, 1.0)
        patched.prompt = lambda self, index: [None, {"a": 1}, "\ud800", "x" * 5_000_000, 7][index]
        patched.held_out = lambda self, count: [type("Held", (), {"prompt": "p"})] * (count + 1)
    return Dataset()
