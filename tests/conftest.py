"""Settings of every test: one thread per process, no hub, a separate log, and a skip where the machine lacks a part."""

from __future__ import annotations

import gc
import logging
import os
import platform
import shutil
import sys
from collections.abc import Generator, Iterator

import hypothesis
import pytest
from tests.schedule_world import Schedule

from prime_lab.postgres_server import NO_FSYNC, PASSWORD, PostgresServer, postgres_server
from prime_lab.s3_server import S3Server, s3_server

# Read by the libraries as they are imported, here and in every process that a test starts. Two torch
# processes with two threads each on two cores spin against one another and fall to a fifth of their speed.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_NO_USAGE_STATS="1",
)

# Tests assert no times: on a busy machine an example can take a second that takes a millisecond elsewhere.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# Collecting imports torch, transformers and every test. All of it stays, so a search for garbage among it is for nothing.
gc.disable()

PROCESSES_MAX = 8
"""Processes that run tests."""
PROCESS_GIB = 5
"""Memory for a process and what it starts. Most need 1.5 GiB; the tests of a real model need 6."""
SCHEDULE = Schedule()
"""Times of this run, if it has several processes; kept by the process that reports."""
HAS_GPU = shutil.which("nvidia-smi") is not None
HAS_VLLM_BUILD = HAS_GPU or (platform.system(), platform.machine()) == ("Linux", "x86_64")


@pytest.fixture(autouse=True)
def _log_ends_with_the_test() -> Iterator[None]:
    """A command that is called in a test points the log at its own standard error, which is closed when it ends."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _imports_end_with_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the modules that a test wrote and imported, and its folders on the path: the next test may use the same names."""
    path, before = sys.path[:], set(sys.modules)
    yield
    sys.path[:] = path
    base = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(base):
            del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_found_in_its_file() -> Iterator[None]:
    """Report a socket that a test left open in the test's own file: otherwise a later file fails, at random."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def postgres_of_the_session() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of this process. Its data would not survive a power loss."""
    with postgres_server(*NO_FSYNC) as server:
        yield server


@pytest.fixture
def postgres(postgres_of_the_session: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    """The server of the session, with its password in the environment."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return postgres_of_the_session


@pytest.fixture(scope="session")
def s3_of_the_session() -> Iterator[S3Server]:
    """An S3 server for all tests of this process."""
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_of_the_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server of the session, with its address and key in the environment."""
    for name, value in s3_of_the_session.environment.items():
        monkeypatch.setenv(name, value)
    return s3_of_the_session


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in what a test logs: pytest-xdist cannot send them to the process that reports."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record when a test ran and where. Only the process that reports knows the other processes."""
    if (process := getattr(report, "node", None)) is not None:
        SCHEDULE.add(process.gateway.id, report.nodeid, start=report.start, stop=report.stop)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the time went, so that each log of CI says what to make quicker."""
    if lines := list(SCHEDULE.lines()):
        terminalreporter.section("processes, and the groups that took longest")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes of `-n auto`: one more than cores if there is memory.

    Slow tests wait for half of their time: for processes that start, for name servers, for the disk.
    """
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return max(1, min(PROCESSES_MAX, (os.cpu_count() or 2) + 1, gib // PROCESS_GIB))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests by the kind of machine, never by installed packages: a missing package must fail its tests."""
    for item in items:
        if _is_heavy(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("vllm") and not HAS_VLLM_BUILD:
            item.add_marker(pytest.mark.skip(reason="vLLM has no build for this machine"))
    if hasattr(config, "workerinput"):
        _distribute(items)


def pytest_collection_finish() -> None:
    """Search for garbage from here on, but not among what is imported: each time, that would take as long as many a test."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def _is_heavy(item: pytest.Item) -> bool:
    """Return whether a test starts a whole run or vLLM."""
    return any(item.get_closest_marker(name) for name in ("e2e", "vllm"))


def _distribute(items: list[pytest.Item]) -> None:
    """Group and order the tests for the processes of pytest-xdist (`--dist loadgroup --no-loadscope-reorder`).

    Whole runs use all cores, so one process starts them all, one after the other. Those that vLLM computes alone, in one thread,
    are a group of their own: with the whole runs they would last longest, and leave the other process without tests at the end.
    Every other file is a group: its module fixtures are made in one process. Files that share something outside their
    processes name a common group. Groups with slow tests come first, and among them those whose tests may take longest, so
    that none is left alone at the end.
    """
    groups, ranks = [], dict[str, tuple[int, float]]()
    for item in items:
        whole, vllm, named = map(item.get_closest_marker, ("e2e", "vllm", "xdist_group"))
        of_file = named.args[0] if named else item.nodeid.partition("::")[0]
        group = "whole runs" if whole else "vLLM" if vllm else of_file
        if named is None:
            item.add_marker(pytest.mark.xdist_group(group))
        _append_group(item, group)
        groups.append(group)
        kind = 0 if whole else 1 if item.get_closest_marker("slow") else 2
        ranks[group] = min(ranks.get(group, (2, 0.0)), (kind, -_seconds_max(item)))
    order = sorted(range(len(items)), key=lambda place: ranks[groups[place]])
    items[:] = [items[place] for place in order]


def _seconds_max(item: pytest.Item) -> float:
    """Return how long a test may take: its own limit, or 0 if it has none."""
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit is not None and limit.args else 0.0


def _append_group(item: pytest.Item, group: str) -> None:
    """Append the group to the test's id, from which the scheduler reads it.

    pytest-xdist 3.8 appends it to `_nodeid`, which pytest reads no more since 9.2. Without it every test is a group of its own:
    whole runs take the cores from one another, and each process makes the fixtures of most modules.
    """
    identity = getattr(item, "_id", None)
    if identity is not None:
        item._id = type(identity).parse(f"{item.nodeid}@{group}")
