"""Every task, thread and call in a pool ends where it is seen: nothing of the product is started and forgotten.

A task of a TaskGroup or a nursery ends its group. What the same function awaits or reads (`await task`, `task.result()`,
`await first_of(task, ...)`) raises there. Everything else is in SEEN, with who sees its end. Broad handlers of errors are ruff's
rule BLE001: each re-raises, logs the error, or says why in its `noqa`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.source_tree import PACKAGES, parsed

pytestmark = pytest.mark.xdist_group("source tree")
TASKS = {"create_task", "ensure_future"}
STARTS = {
    *TASKS,
    *("Thread", "Timer", "Process", "start_new_thread"),
    *("submit", "run_in_executor", "run_coroutine_threadsafe"),
    *("spawn_system_task",),
}
READERS = {"first_of", "unless", "shield", "gather"}
"""Functions that raise what their argument raises, if they are awaited."""
HANDLES = "its own handler logs each error"
DAEMON = "an error ends the thread, and cli/lifetime.py::log_failed_thread logs it"
DROPPED = "nothing keeps it, so asyncio logs its error"
RETURNED = "the caller awaits what it returns"
SEEN = {
    "adapters/engines/queued_rows.py::QueuedRows.__init__": "the thread stores its error, and the next call raises it",
    "adapters/engines/transformers_engine.py::TransformersEngine.set_threads": "sets a number of torch",
    "adapters/engines/transformers_engine.py::TransformersEngine.update": "the caller awaits `update.done`, which gets the error",
    "adapters/engines/vllm_worker_extension.py::die_with": "waits for the end of a process, then kills its own",
    "adapters/environments/child.py::EnvironmentChild.__init__": f"{DAEMON}; its end fails all that wait for the child",
    "adapters/environments/child.py::EnvironmentChild._pass_on": "EnvironmentProcess.play raises the error of `ask`",
    "adapters/environments/process.py::EnvironmentProcess.play": DROPPED,
    "adapters/link/link_client.py::LinkClient._first_opened": "raises the error of the first",
    "adapters/link/link_client.py::LinkClient._take": HANDLES,
    "adapters/link/link_server.py::_Link._begin": HANDLES,
    "adapters/name_lookups.py::NameLookups._begun": "the thread gives its error to those that wait",
    "adapters/otlp_traces.py::OtlpTraces.close": DAEMON,
    "adapters/peers/mdns.py::LocalPeers._give_up": HANDLES,
    "adapters/peers/mdns.py::LocalPeers._heard": HANDLES,
    "adapters/peers/mdns.py::LocalPeers.start": "sends a greeting three times; without it other peers find this one later",
    "adapters/peers/trio_thread.py::TrioThread.start": "its end is logged, and raised where the thread is used",
    "adapters/peers/trio_thread.py::TrioThread.to_asyncio.begin": "its error is carried over to the trio task",
    "adapters/storage/postgres_leader.py::TermKeeper.__init__": "`begun` and `lost` raise its error",
    "adapters/training/leading_backend.py::_follow_calls": HANDLES,
    "adapters/training/leading_backend.py::follow": DAEMON,
    "adapters/web/connection_counts.py::Listener._ready": DROPPED,
    "adapters/web/plain_gets.py::PlainGets.data_received": HANDLES,
    "broadcast/audit/verified_parts.py::_read": RETURNED,
    "broadcast/follow/heads.py::Heads._begin": "`_collect` raises its error at the next look",
    "broadcast/follow/heads.py::Heads._begin_comparisons": "the same",
    "broadcast/follow/heads.py::Heads.look": DROPPED,
    "broadcast/publish/publisher.py::Publisher.start": "`failed` and the next call raise the error that it stores",
    "broadcast/swarm/download.py::Download._ask": "`_ended` stores its error, and `run` raises it",
    "broadcast/swarm/download.py::Downloads.fetch": "the plan reports its errors",
    "broadcast/swarm/have_set.py::HaveBroadcast.lines": HANDLES,
    "broadcast/swarm/neighbours.py::Neighbours.link_more": "SwarmTasks.note counts and logs each error",
    "broadcast/swarm/peer.py::Peer.running": "SwarmTasks.keep counts and logs each error, and starts it again",
    "broadcast/swarm/piece_decoder.py::PieceDecoder.take": RETURNED,
    "cli/doctor.py::findings_of_child": "ends a process",
    "cli/environment_service.py::Service.handle": HANDLES,
    "cli/environment_service.py::Threads.submit": RETURNED,
    "cli/lifetime.py::_Ends._end": "writes the log, which may block; the process ends in any case",
    "cli/lifetime.py::_Ends.after": "ends this process",
    "cli/lifetime.py::_live": DROPPED,
    "cli/supervisor.py::Supervisor.start": "`wait` and `stop` await it",
    "cli/up_session.py::UpSession.interrupt": "all are gathered at its end",
    "cli/upgrade.py::_downloaded": "the thread gives its error to its maker",
    "coordinator/gateway/heartbeats.py::HeartbeatCalls._send": "gives its error to those that wait",
    "coordinator/listed_peers.py::Peers._try": HANDLES,
    "coordinator/page/live_feed.py::LiveFrames.enter": HANDLES,
    "other_programs.py::ThisMachine.is_gpu_busy": DAEMON,
    "patience.py::at_once": "raises the first error",
    "patience.py::first_answer": "raises the first error if all fail",
    "patience.py::first_of": "raises the error of the first",
    "trainer/trainer.py::Trainer._begin_save": "log_failed_save logs its error, and the next save raises it",
    "training_data/feed.py::Feed.take": "the next call awaits it",
    "codec/api.py::encode_tensors": "its result is read from the queue, in order",
}
"""Functions that start something whose end they do not read, and who sees it."""
IGNORED = {
    "broadcast/swarm/peer.py::Peer._open_and_run": "it is being cancelled",
    "patience.py::cancel_all": "their makers have read what was to be read",
    "trainer/trainer.py::Trainer.close": "log_failed_save has logged it",
}
"""Functions that gather errors and read none, and why."""


def qualified(tree: ast.Module) -> Iterator[tuple[str, ast.AST, set[str]]]:
    """Yield each function of a module by its dotted name, with the groups that it may use; the module has an empty name."""
    rest: list[tuple[str, ast.AST, set[str]]] = [("", tree, set())]
    while rest:
        name, node, opened = rest.pop()
        opened = opened | groups(node)
        if not isinstance(node, ast.ClassDef):
            yield name, node, opened
        rest += [(f"{name}.{child.name}".lstrip("."), child, opened) for child in _inner(node)]


def _inner(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _inner(child)


def own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of inner ones."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own(child)


def called(node: ast.AST) -> str:
    """Return the last name of what a call calls; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def groups(function: ast.AST) -> set[str]:
    """Return the names of the task groups and nurseries that a function opens or gets."""
    found = set()
    for node in own(function):
        if isinstance(node, ast.withitem) and called(node.context_expr) in ("TaskGroup", "open_nursery"):
            found.add(ast.unparse(node.optional_vars) if node.optional_vars is not None else "")
        elif isinstance(node, ast.arg) and node.annotation is not None and "TaskGroup" in ast.unparse(node.annotation):
            found.add(node.arg)
    return found


def read_in(function: ast.AST) -> set[str]:
    """Return the names whose result a function awaits or reads."""
    found = set()
    for node in own(function):
        if isinstance(node, ast.Await):
            found.add(ast.unparse(node.value))
            if called(node.value) in READERS:
                found.update(ast.unparse(argument).lstrip("*") for argument in node.value.args)  # type: ignore[attr-defined]
        elif called(node) in ("result", "exception"):
            found.add(ast.unparse(node.func.value))  # type: ignore[attr-defined]
    return found


def unseen(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the function and the line of each start whose end neither a group nor the function itself sees."""
    for name, function, opened in qualified(tree):
        read = read_in(function)
        parents = {child: node for node in own(function) for child in ast.iter_child_nodes(node)}
        for node in own(function):
            if called(node) not in STARTS or _only_waits(node):
                continue
            whose = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""  # type: ignore[attr-defined]
            if whose not in opened and not targets(node, parents) & read:
                yield name, node.lineno  # type: ignore[attr-defined]


def _only_waits(call: ast.AST) -> bool:
    """Return whether a task is the wait for an event or for a time, which has no error."""
    return isinstance(call, ast.Call) and any(called(argument) in ("wait", "sleep") for argument in call.args)


def targets(call: ast.AST, parents: dict[ast.AST, ast.AST]) -> set[str]:
    """Return the names to which a call's result is given; a call that is awaited or read at once has itself as a name."""
    names, node = {ast.unparse(call)}, call
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, ast.Assign) and isinstance(parent.value, ast.Tuple) and parent.value is node:
            place = parent.value.elts.index(call) if call in parent.value.elts else 0
            return names | {ast.unparse(each.elts[place]) for each in parent.targets if isinstance(each, ast.Tuple)}
        if isinstance(parent, ast.Assign | ast.AnnAssign):
            return names | {ast.unparse(each) for each in getattr(parent, "targets", None) or [parent.target]}  # type: ignore[union-attr]
        node = parent
    return names


def product(*words: str) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each module of the product with one of the words: to walk all would take long."""
    for package in ("prime_node", "prime_protocol"):
        for path in sorted(PACKAGES[package].rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if any(word in text for word in words):
                yield path.relative_to(PACKAGES[package]).as_posix(), path


def test_the_end_of_everything_that_is_started_is_seen() -> None:
    found = {f"{name}::{where}" for name, path in product(*STARTS) for where, _ in unseen(parsed(path))}
    assert found == SEEN.keys(), "await it, start it in a TaskGroup, or say in SEEN who sees its end"


def test_gathered_errors_are_read() -> None:
    found = set()
    for name, path in product("return_exceptions"):
        for where, function, _ in qualified(parsed(path)):
            for node in own(function):
                if isinstance(node, ast.Expr) and "return_exceptions=True" in ast.unparse(node):
                    found.add(f"{name}::{where}")
    assert found == IGNORED.keys()


def test_each_broad_handler_says_why_it_is_broad() -> None:
    """One that re-raises or logs the traceback need not: ruff allows it."""
    texts = {path: path.read_text(encoding="utf-8") for _, path in product("BLE001", "suppress")}
    noted = [(path.name, line) for path, text in texts.items() for line in text.splitlines() if "noqa: BLE001" in line]
    assert len(noted) > 20
    assert [(name, line) for name, line in noted if not re.search(r"noqa: BLE001 (- |\()\w", line)] == []
    silent = [path.name for path, text in texts.items() if re.search(r"suppress\((Base)?Exception\b", text)]
    assert silent == ["libp2p_streams.py"], "a stream that is being reset may fail in any way"


@pytest.mark.parametrize(
    ("code", "is_seen"),
    [
        ("async def f():\n asyncio.create_task(g())", False),
        ("async def f():\n task = asyncio.create_task(g())\n task.cancel()", False),
        ("async def f():\n self.task = asyncio.ensure_future(g())", False),
        ("async def f(pool):\n pool.submit(g)", False),
        ("def f():\n threading.Thread(target=g).start()", False),
        ("async def f():\n await asyncio.create_task(g())", True),
        ("async def f():\n task = asyncio.create_task(g())\n await task", True),
        ("async def f():\n one, two = asyncio.create_task(g()), asyncio.create_task(h())\n one.result()", False),
        ("async def f():\n task = asyncio.create_task(g())\n await first_of(task, h())", True),
        ("async def f():\n stopping = asyncio.create_task(stop.wait())", True),
        ("async def f():\n async with asyncio.TaskGroup() as tasks:\n  tasks.create_task(g())", True),
    ],
)
def test_the_rule_tells_what_is_forgotten(code: str, is_seen: bool) -> None:
    assert (list(unseen(ast.parse(code))) == []) == is_seen
