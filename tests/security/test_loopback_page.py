"""The worker's page on loopback: other sites, other programs and former addresses get nothing, and cannot change anything."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.memory_coordinator import WorkerWorld
from tests.node.node_page_world import PageClient, opened_addresses, shown_worker
from tests.security.raw_http import ask

from prime_node.cli import control as command
from prime_node.cli.wire_node import PAGE_FILE
from prime_node.pages.loopback import BODY_BYTES_MAX, SESSIONS_MAX, LoopbackGate
from prime_node.worker.control import CONTROL
from prime_protocol.errors import LocalError, RemoteError

PAUSE = {"wanted": "pause"}
PRIVATE = (("GET", "/v1/node", None), ("POST", "/v1/control", PAUSE))


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[PageClient]:
    async with shown_worker(WorkerWorld(tmp_path)) as (_, client):
        yield client


def unchanged(client: PageClient) -> bool:
    return not (client.folder / CONTROL).exists()


async def test_all_but_the_page_s_own_files_needs_a_session(page: PageClient) -> None:
    for path in ("/",):
        assert (await page.call("GET", path)).status == 200
    for method, path, body in PRIVATE:
        for shown in (
            "",
            "Bearer",
            "Bearer ",
            "Bearer x",
            f"Bearer {page.address()['key']}",
            "Basic eDp4",
            "Bearer \xe9\xff",
        ):
            answer = await page.call(method, path, body, Authorization=shown)
            assert (answer.status, answer.code) == (403, "wrong_role"), shown
    assert (await page.call("POST", "/v1/control", Authorization="", Content_Length="0")).status == 403
    assert unchanged(page)
    await page.begin()
    for method, path, body in PRIVATE:
        assert (await page.call(method, path, body)).status == 200
        assert (await page.call(method, path, body, Authorization=f"bearer {page.session}")).status == 200
        assert (await page.call(method, path, body, Authorization=f"Bearer {page.session}x")).status == 403
    assert not unchanged(page)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:{port}",
        "127.0.0.1.evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1:{port}@evil.example",
        "127.0.0.2:{port}",
        "0.0.0.0:{port}",
        "[::]:{port}",
        "[::ffff:127.0.0.1]:{port}",
        "127.1:{port}",
        "2130706433:{port}",
        "localhost:",
        "",
    ],
)
async def test_a_name_of_a_stranger_that_resolves_to_loopback_gets_nothing(page: PageClient, host: str) -> None:
    await page.begin()
    port = page.address()["address"].rstrip("/").rpartition(":")[2]
    host = host.replace("{port}", port)
    key = page.address()["key"]
    for method, path, body in (("GET", "/", None), *PRIVATE, ("POST", "/v1/session", {"key": key})):
        origin = f"http://{host}" if method == "POST" else ""
        assert (await page.call(method, path, body, Host=host, Origin=origin)).status in (400, 403), path
    assert unchanged(page)
    assert page.address()["key"] == key, "the key was not used up"


async def test_other_names_of_this_machine_reach_the_page(page: PageClient) -> None:
    await page.begin()
    for host in ("127.0.0.1", "localhost:8400", "LOCALHOST", "[::1]:99"):
        assert (await page.call("GET", "/v1/node", Host=host)).status == 200
        assert (await page.call("POST", "/v1/control", PAUSE, Host=host, Origin=f"http://{host}")).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://{host}"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://localhost:{port}"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_another_site_cannot_change_anything_even_with_a_session(
    page: PageClient, headers: dict[str, str]
) -> None:
    """Another port of loopback is the same site for a browser, and another origin."""
    await page.begin()
    host = page.address()["address"].removeprefix("http://").rstrip("/")
    port, key = host.rpartition(":")[2], page.address()["key"]
    page.headers = {name: value.replace("{host}", host).replace("{port}", port) for name, value in headers.items()}
    assert (await page.order(**PAUSE)).status == 403
    assert (await page.call("POST", "/v1/session", {"key": key})).status == 403
    assert unchanged(page)
    assert page.address()["key"] == key
    if headers != {"Origin": ""}:
        assert (await page.call("GET", "/v1/node")).status == 403
    if headers.get("Origin"):
        assert (await page.call("GET", "/")).status == 403
    else:
        assert (await page.call("GET", "/")).status == 200, "a link in a terminal that runs in a browser opens the page"


async def test_no_answer_permits_another_site_to_read_it_or_to_ask_first(page: PageClient) -> None:
    await page.begin()
    answers = [await page.call(method, path, body) for method, path, body in (("GET", "/", None), *PRIVATE)]
    url = page.address()["address"]
    preflight = f"OPTIONS /v1/control HTTP/1.1\r\nHost: {url[7:-1]}\r\nOrigin: http://evil.example\r\n"
    preflight += "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n"
    answers.append(await ask(url, preflight.encode()))
    assert answers[-1].status >= 400
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert "set-cookie" not in answer.headers
    for answer in answers[:-1]:
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "require-trusted-types-for 'script'" in answer.headers["content-security-policy"]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["x-frame-options"] == "DENY"


async def test_an_address_opens_the_page_once(page: PageClient) -> None:
    first = page.address()["key"]
    assert (await page.call("POST", "/v1/session", {"key": "x" * 43})).status == 403
    await page.begin()
    assert page.address()["key"] != first
    assert (await page.call("POST", "/v1/session", {"key": first})).status == 403
    earlier = PageClient(page.folder, page.session)
    await page.begin()
    assert (await earlier.node())["doing"] == (await page.node())["doing"]


async def test_the_address_is_readable_by_its_owner_only_and_is_removed_at_the_end(tmp_path: Path) -> None:
    async with shown_worker(WorkerWorld(tmp_path)) as (_, client):
        await client.begin()
        assert stat.S_IMODE((tmp_path / PAGE_FILE).stat().st_mode) == 0o600
    assert not (tmp_path / PAGE_FILE).exists()


def listening_at(port: int) -> list[str]:
    """Return the addresses at which a TCP port of IPv4 listens, as the kernel lists them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
async def test_only_this_machine_reaches_the_port(page: PageClient) -> None:
    port = int(page.address()["address"].rstrip("/").rpartition(":")[2])
    assert await asyncio.to_thread(listening_at, port) == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"wanted": "dance"}',
        b'{"wanted": "run", "more": 1}',
        b'{"limits": {"hours": "7"}}',
        b'{"limits": {"threads": 0}}',
        b'{"limits": {"upload_mbit_per_s": 1e999}}',
        b'{"limits": {"gpu_memory_share": NaN}}',
        b"[" * 4_000,
    ],
)
async def test_an_order_that_is_none_changes_nothing(page: PageClient, body: bytes) -> None:
    await page.begin()
    answer = await page.call("POST", "/v1/control", body)
    assert (answer.status, answer.code) == (400, "malformed")
    assert json.loads(answer.body)["detail"][0] != ":", "a fault of the whole body has no place"
    assert unchanged(page)


async def test_a_long_order_is_refused_before_it_arrives(page: PageClient) -> None:
    await page.begin()
    answer = await page.call("POST", "/v1/control", b"", Content_Length=str(BODY_BYTES_MAX + 1))
    assert answer.code == "too_large"
    answer = await page.call("POST", "/v1/control", b"", Content_Length="10", Authorization="")
    assert answer.status == 403, "nothing of the body was awaited"


async def test_the_document_holds_no_key_of_the_worker_and_no_other_session(page: PageClient) -> None:
    await page.begin()
    shown = (await page.call("GET", "/v1/node")).body
    for secret in (page.address()["key"], page.session, bytes([4] * 32).hex()):
        assert secret.encode() not in shown


def test_the_oldest_session_ends_when_there_are_too_many() -> None:
    gate = LoopbackGate()
    sessions = [gate.begin(gate.key) for _ in range(SESSIONS_MAX + 1)]
    assert len(set(sessions)) == SESSIONS_MAX + 1
    assert len({len(session) for session in sessions}) == 1
    for wrong in ("", sessions[0], "\udcff" * 43, "é" * 43):
        with pytest.raises(RemoteError):
            gate.begin(wrong)


async def test_a_port_that_is_taken_stops_no_work(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (tmp_path / PAGE_FILE).write_text("{}")  # of a start that was killed
        async with shown_worker(WorkerWorld(tmp_path), page={"port": taken.getsockname()[1]}) as (worker, _):
            assert not (tmp_path / PAGE_FILE).exists()
            assert worker.config.page.enabled
    async with shown_worker(WorkerWorld(tmp_path), page={"enabled": False}):
        assert not (tmp_path / PAGE_FILE).exists()


@pytest.mark.parametrize(
    "address",
    [
        "--gpu-launcher=touch /tmp/pwned ",
        "-P evil ",
        "file:///etc/passwd",
        "javascript:alert(1)//",
        "http://evil.example/",
        "http://127.0.0.1:80@evil.example/",
        "http://127.0.0.1:80/evil",
        "http://127.0.0.1:80/\n--option",
        7,
        None,
    ],
)
async def test_no_browser_gets_another_address_from_a_worker_that_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: object
) -> None:
    """Before, `prime-node open` gave a browser, outside of the sandbox, what the worker's folder said: options too."""
    opened = opened_addresses(monkeypatch)
    async with shown_worker(WorkerWorld(tmp_path)) as (_, client):
        key = client.address()["key"]
        (tmp_path / "status.json").write_text("{}")
        written: tuple[object, ...] = (
            {"address": address, "key": key},
            {"address": "http://127.0.0.1:8400/", "key": f"{key} --x"},
            [],
        )
        for text in (*map(json.dumps, written), "[" * 1_000):
            (tmp_path / PAGE_FILE).write_text(text)
            with pytest.raises(LocalError, match="no address of a page"):
                command.open_worker(tmp_path)
    assert opened == []
