"""DNS rebinding between this machine's look-up of a name and that of its proxy: the proxy looks up no further name of a run."""

from __future__ import annotations

import asyncio
import socket
import ssl
from urllib.parse import urlsplit

import pytest
from aiohttp.abc import ResolveResult
from tests.node.coordinator_world import ANNA, make_run
from tests.node.http_server import served
from tests.node.proxy_world import ForwardProxy, forward_proxy
from tests.raw_server_world import raw_server

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.adapters.web.noted_resolver import NotedResolver
from prime_node.ports.transport import Unreachable

RUN = make_run()
KNOWN = {
    "run.example": ["8.8.8.8"],
    "further.example": ["2606:4700:4700::1111", "1.1.1.1"],
    "six.example": ["fd00::9"],
    "proxy.example": ["127.0.0.1"],
}
"""What this machine's resolver says. The proxy's own one says what the run's owner likes."""


@pytest.fixture(autouse=True)
def _resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(self: object, host: str, port: int = 0, family: int = socket.AF_INET) -> list[dict[str, object]]:
        await asyncio.sleep(0)
        found: list[dict[str, object]] = [
            {"hostname": host, "host": one, "port": port, "proto": 6, "flags": 0, "family": socket.AF_INET}
            for one in KNOWN.get(host, [])
            if family != socket.AF_INET or ":" not in one
        ]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return found

    monkeypatch.setattr("aiohttp.resolver.ThreadedResolver.resolve", resolve)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def client_of(url: str, *further: str) -> HttpClient:
    client = HttpClient(url, run=RUN.digest, clock=SystemClock(), key=ANNA, stall_s=5.0)
    client.also_at(further)
    return client


async def read(client: HttpClient) -> bytes:
    return (await client.unsigned("/v1/status", bytes_max=100))[0]


def refuses(proxy: ForwardProxy, host: str) -> None:
    """Make a host unreachable through the proxy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        proxy.ports[host] = free.getsockname()[1]


async def test_a_name_that_the_proxy_resolves_otherwise_leads_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the proxy got the name, looked it up again, and asked a server of its own network."""
    async with served() as public, served() as intranet, forward_proxy(9) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        intranet.says(b"secret")
        public.says(b"{}")
        refuses(proxy, "run.example")
        for name in ("further.example", "six.example", "unknown.example"):
            proxy.ports[name] = urlsplit(intranet.url).port or 0
        proxy.ports["1.1.1.1"] = urlsplit(public.url).port or 0
        further = ("http://unknown.example", "http://six.example", "http://further.example:81/run")
        async with client_of("http://run.example", *further) as client:
            assert await read(client) == b"{}"
        assert intranet.seen == []
        assert [path for _, path, _ in public.seen] == ["/run/v1/status"]
        assert proxy.asked[-1] == "GET http://1.1.1.1:81/run/v1/status HTTP/1.1"


async def test_a_tunnel_leads_to_the_address_that_was_checked_and_names_the_server_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _, name, __: named.append(name)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer nothing."""

    async with (
        raw_server(answer, tls=context) as public,
        forward_proxy(public) as proxy,
    ):
        monkeypatch.setenv("https_proxy", proxy.url)
        async with client_of("https://run.example", "https://further.example") as client:
            with pytest.raises(Unreachable):  # the server has no certificate
                await read(client)
        assert proxy.asked == ["CONNECT run.example:443 HTTP/1.1", "CONNECT 1.1.1.1:443 HTTP/1.1"]
        assert named == ["run.example", "further.example"]


async def test_a_run_that_names_the_proxy_leads_nobody_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the address to which the proxy's name led was kept, and used for a further address without another check."""
    async with forward_proxy(9) as proxy:
        port = urlsplit(proxy.url).port
        monkeypatch.setenv("https_proxy", f"http://proxy.example:{port}")
        proxy.refusal = b"HTTP/1.1 502 none\r\n\r\n"
        async with client_of("https://run.example", f"http://proxy.example:{port}") as client:
            with pytest.raises(Unreachable):
                await read(client)
        assert proxy.asked == ["CONNECT run.example:443 HTTP/1.1"]


async def test_requests_at_the_same_time_take_no_proxy_from_each_other() -> None:
    resolver, is_set = NotedResolver("run.example"), asyncio.Event()
    await resolver.resolve("run.example")

    async def through_proxy() -> list[ResolveResult]:
        resolver.let_pass("http://proxy.example:3128")
        is_set.set()
        await asyncio.sleep(0)
        return await resolver.resolve("proxy.example")

    async def further() -> str:
        await is_set.wait()
        return await resolver.asked_of_proxy("further.example")

    found, there = await asyncio.gather(through_proxy(), further())
    assert [one["host"] for one in found] == ["127.0.0.1"]
    assert there == "1.1.1.1"
    resolver.let_pass("http://proxy.example:3128")
    with pytest.raises(OSError, match=r"proxy\.example leads into another network"):
        await resolver.asked_of_proxy("proxy.example")
