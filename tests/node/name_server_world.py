"""A small name server, and clients of names, in namespaces with an own network and resolv.conf. test_networks.py starts it.

Clients and roles wait WAIT_S for a look-up, less than the product's 8 s, so that no test only waits.

python -m tests.node.name_server_world TASK FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.node.coordinator_world import ANNA, make_run, memory_parts, running
from tests.node.crowd_world import persist
from tests.node.served_world import RUN, serving_parts, work_through
from tests.node.worker_world import WORKER
from tests.time_world import until

from prime_node.adapters import name_lookups
from prime_node.adapters.name_lookups import patient_loop
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.direct_upload import put_directly
from prime_node.adapters.web.http_client import HttpClient
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.keyfile import load_or_create
from prime_node.ports.transport import Unreachable

PORT = 53
WAIT_S = 3.0
"""Longer than a busy machine needs to send the queries of all tasks at once, and much shorter than the resolver's 30 s."""
PRIME_NODE = f"""
from prime_node.adapters import name_lookups
from prime_node.cli.main import main
name_lookups.WAIT_S_MAX = {WAIT_S}
main()
"""
"""Program of a role that waits as long."""
NAMES = 20
"""Of each kind: more together than an executor has threads, and of links more than uvloop has for look-ups."""
ROLES = {"join": signal.SIGTERM, "seed": signal.SIGINT, "validator": signal.SIGINT, "trainer": signal.SIGTERM}
"""Each role, and a signal that ends it."""
STOP_S_MAX = 14.0
"""More than a busy machine needs. Processes that wait for a look-up end after 15 s or more (lifetime.py)."""
SERVFAIL, NXDOMAIN = 2, 3
A_RECORD = 1


class NameServer:
    """A server of UDP in a thread. `mode` decides what it does with each query."""

    def __init__(self) -> None:
        self.mode = "silent"
        """One of silent, late, servfail, nxdomain, right."""
        self.asked = threading.Semaphore(0)
        """Released once for each query."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", PORT))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, caller = self._socket.recvfrom(4_096)
            self.asked.release()
            if self.mode == "late":
                timer = threading.Timer(WAIT_S + 1.0, self._answer, (query, caller, "right"))
                timer.daemon = True
                timer.start()
            elif self.mode != "silent":
                self._answer(query, caller, self.mode)

    def _answer(self, query: bytes, caller: tuple[str, int], mode: str) -> None:
        """Send 127.0.0.1 for a query of IPv4, an empty answer for another one, or an error."""
        end = query.index(b"\0", 12) + 5
        question = query[12:end]
        (kind,) = struct.unpack(">H", query[end - 4 : end - 2])
        code = {"servfail": SERVFAIL, "nxdomain": NXDOMAIN, "right": 0}[mode]
        has_address = code == 0 and kind == A_RECORD
        head = query[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, int(has_address), 0, 0)
        record = b"\xc0\x0c" + struct.pack(">HHIH", A_RECORD, 1, 1, 4) + socket.inet_aton("127.0.0.1")
        self._socket.sendto(head + question + (record if has_address else b""), caller)


async def crowd(folder: Path) -> None:
    """Ask for more names at once than the loop has threads, of a server that never answers."""
    server, run = NameServer(), make_run()

    async def ask(name: str) -> str:
        url = f"http://{name}.test:9"
        async with HttpClient(url, run=run.digest, clock=SystemClock(), key=ANNA) as client:
            try:
                if name.startswith("link"):
                    await asyncio.open_connection(f"{name}.test", 9)
                elif name.startswith("bucket"):
                    await put_directly(url, b"body", bytes(32), near=(), needs_tls=False, stall_s=60.0)
                else:
                    await client.run_spec()
            except (Unreachable, OSError) as error:
                return str(error).replace(name, "NAME")
        return "an answer"

    kinds = ("run", "bucket", "link")
    asking = [asyncio.create_task(ask(f"{kinds[number % 3]}{number}")) for number in range(3 * NAMES)]
    heard = threading.Thread(target=lambda: [server.asked.acquire() for _ in range(len(asking))], daemon=True)
    heard.start()
    await until(lambda: not heard.is_alive())
    await asyncio.to_thread(folder.mkdir)
    print("asked at the same time, and a thread is free" if not any(task.done() for task in asking) else "too late")
    print(*sorted(set(await asyncio.gather(*asking))), sep="\n")


async def ill(folder: Path) -> None:
    """Say what a client hears while a name server is ill, and that it finds the coordinator when it is not."""
    server, run = NameServer(), make_run()
    async with running(memory_parts(run, hosts=("run.test",))) as world:
        port = int(world.url.rpartition(":")[2])
        for mode in ("servfail", "nxdomain", "late", "right"):
            server.mode = mode
            async with HttpClient(f"http://run.test:{port}", run=run.digest, clock=SystemClock(), key=ANNA) as client:
                try:
                    await client.run_spec()
                except Unreachable as error:
                    print(f"{mode}: {str(error).partition(': ')[2]}")
                if mode == "late":
                    await persist(client.run_spec)
                    print("found by an answer that came late")
        print(f"and again by {server.mode} answers")


class Forwarder:
    """Forwards TCP connections to a port of this machine, and calls `uploading` when a bundle is sent for the first time."""

    def __init__(self, port: int, uploading: Callable[[], None]) -> None:
        self._port = port
        self._uploading: Callable[[], None] | None = uploading
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        """Listen, and return the port."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """End all connections, as a router does that starts again."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += (writer, other_writer)
        await asyncio.gather(self._pipe(reader, other_writer), self._pipe(other_reader, writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                if self._uploading is not None and data.startswith(b"POST /v1/rollouts"):
                    self._uploading, uploading = None, self._uploading
                    uploading()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


async def midrun(folder: Path) -> None:
    """Let the name server and all connections fail while a worker sends its first bundle, until it says so."""
    server, away = NameServer(), asyncio.Event()
    server.mode = "right"
    parts = await serving_parts()
    parts = replace(
        parts, config=CoordinatorConfig.model_validate({**parts.config.model_dump(), "hosts": ("run.test",)})
    )
    async with running(parts) as world:

        def fail() -> None:
            server.mode = "servfail"
            forwarder.cut()

        def say(line: str) -> None:
            if server.mode == "servfail" and "coordinator unreachable" in line:
                server.mode = "right"
                away.set()

        forwarder = Forwarder(int(world.url.rpartition(":")[2]), fail)
        url = f"http://run.test:{await forwarder.start()}"
        async with HttpClient(url, run=RUN.digest, clock=SystemClock(), key=WORKER) as client:
            worker, _ = await work_through(world, folder, client=client, say=say)
        tally = worker.receipts.tally()
        assert away.is_set()
        assert tally.accepted > 0
        print(f"drained, {'all accepted' if not tally.refused and not tally.pending else tally}")


async def roles(folder: Path) -> None:
    """Start all roles while no name server answers, tell them to end, and at last let it answer them."""
    server, run = NameServer(), make_run()
    load_or_create(folder / "role.key")
    async with running(memory_parts(run, hosts=("run.test",))) as world:
        link = f"http://run.test:{world.url.rpartition(':')[2]}/#{run.digest}"
        for is_ended in (True, False):
            server.mode, all_wait = "silent", asyncio.Barrier(len(ROLES))
            living = [_live(server, all_wait, role, link, folder, ROLES[role] if is_ended else None) for role in ROLES]
            print(*await asyncio.gather(*living), sep="\n")


async def _live(
    server: NameServer, all_wait: asyncio.Barrier, role: str, link: str, folder: Path, number: signal.Signals | None
) -> str:
    """Start a role, wait until it says that no name server answers, and send it a signal; without one, let it find its run."""
    option = "--identity" if role in ("join", "seed") else "--key"
    command = [role, link, option, str(folder / "role.key"), "--folder", str(folder / role)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PRIME_NODE, *command), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        said = await _line(process.stderr, "name cannot be resolved")
        said = said.partition("run.test")[2].partition(": ")[2].partition(";")[0]
        await all_wait.wait()
        if number is None:
            server.mode = "right"
            await _line(process.stderr, "the run's description: answered after")
            return f"{role}: {said}; it found its run by itself"
        began_s = time.monotonic()
        process.send_signal(number)
        _, rest = await process.communicate()
        in_time = time.monotonic() - began_s < STOP_S_MAX and b"cannot be interrupted" not in rest
        return f"{role}: {said}; {number.name} {'ended it' if in_time else f'was too slow: {rest.decode()}'}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def _line(stream: asyncio.StreamReader, text: str) -> str:
    """Return the next line with a text."""
    while text not in (line := (await stream.readline()).decode()):
        assert line, f"the process has ended without {text!r}"
    return line


if __name__ == "__main__":
    name_lookups.WAIT_S_MAX = WAIT_S
    task = {"crowd": crowd, "ill": ill, "midrun": midrun, "roles": roles}[sys.argv[1]]
    with asyncio.Runner(loop_factory=patient_loop) as runner:
        runner.run(task(Path(sys.argv[2])))
