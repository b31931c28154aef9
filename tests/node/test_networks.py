"""Networks that are not plain: proxies, half-open connections, names that move or disappear, and IPv6 alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from tests.node.coordinator_process import REPOSITORY
from tests.node.coordinator_world import ANNA, HEARTBEAT, make_run, memory_parts, running
from tests.node.http_server import Server, served
from tests.node.proxy_world import forward_proxy
from tests.raw_server_world import raw_server

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import RemoteError

RUN = make_run()
VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as server:
        server.says(b"{}")
        yield server


def client_of(url: str, stall_s: float = 5.0) -> HttpClient:
    return HttpClient(url, run=RUN.digest, clock=SystemClock(), key=ANNA, stall_s=stall_s)


async def read(client: HttpClient) -> bytes:
    return (await client.unsigned("/v1/status", bytes_max=100))[0]


async def test_a_worker_behind_a_proxy_joins_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, only the advice of a failed `status` knew of proxies: every request went past them."""
    async with (
        running(memory_parts(RUN, hosts=("run.invalid",))) as world,
        forward_proxy(int(world.url.rpartition(":")[2])) as proxy,
    ):
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//anna:secret@"))
        world.url, world.clients = "http://run.invalid", {}
        await world.join(ANNA)
        assert (await world.client(ANNA).heartbeat(HEARTBEAT)).step == 0
        assert {line.split("/v1/")[0] for line in proxy.asked} == {"POST http://run.invalid"}


async def test_https_goes_through_a_tunnel_of_the_proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with forward_proxy(urlsplit(server.url).port or 0) as proxy, client_of("https://run.invalid") as client:
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(Unreachable):  # the server behind it speaks no TLS
            await read(client)
        assert proxy.asked == ["CONNECT run.invalid:443 HTTP/1.1"]
        proxy.refusal = b"HTTP/1.1 403 Not Here\r\nContent-Length: 0\r\n\r\n"
        with pytest.raises(Unreachable, match=rf"through the proxy {proxy.url}: it refuses: 403 Not Here"):
            await read(client)


@pytest.mark.parametrize("page", [b"HTTP/1.1 502 Bad Gateway", b"HTTP/1.1 503 Service Unavailable"])
async def test_a_proxy_that_cannot_reach_the_server_is_waited_for(page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with forward_proxy(9) as proxy, client_of("http://run.invalid") as client:
        monkeypatch.setenv("http_proxy", proxy.url)
        proxy.refusal = page + b"\r\nContent-Length: 4\r\n\r\n<h1>"
        with pytest.raises(RemoteError) as error:
            await read(client)
        assert error.value.is_transient


async def test_a_run_directs_no_client_into_the_network_around_its_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the proxy was asked for any name that a run on the internet signed."""
    known = {"intranet.example": "10.0.0.9", "run.example": "8.8.8.8", "other.example": "1.1.1.1"}

    async def resolve(self: object, host: str, port: int = 0, family: object = None) -> list[dict[str, object]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [{"host": known[host]}]

    monkeypatch.setattr("aiohttp.resolver.ThreadedResolver.resolve", resolve)
    async with forward_proxy(9) as proxy:
        proxy.refusal = b"H"  # and the end
        monkeypatch.setenv("http_proxy", proxy.url)
        for link in ("run.example", "run.invalid"):  # only the proxy knows the second one
            names = ("intranet.example", "other.example", "other.invalid")
            proxy.asked.clear()
            async with client_of(f"http://{link}") as client:
                client.also_at([f"http://{name}" for name in names])
                with pytest.raises(Unreachable):
                    await read(client)
            asked = {urlsplit(line.split(" ")[1]).hostname for line in proxy.asked}
            assert asked == {link, known["other.example"]}, "the proxy resolves no name but the link's"
        known["run.example"] = "10.0.0.8"  # a run of that network
        proxy.asked.clear()
        async with client_of("http://run.example") as client:
            client.also_at(["http://intranet.example"])
            with pytest.raises(Unreachable):
                await read(client)
        assert proxy.asked[-1].startswith("GET http://10.0.0.9/")


async def test_a_dead_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://anna:secret@127.0.0.1:9")
    async with client_of("http://run.invalid") as client:
        with pytest.raises(Unreachable, match=r"through the proxy http://127\.0\.0\.1:9: Connection refused") as error:
            await read(client)
        assert "secret" not in str(error.value)


async def test_this_machine_and_exceptions_are_asked_without_the_proxy(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` runs its roles on loopback, on machines with any settings."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        async with client_of(url) as client:
            assert await read(client) == b"{}"
    monkeypatch.setenv("no_proxy", "run.invalid")
    async with client_of("http://run.invalid") as client:
        with pytest.raises(Unreachable) as error:
            await read(client)
        assert "proxy" not in str(error.value)


async def test_a_kept_connection_that_is_half_open_costs_one_request() -> None:
    """Its other end, or a NAT between, has forgotten it: nothing comes back, not even a refusal."""
    answers = [1, 9]
    """Number of answers on each connection, before it is silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(answers.pop(0)):
            if not (await reader.readline()).startswith(b"GET"):
                break
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read()

    async with raw_server(serve) as port, client_of(f"http://127.0.0.1:{port}", 0.5) as client:
        assert await read(client) == b"{}"
        with pytest.raises(Unreachable, match="no answer"):
            await read(client)
        assert await read(client) == b"{}"
    assert answers == []


NAMESPACES = "mount --bind {hosts} /etc/hosts && exec {python} -m tests.node.{world} {arguments}"


def own_network(tmp_path: Path, *arguments: str, prepare: str = "", world: str = "named_server_world") -> list[str]:
    """Return the command that runs a world with an own /etc/hosts, and what `prepare` does before. Skips."""
    unshare = shutil.which("unshare")
    command = [unshare or "unshare", "--mount", "--net", "--map-root-user"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no namespaces")
    hosts, text = tmp_path / "hosts", " ".join(arguments)
    script = NAMESPACES.format(hosts=hosts, python=sys.executable, world=world, arguments=text)
    return [*command, "sh", "-ec", f"ip link set lo up\n{prepare}\n{script}"]


async def lines_of(command: list[str]) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=REPOSITORY, env=os.environ, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(450.0):
            said, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, said.decode()
    return said.decode().splitlines()


@pytest.mark.slow
async def test_a_coordinator_that_moves_and_a_name_that_is_gone_for_a_while_are_waited_for(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    lines = await lines_of(own_network(tmp_path, "moves", str(hosts)))
    assert lines[0].startswith("http://run.test:"), lines
    assert "Name or service not known" in lines[0] or "Temporary failure in name resolution" in lines[0], lines
    assert lines[1:] == ["found at 127.0.0.1", "found at 127.0.0.2"]


@pytest.mark.slow
async def test_a_run_goes_from_its_start_to_its_end_where_there_is_only_ipv6(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("2001:db8::1 run.test\n")
    prepare = "ip addr del 127.0.0.1/8 dev lo\nip -6 addr add 2001:db8::1/128 dev lo nodad"
    lines = await lines_of(own_network(tmp_path, "only6", str(tmp_path / "work"), prepare=prepare))
    assert lines == ["no IPv4 here", "drained at http://run.test, all accepted"]


@pytest.mark.slow
async def test_a_connection_to_an_address_of_one_link_names_that_link(tmp_path: Path) -> None:
    """Before, the zone was lost, so that the system refused the address, and IPv6 was tried where IPv4 was asked for."""
    (tmp_path / "hosts").write_text("::1 both.test\n127.0.0.1 both.test\n")
    links = "ip link add own type veth peer name other\nip link set other up\nip link set own up"
    prepare = f"{links}\nip -6 addr add fe80::1/64 dev own nodad"
    lines = await lines_of(own_network(tmp_path, "zones", str(tmp_path), prepare=prepare))
    assert lines == ["connected to fe80::1", "connected to 127.0.0.1"]


async def with_name_server(tmp_path: Path, task: str, options: str) -> list[str]:
    """Return what a task of name_server_world says, with these options of the resolver."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    resolver = tmp_path / "resolv.conf"
    resolver.write_text(f"nameserver 127.0.0.1\noptions {options}\n")
    prepare = f"mount --bind {resolver} /etc/resolv.conf"
    return await lines_of(
        own_network(tmp_path, task, str(tmp_path / "work"), prepare=prepare, world="name_server_world")
    )


SILENCE = "its name cannot be resolved: no name server has answered yet"


@pytest.mark.slow
async def test_name_servers_that_never_answer_hold_no_thread_that_others_need(tmp_path: Path) -> None:
    """Before, six look-ups stopped all files and hashes of a process for as long as the resolver waits."""
    lines = await with_name_server(tmp_path, "crowd", "timeout:30 attempts:2")
    assert lines == [
        "asked at the same time, and a thread is free",
        f"NAME.test: {SILENCE}",
        "[Errno -3] no name server has answered yet",
        f"http://NAME.test:9: {SILENCE}",
    ]


@pytest.mark.slow
async def test_an_ill_name_server_is_named_and_its_late_answer_is_used(tmp_path: Path) -> None:
    lines = await with_name_server(tmp_path, "ill", "timeout:30 attempts:1")
    assert lines == [
        "servfail: its name cannot be resolved: Temporary failure in name resolution",
        "nxdomain: its name cannot be resolved: Name or service not known",
        f"late: {SILENCE}",
        "found by an answer that came late",
        "and again by right answers",
    ]


@pytest.mark.slow
async def test_a_worker_whose_names_and_connections_fail_during_a_run_says_so_and_loses_nothing(tmp_path: Path) -> None:
    assert await with_name_server(tmp_path, "midrun", "timeout:1 attempts:1") == ["drained, all accepted"]


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_each_role_waits_for_a_name_server_says_so_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Before, SIGTERM ended a worker after 45 s: the process waited for the look-up."""
    (tmp_path / "work").mkdir()
    lines = await with_name_server(tmp_path, "roles", "timeout:30 attempts:5")
    ends = {"join": "SIGTERM", "seed": "SIGINT", "validator": "SIGINT", "trainer": "SIGTERM"}
    assert lines == [
        *(f"{role}: {SILENCE}; {number} ended it" for role, number in ends.items()),
        *(f"{role}: {SILENCE}; it found its run by itself" for role in ends),
    ]
