"""The restrictions of adapters/sandbox, each tested from inside by a real process."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.security.sandbox_world import PREAMBLE, inside

from prime_node.adapters.sandbox import bubblewrap, landlock, namespaces, seccomp
from prime_node.adapters.sandbox.rules import Restriction, SandboxLevel, SandboxRules
from prime_node.cli.wire_sandbox import level_here

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or landlock.abi() < landlock.ABI_SCOPES, reason="needs Landlock of Linux 6.12"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("secret")
    return made


def test_a_confined_process_writes_in_its_folder_and_opens_nothing_else(folder: Path) -> None:
    program = """
confine(SandboxRules(**USUAL))
secret = folder.parent / "other" / "secret"
print(json.dumps({
    "own": tried(lambda: (folder / "new").write_text("x")),
    "read": tried(secret.read_text),
    "write": tried(lambda: secret.write_text("x")),
    "create": tried(lambda: (folder.parent / "new").write_text("x")),
    "truncate": tried(lambda: os.truncate(secret, 0)),
    "link out": tried(lambda: os.link(folder / "new", folder.parent / "other" / "link")),
    "link in": tried(lambda: os.link(secret, folder / "link")),
    "device": tried(lambda: os.mknod(folder / "null", 0o20666, os.makedev(1, 3))),
    "disk": tried(lambda: open("/dev/kmsg", "rb").close()),
}))
"""
    found = inside(folder, program)
    assert found.pop("own") == "done"
    assert set(found.values()) <= {"PermissionError", "OSError"}, found
    assert (folder.parent / "other" / "secret").read_text() == "secret"


def test_a_confined_process_sends_no_signal_outside_but_to_its_own_children(folder: Path) -> None:
    program = """
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
confine(SandboxRules(**USUAL))
own = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
pids = {"parent": os.getppid(), "before": child.pid, "own": own.pid}
found = {name: tried(lambda: os.kill(pid, 0)) for name, pid in pids.items()}
own.kill()
print(json.dumps([found, child.pid]))
"""
    found, child = inside(folder, program)
    os.kill(child, signal.SIGKILL)
    assert found == {"parent": "PermissionError", "before": "PermissionError", "own": "done"}


def test_unnamed_socket_families_are_refused_and_pairs_reach_no_process(folder: Path) -> None:
    program = """
confine(SandboxRules(**USUAL, families=frozenset({Family.INET})))
print(json.dumps({
    "inet": tried(lambda: socket.socket(socket.AF_INET).close()),
    "inet6": tried(lambda: socket.socket(socket.AF_INET6).close()),
    "unix": tried(lambda: socket.socket(socket.AF_UNIX).close()),
    "netlink": tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()),
    "packet": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()),
    "vsock": tried(lambda: socket.socket(40, socket.SOCK_STREAM, 0).close()),
    "pair": tried(lambda: [end.close() for end in socket.socketpair()]),
    "datagram pair": tried(lambda: [end.close() for end in socket.socketpair(type=socket.SOCK_DGRAM)]),
}))
"""
    found = inside(folder, program)
    assert {name for name, outcome in found.items() if outcome == "done"} == {"inet", "pair"}


def test_routes_may_be_asked_for_and_no_other_netlink_protocol(folder: Path) -> None:
    program = """
confine(SandboxRules(**USUAL, families=NETWORK))
print(json.dumps([tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, n).close()) for n in (0, 4, 9, 15)]))
"""
    assert inside(folder, program) == ["done", "OSError", "OSError", "OSError"]


def test_abstract_sockets_outside_are_out_of_reach(folder: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name := f"\0prime-test-{os.getpid()}")
        listener.listen()
        program = """
confine(SandboxRules(**USUAL, families=frozenset({Family.UNIX})))
with socket.socket(socket.AF_UNIX) as one:
    print(json.dumps(tried(lambda: one.connect(options["name"]))))
"""
        assert inside(folder, program, name=name) == "PermissionError"


def test_tcp_ports_that_are_not_named_are_refused(folder: Path) -> None:
    import socket

    with socket.socket() as one, socket.socket() as two:
        ports = []
        for listener in (one, two):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            ports.append(listener.getsockname()[1])
        program = """
confine(SandboxRules(**USUAL, families=NETWORK, connect_ports=(options["ports"][0],), bind_ports=()))
def connect(port):
    socket.create_connection(("127.0.0.1", port)).close()
def listen():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
print(json.dumps([*(tried(lambda: connect(port)) for port in options["ports"]), tried(listen)]))
"""
        assert inside(folder, program, ports=ports) == ["done", "PermissionError", "PermissionError"]


def test_system_calls_that_no_role_makes_are_refused(folder: Path) -> None:
    program = """
from prime_node.adapters.sandbox import seccomp
machine = seccomp.architecture()
THREADS = "import threading; threading.Thread().start()"
confine(SandboxRules(**USUAL, mode_changes=ModeChanges.REFUSED, shared_ipc=False))
libc = ctypes.CDLL(None, use_errno=True)
def number(name):
    ctypes.set_errno(0)
    libc.syscall(machine.numbers[name], -1, -1, -1, -1, -1, -1)
    return ctypes.get_errno()
everywhere = (*seccomp.ALWAYS_REFUSED, *seccomp.CHANGES_MODES, *seccomp.PLACES_PAGES)
refused = {name: number(name) for name in everywhere if name in machine.numbers}
missing = {name: number(name) for name in (*seccomp.NOT_THERE, *seccomp.SHARED_IPC, "clone3") if name in machine.numbers}
print(json.dumps([refused, missing, {
    "unshare": tried(lambda: os.unshare(0x10000000)) if hasattr(os, "unshare") else "OSError",
    "terminal": tried(lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x")),
    "others' limits": tried(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))),
    "own pages": "done" if libc.syscall(machine.numbers["move_pages"], 0, 0, None, None, None, 0) == 0 else "OSError",
    "own limits": tried(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))),
    "threads and children": tried(lambda: subprocess.run([sys.executable, "-c", THREADS], check=True)),
}]))
"""
    refused, missing, found = inside(folder, program)
    assert set(refused.values()) == {1}, refused
    assert set(missing.values()) == {38}, missing
    assert {found.pop(name) for name in ("own pages", "own limits", "threads and children")} == {"done"}
    assert set(found.values()) <= {"PermissionError", "OSError"}, found


@pytest.mark.parametrize("answer", ["refused", "skipped"])
def test_what_is_only_read_keeps_its_mode_owner_times_and_attributes(folder: Path, answer: str) -> None:
    """Landlock does not restrict these calls, and a file that is open to be read suffices for most."""
    tool = folder.parent / "other" / "secret"
    tool.chmod(0o755)
    os.utime(tool, (5, 5))
    program = """
read = (*USUAL["read"], folder.parent / "other")
confine(SandboxRules(**(USUAL | {"read": read}), mode_changes=ModeChanges(options["answer"])))
tool = folder.parent / "other" / "secret"
descriptor, place = os.open(tool, os.O_RDONLY), os.open(tool.parent, os.O_RDONLY)
print(json.dumps({
    "chmod": tried(lambda: os.chmod(tool, 0o4777)),
    "fchmod": tried(lambda: os.fchmod(descriptor, 0o4777)),
    "fchmod of a folder": tried(lambda: os.fchmod(place, 0o777)),
    "fchown": tried(lambda: os.fchown(descriptor, os.geteuid(), 1)),
    "utime": tried(lambda: os.utime(tool, (1, 1))),
    "futimens": tried(lambda: os.utime(descriptor, (1, 1))),
    "fsetxattr": tried(lambda: os.setxattr(descriptor, "user.x", b"1")),
    "fremovexattr": tried(lambda: os.removexattr(descriptor, "user.x")),
    "flags": tried(lambda: fcntl.ioctl(descriptor, 0x40086602, struct.pack("l", 0x40))),  # FS_IOC_SETFLAGS, FS_NODUMP_FL
    "project": tried(lambda: fcntl.ioctl(descriptor, 0x401C5820, bytes(28))),  # FS_IOC_FSSETXATTR
}))
"""
    before, place = tool.stat(), tool.parent.stat()
    found = inside(folder, "import struct" + program, answer=answer)
    after = tool.stat()
    assert (after.st_mode, after.st_gid, after.st_mtime) == (before.st_mode, before.st_gid, 5.0)
    assert tool.parent.stat().st_mode == place.st_mode
    assert os.listxattr(tool) == []
    assert {found.pop("flags"), found.pop("project")} == {"OSError"}
    assert set(found.values()) == {"done" if answer == "skipped" else "PermissionError"}, found


def test_shared_memory_that_has_no_file_is_out_of_reach_and_that_of_multiprocessing_is_not(folder: Path) -> None:
    """Without the rule the same process writes it, which shows that the rule is what refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    shared = libc.shmget(0, 4096, 0o1600)
    libc.shmat.restype = ctypes.c_void_p
    place = libc.shmat(shared, None, 0)
    ctypes.memmove(place, b"secret", 6)
    program = """
from multiprocessing import Lock, shared_memory
confine(SandboxRules(**USUAL, write_in_shared_root=(Path("/dev/shm"),), shared_ipc=options["open"]))
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
found = libc.shmat(options["shared"], None, 0)
if found != ctypes.c_void_p(-1).value:
    ctypes.memmove(found, b"stolen", 6)
with Lock():
    own = shared_memory.SharedMemory(create=True, size=16)
own.close()
own.unlink()
"""
    seen = []
    for is_open in (False, True):
        inside(folder, program + "print(json.dumps(None))", shared=shared, open=is_open)
        seen.append(ctypes.string_at(place, 6))
    libc.shmctl(shared, 0, None)  # IPC_RMID
    assert seen == [b"secret", b"stolen"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is a second convention of x86-64 alone")
def test_a_system_call_by_a_foreign_convention_ends_the_process(folder: Path) -> None:
    program = PREAMBLE + "confine(SandboxRules(**USUAL))\nctypes.CDLL(None).syscall(0x40000000 | 39)\n"
    ran = subprocess.run(
        [sys.executable, "-c", program, str(folder), "{}"], capture_output=True, timeout=60, check=False
    )
    assert ran.returncode == -signal.SIGSYS


def test_limits_hold_and_cannot_be_raised_again(folder: Path) -> None:
    program = """
confine(SandboxRules(**USUAL, limits=ProcessLimits(file_bytes=4096, open_files=64)))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
print(json.dumps([
    tried(lambda: (folder / "big").write_bytes(bytes(8192))),
    resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE),
    open("/proc/self/status").read().partition("CapPrm:")[2].split()[0],
]))
"""
    big, files, core, capabilities = inside(folder, program)
    assert (big, files, core) == ("OSError", [64, 64], [0, 0])
    assert int(capabilities, 16) == 0


def test_other_threads_that_would_stay_free_are_an_error(folder: Path) -> None:
    if landlock.abi() >= landlock.ABI_TSYNC:
        pytest.skip("this kernel binds all threads at once")
    program = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    confine(SandboxRules(**USUAL))
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    assert "1 other threads" in inside(folder, program)


def test_a_level_names_in_one_line_what_is_enforced_and_what_is_not() -> None:
    level = SandboxLevel(
        (
            Restriction("files", True),
            Restriction("signals", False, "Linux 6.12 and newer"),
            Restriction("system calls", True),
        )
    )
    assert level.sentence() == "enforced: files, system calls; NOT enforced: signals (Linux 6.12 and newer)"
    assert not level.is_full
    assert level.up == {"files", "system calls"}


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        (1, ["truncation", "commands to devices", "TCP ports", "signals", "abstract sockets", "Unix sockets by path"]),
        (2, ["truncation", "commands to devices", "TCP ports", "signals", "abstract sockets", "Unix sockets by path"]),
        (3, ["commands to devices", "TCP ports", "signals", "abstract sockets", "Unix sockets by path"]),
        (4, ["commands to devices", "signals", "abstract sockets", "Unix sockets by path"]),
        (6, ["Unix sockets by path"]),
        (9, []),
    ],
)
def test_what_a_kernel_cannot_enforce_is_named_with_the_version_that_can(version: int, missing: list[str]) -> None:
    restrictions = landlock.enforced_restrictions(SandboxRules(connect_ports=()), version)
    assert [restriction.what for restriction in restrictions if not restriction.up] == missing
    assert all("Linux" in restriction.why for restriction in restrictions if not restriction.up)


def test_an_older_kernel_leaves_truncation_open_and_the_line_names_it(folder: Path) -> None:
    """The rules of ABI 2 leave what may be read open to truncation, as a kernel before Linux 6.2 does."""
    program = """
landlock.abi = lambda: options["version"]
level = confine(SandboxRules(**(USUAL | {"read": (*USUAL["read"], folder.parent / "other")}), own_root=options["own_root"]))
print(json.dumps([tried(lambda: os.truncate(folder.parent / "other" / "secret", 0)), level.sentence()]))
"""
    preamble = "from prime_node.adapters.sandbox import landlock\n"
    for version, own_root, outcome in ((3, False, "PermissionError"), (2, False, "done")):
        tried, line = inside(folder, preamble + program, version=version, own_root=own_root)
        assert (tried, "truncation (Linux 6.2 and newer)" in line) == (outcome, version < 3), line
    if namespaces.WHAT in level_here().up:
        (folder.parent / "other" / "secret").write_text("secret")
        tried, line = inside(folder, preamble + program, version=2, own_root=True)
        assert tried != "done"
        assert "truncation" not in line


def test_the_tables_of_system_calls_agree_with_the_headers_of_this_machine() -> None:
    machine, header = seccomp.architecture(), Path("/usr/include/asm-generic/unistd.h")
    found = [*Path("/usr/include").glob("*/asm/unistd_64.h")] if platform.machine() == "x86_64" else [header]
    if machine is None or not found or not found[0].exists():
        pytest.skip("no kernel headers are installed")
    defined = {}
    for line in found[0].read_text().splitlines():
        match line.split():
            case ["#define", name, number] if number.isdigit():
                defined[name.removeprefix("__NR_").removeprefix("__NR3264_")] = int(number)
    assert {name: defined.get(name, number) for name, number in machine.numbers.items()} == machine.numbers


def test_bubblewrap_gives_a_command_its_own_processes_temporary_files_and_no_network(folder: Path) -> None:
    program, why = bubblewrap.find_bubblewrap()
    if not program:
        pytest.skip(why)
    view = bubblewrap.View(read=tuple(map(Path, ("/usr", "/bin", "/lib", "/lib64"))), write=(folder,), folder=folder)
    script = "ls /proc | grep -c '^[0-9]'; cat /proc/net/dev | grep -vc lo:; touch here; ls ~ | wc -l"
    ran = subprocess.run(
        bubblewrap.wrap(["sh", "-c", script], view, program=program),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    processes, interfaces, home = (int(line) for line in ran.stdout.split())
    assert processes < 10
    assert interfaces == 2  # two lines of headings
    assert home == 0
    assert (folder / "here").exists()
