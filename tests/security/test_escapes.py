"""Escapes: attempts of a hostile environment from inside a real environment process. Each is refused, or bounded.

Each is tried with bubblewrap and without it, as on machines that lack it. Here root tries, which has fewer restrictions.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.security.hostile_world import Outside, outside, running, tried
from tests.security.sandbox_world import scheduling

from prime_node.adapters.environments.process import ProcessEnvironment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's"),
    pytest.mark.timeout(120),
]
WALLS = ["bubblewrap", "landlock"]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    with outside(tmp_path_factory.mktemp("outside")) as made:
        yield made


@pytest.fixture(scope="module", params=WALLS)
def inside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, there: Outside
) -> Iterator[ProcessEnvironment]:
    place = tmp_path_factory.mktemp("inside")
    with running(place, isolated=request.param == "bubblewrap", hidden=(there.folder / "run",)) as world:
        yield world


def is_isolated(world: ProcessEnvironment) -> bool:
    return not any("namespaces" in each for each in world.process.ready["missing"])


FILES = [
    *(
        (probe, target)
        for probe in ("read", "write", "hard_link", "symbolic_link", "fd_paths")
        for target in ("key", "own")
    ),
    *((probe, "own") for probe in ("mode", "owner", "times", "attribute")),
    ("listing", "folder"),
]


@pytest.mark.parametrize(("probe", "target"), FILES)
def test_no_file_outside_is_read_or_changed(
    inside: ProcessEnvironment, there: Outside, probe: str, target: str
) -> None:
    assert tried(inside, probe, str(getattr(there, target))).startswith("refused")
    assert there.own.stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/proc/1/environ",
        "/proc/1/root/etc/shadow",
        "/proc/kcore",
        "/proc/sysrq-trigger",
        "~/.ssh/id",
        "~/.bashrc",
    ],
)
def test_no_secret_of_the_system_or_the_user_is_read(inside: ProcessEnvironment, path: str) -> None:
    assert "refused" in tried(inside, "read", str(Path(path).expanduser())) or (
        path == "/proc/1/environ" and is_isolated(inside)
    )


@pytest.mark.parametrize("path", ["/", "/home", "/root", "/run", "/var", "/mnt", "/sys/kernel"])
def test_folders_of_the_system_show_nothing_of_the_user(inside: ProcessEnvironment, path: str, there: Outside) -> None:
    result = tried(inside, "listing", path)
    assert result.startswith("refused") or ("prime-test" not in result and ".ssh" not in result)


@pytest.mark.parametrize(
    "path",
    [
        "/tmp/planted",
        "/etc/planted",
        "/usr/lib/planted",
        "/run/planted",
        "/proc/sys/kernel/core_pattern",
        "/sys/planted",
    ],
)
def test_nothing_is_written_that_others_see(inside: ProcessEnvironment, path: str) -> None:
    before = Path(path).read_bytes() if Path(path).exists() else None
    result = tried(inside, "write", path)
    assert result.startswith("refused") or (path.startswith("/tmp") and is_isolated(inside))
    assert (Path(path).read_bytes() if Path(path).exists() else None) == before


@pytest.mark.parametrize("probe", ["attach", "memory_of", "kill", "limit_other"])
def test_no_other_process_is_touched(inside: ProcessEnvironment, there: Outside, probe: str) -> None:
    for pid in (there.pid, os.getpid()):
        assert tried(inside, probe, str(pid)).startswith("refused")


def test_no_other_process_is_rescheduled(inside: ProcessEnvironment, there: Outside) -> None:
    before = scheduling(there.pid)
    assert tried(inside, "set_priority", str(there.pid)).startswith("refused")
    for probe in ("set_affinity", "set_scheduler", "set_scheduling_parameters"):
        tried(inside, probe, str(there.pid))  # C libraries need an answer of success; the call has no effect
    assert scheduling(there.pid) == before


def test_no_other_process_is_seen(inside: ProcessEnvironment) -> None:
    assert tried(inside, "others").startswith(("did: sees []", "refused"))


def test_a_signal_to_all_processes_stays_inside(inside: ProcessEnvironment, there: Outside) -> None:
    tried(inside, "kill_all")
    assert Path(f"/proc/{there.pid}").exists()
    assert tried(inside, "read", "/dev/null") == "did:"


def test_no_unix_socket_outside_is_reached(inside: ProcessEnvironment, there: Outside) -> None:
    assert tried(inside, "connect_abstract", there.abstract).startswith("refused")
    for path in there.path_sockets:
        assert tried(inside, "connect_path", path).startswith("refused")
        assert tried(inside, "send_path", path).startswith("refused")


def test_there_is_no_network(inside: ProcessEnvironment, there: Outside) -> None:
    for probe, argument in (
        ("connect_tcp", there.tcp),
        ("connect_tcp", "192.0.2.1:80"),
        ("listen_tcp", "0"),
        ("send_udp", there.udp),
        ("send_udp", "192.0.2.1:53"),
        ("resolve", "localhost.example"),
    ):
        assert tried(inside, probe, argument).startswith("refused"), (probe, argument)


RAW, NETLINK, PACKET, VSOCK, BLUETOOTH, ALG = "2,3,1", "16,3,0", "17,3,768", "40,1,0", "31,3,1", "38,5,0"


@pytest.mark.parametrize("what", [RAW, NETLINK, PACKET, VSOCK, BLUETOOTH, ALG, "10,2,0", "1,2,0", "44,3,0", "21,5,0"])
def test_no_other_kind_of_socket_opens(inside: ProcessEnvironment, what: str) -> None:
    assert tried(inside, "open_socket", what).startswith("refused")


def test_shared_memory_of_others_is_not_there(inside: ProcessEnvironment, there: Outside) -> None:
    assert tried(inside, "shared_memory", there.shared).startswith("refused")
    assert there.shared not in tried(inside, "listing", "/dev/shm")


SYSTEM_CALLS = {
    "unshare a user namespace": "272,0x10000000",
    "unshare a network namespace": "272,0x40000000",
    "clone into a user namespace": "56,0x10000011,0,0,0,0",
    "setns": "308,0,0",
    "pivot_root": "155,-99,-99",
    "chroot": "161,-99",
    "io_uring": "425,1,-99",
    "keyctl": "250,0,0,0",
    "add_key": "248,-99,-99,-99,1,0",
    "bpf": "321,0,-99,16",
    "perf_event_open": "298,-99,0,-1,-1,0",
    "userfaultfd": "323,0",
    "open_by_handle_at": "304,-100,-99,0",
    "fsopen": "430,-99,0",
    "open_tree": "428,-100,-99,1",
    "init_module": "175,-99,1,-99",
    "kexec_load": "246,0,0,0,0",
    "reboot": "169,0,0,0",
    "process_vm_writev": "311,1,0,0,0,0,0",
    "pidfd_getfd of the host": "438,-1,0,0",
    "process_madvise of the host": "440,-1,-99,1,21,0",
    "kcmp with the host": "312,1,1,2,0,0",
    "move_pages of the host": "279,1,0,-99,-99,-99,2",
    "migrate_pages of the host": "256,1,64,-99,-99",
    "syslog": "103,3,-99,16",
    "iopl": "172,3",
    "swapon": "167,-99,0",
    "setuid": "105,0",
    "sethostname": "170,-99,1",
    "setpriority of the host": "141,0,1,19",
    "setpriority of a group": "141,1,0,0",
    "setpriority of a user": "141,2,0,0",
    "ioprio_set of the host": "251,1,1,0x6000",
    "ioprio_set of a user": "251,3,0,0x6000",
    "sched_setattr of the host": "314,1,-99,0",
}


@pytest.mark.parametrize("what", SYSTEM_CALLS)
def test_system_calls_that_widen_are_refused(inside: ProcessEnvironment, what: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    if what == "setuid" and not is_isolated(inside):
        pytest.skip("it is root already there")
    result = tried(inside, "system_call", SYSTEM_CALLS[what])
    assert result.startswith("refused"), result
    assert re.search("EPERM|ENOSYS|EACCES", result), result


@pytest.mark.parametrize("probe", ["mount_tmpfs", "raise_limits", "run_planted", "type_into_terminal"])
def test_what_a_process_gave_up_stays_given_up(inside: ProcessEnvironment, probe: str) -> None:
    assert tried(inside, probe).startswith("refused")


def test_nothing_is_inherited_from_the_host(inside: ProcessEnvironment) -> None:
    assert tried(inside, "inherited") == "did: descriptors []"


def test_a_set_user_id_program_gives_nothing(inside: ProcessEnvironment) -> None:
    assert "no_new_privs True, capabilities 0000000000000000" in tried(inside, "set_user_id")


def test_no_core_is_dumped(inside: ProcessEnvironment) -> None:
    assert tried(inside, "dump_core") == "did: core limit (0, 0)"


def test_nothing_is_planted_for_the_next_process(inside: ProcessEnvironment) -> None:
    assert tried(inside, "plant") == "did: planted []"


def test_what_is_printed_goes_to_the_log_so_much_a_minute_and_readable(
    inside: ProcessEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert tried(inside, "print_bomb", str(2**24)) == "did: printed"
        tried(inside, "read", "/dev/null")
    logged = "".join(record.getMessage() for record in caplog.records)
    assert len(logged) < 2**18
    assert "\x1b" not in logged
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in logged


BOMBS = [
    ("memory_bomb", str(2**31), "MemoryError"),
    ("mapped_memory", str(2**31), "OSError ENOMEM"),
    ("thread_bomb", "", "RuntimeError"),
    ("file_bomb", "", "OSError E(FBIG|NOSPC|DQUOT)"),
    ("open_bomb", "", "OSError EMFILE"),
]


@pytest.mark.parametrize(("probe", "argument", "error"), BOMBS, ids=[bomb[0] for bomb in BOMBS])
def test_bombs_are_bounded(inside: ProcessEnvironment, probe: str, argument: str, error: str) -> None:
    if probe == "thread_bomb" and not is_isolated(inside):
        pytest.skip("root's threads have no bound without namespaces")
    assert re.match(f"refused: {error}", tried(inside, probe, argument))
    assert tried(inside, "read", "/dev/null") == "did:", "and it goes on"


def test_environments_end_first_when_memory_runs_out(inside: ProcessEnvironment) -> None:
    """Code that wants to can take all memory: limits count private memory, of one process."""
    assert tried(inside, "read", "/proc/self/oom_score_adj").startswith("did: 1000")
    assert tried(inside, "write", "/proc/self/oom_score_adj").startswith("refused: PermissionError")


def test_a_fork_bomb_is_bounded(inside: ProcessEnvironment) -> None:
    if not is_isolated(inside):
        pytest.skip("root's processes have no bound without namespaces")
    result = tried(inside, "fork_bomb")
    assert result.startswith("refused: BlockingIOError EAGAIN after")
    assert int(result.rsplit(" ", 1)[1]) < 128
