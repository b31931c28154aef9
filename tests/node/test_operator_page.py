"""The operator's page: on loopback or a private socket, for its operator's browser alone, with the orders of the commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, World, make_run, memory_parts, running
from tests.node.operator_world import run_dir_of

from prime_node.cli.operate_page.serving import private_socket, serve_page
from prime_node.cli.operator import Operator
from prime_node.cli.run_dir import RunDir
from prime_node.coordinator.api.routes import ENDPOINTS, PAGE_ENDPOINTS
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.invite import open_invite
from prime_protocol.run_spec import JoinLink

DRAIN = {"action": "drain"}


@dataclass
class Desk:
    """The page of a running coordinator's operator, and one who asks it."""

    world: World
    folder: RunDir
    session: aiohttp.ClientSession
    shown: list[str] = field(default_factory=list)
    url: str = ""
    begun: str = ""
    """The session of the page."""

    async def open(self, address: str) -> None:
        """Begin a session, as the page does."""
        self.url, _, key = address.rpartition("/#")
        status, answer = await self.ask("/v1/session", {"key": key})
        assert status == 200, answer
        self.begun = answer["session"]

    async def ask(
        self, path: str, order: object = None, *, session: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Send a request as the page does, with other headers. Return the status and the JSON of the answer."""
        sent = {"Authorization": f"Bearer {self.begun if session is None else session}", "Origin": self.url} | headers
        method, body = ("GET", None) if order is None else ("POST", json.dumps(order))
        async with self.session.request(method, self.url + path, data=body, headers=sent) as answer:
            return answer.status, json.loads(await answer.read())

    async def is_draining(self) -> bool:
        return bool((await self.world.status())["draining"])


@contextlib.asynccontextmanager
async def served(folder: RunDir, shown: list[str], *, socket: Path | None = None) -> AsyncIterator[str]:
    """Serve the page, and yield the address that is shown."""
    stop, known = asyncio.Event(), asyncio.Event()

    def show(line: str) -> None:
        shown.append(line)
        if "#" in line:
            known.set()

    serving = asyncio.create_task(serve_page(Operator.of(folder.path), stop, port=0, socket=socket, shown=show))
    waiting = asyncio.create_task(known.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if serving.done():
            await serving
        found = re.search(r"http://\S+", " ".join(shown))
        assert found is not None
        yield found[0]
    finally:
        waiting.cancel()
        stop.set()
        assert await serving == 0


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with running(memory_parts(make_run(title="Sums")), ANNA, BEN) as world:
        made = Desk(world, run_dir_of(world, tmp_path), world.session)
        async with served(made.folder, made.shown) as address:
            await made.open(address)
            yield made


async def test_every_order_of_the_page_is_carried_out(desk: Desk) -> None:
    world = desk.world

    async def done(**order: object) -> None:
        assert await desk.ask("/v1/order", order) == (200, {})

    await done(action="ban", worker=BEN.key_id, reason="noise in the cellar")
    with pytest.raises(RemoteError, match="noise in the cellar"):
        await world.client(BEN).heartbeat(HEARTBEAT)
    await done(action="pause", reason="moving house")
    await done(action="limit", joining={"workers_max": 3, "workers_per_network_max": 2, "invites_needed": False})
    await done(action="snapshot")
    assert await world.parts.store.latest_snapshot() is not None
    _, view = await desk.ask("/v1/view")
    shown = (view["title"], view["paused"], view["pause_reason"], view["joining"]["workers_max"])
    assert shown == ("Sums", True, "moving house", 3)
    banned = {one["worker"]: one["banned"] for one in view["workers"]}
    assert banned[ANNA.key_id] is None
    assert banned[BEN.key_id]["reason"] == "noise in the cellar"
    await done(action="resume")
    await done(action="unban", worker=BEN.key_id)
    await world.join(BEN)
    assert (await desk.ask(f"/v1/keys/{BEN.key_id[-8:]}"))[1] == {"keys": [BEN.key_id]}
    _, found = await desk.ask("/v1/invite", {"keys": 2, "days": 1})
    link = JoinLink.parse(found["link"])
    assert open_invite(link.invite, world.run, now_ms=world.parts.clock.now_ms()).keys_max == 2
    await done(action="drain")
    assert await desk.is_draining()


async def test_faults_are_answered_with_a_sentence(desk: Desk) -> None:
    for order, status, words in (
        ({"action": "ban"}, 400, "must name a worker"),
        ({"action": "explode"}, 400, "Input should be"),
        ({"action": "ban", "worker": desk.world.run.spec.keys.trainer[0]}, 403, "no worker and no person has the key"),
        ("no order", 400, ""),
    ):
        found = await desk.ask("/v1/order", order)
        assert (found[0], words in found[1]["detail"]) == (status, True), found
    assert (await desk.ask("/v1/invite", {"keys": 0, "days": 1}))[0] == 400


async def test_without_a_session_nothing_is_read_or_changed(desk: Desk) -> None:
    for session in ("", desk.begun[:-1], desk.begun + "x", "x" * len(desk.begun), "\xe4"):
        for path, order in (("/v1/view", None), ("/v1/order", DRAIN), ("/v1/invite", {"keys": 1, "days": 1})):
            status, answer = await desk.ask(path, order, session=session)
            assert (status, answer["code"]) == (403, ErrorCode.WRONG_ROLE)
    assert not await desk.is_draining()


async def test_an_address_is_good_once_and_the_next_one_is_shown(desk: Desk) -> None:
    used, following = (re.findall(r"/#(\S+)", line)[0] for line in desk.shown if "/#" in line)
    for key in (used, following[:-1], "", "\xe4"):
        status, answer = await desk.ask("/v1/session", {"key": key})
        assert (status, answer["code"]) == (403, ErrorCode.WRONG_ROLE)
    first = desk.begun
    await desk.open(f"{desk.url}/#{following}")
    assert desk.begun != first
    assert [(await desk.ask("/v1/view", session=one))[0] for one in (first, desk.begun)] == [200, 200]


async def test_other_sites_cannot_order_even_with_the_session(desk: Desk) -> None:
    """A form, an image or a script of another site, in the operator's own browser."""
    own = desk.url
    for headers in (
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "null", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": own.replace("http:", "https:")},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        for path, order in (("/v1/order", DRAIN), ("/v1/view", None)):
            assert (await desk.ask(path, order, **headers))[0] == 403, headers
    async with desk.session.post(
        f"{own}/v1/order", json=DRAIN, headers={"Authorization": f"Bearer {desk.begun}"}
    ) as answer:
        assert answer.status == 403, "a browser names the origin of each change"
    async with desk.session.options(f"{own}/v1/order", headers={"Origin": "https://evil.example"}) as preflight:
        assert not [name for name in preflight.headers if name.lower().startswith("access-control")]
    assert not await desk.is_draining()
    assert (await desk.ask("/v1/order", DRAIN, **{"Sec-Fetch-Site": "same-origin"}))[0] == 200


async def test_a_name_that_is_rebound_to_this_machine_is_refused(desk: Desk) -> None:
    for host in (
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "192.0.2.1",
        "[::",
        "a@b",
    ):
        for path in ("/", "/v1/view"):
            headers = {"Host": host, "Authorization": f"Bearer {desk.begun}"}
            async with desk.session.get(desk.url + path, headers=headers) as answer:
                assert answer.status >= 400, (host, path)
                assert b"title" not in await answer.read()
    for host in ("localhost:8411", "[::1]:8411"):  # a port that ssh forwards
        assert (await desk.ask("/v1/view", Host=host, Origin=f"http://{host}"))[0] == 200


async def test_the_page_runs_only_its_own_files_and_holds_no_secret(desk: Desk) -> None:
    secrets = [desk.begun.encode(), desk.folder.key("coordinator").read_bytes().strip()]
    async with desk.session.get(desk.url + "/") as answer:
        body, headers = await answer.read(), answer.headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY"
    named = re.findall(r'(?:href|src)="(/page/[^"]+)"', body.decode())
    assert any(path.endswith("operator.js") for path in named)
    for path in (*named, named[0].replace("app.css", "qr.js")):
        async with desk.session.get(desk.url + path) as answer:
            assert answer.status == 200, path
            body += await answer.read()
    body += json.dumps((await desk.ask("/v1/view"))[1]).encode()
    assert [secret for secret in secrets if secret in body] == []
    async with desk.session.get(f"{desk.url}/page/0123-operator.js") as answer:
        assert answer.status == 404


async def test_the_public_port_has_no_route_of_the_page(desk: Desk) -> None:
    public = {endpoint.path for endpoint in (*ENDPOINTS, *PAGE_ENDPOINTS)}
    assert public.isdisjoint({"/v1/view", "/v1/order", "/v1/invite", "/v1/keys/{ending}"})
    for path in ("/v1/order", "/v1/invite"):
        status, answer = await desk.world.post(path, json.dumps(DRAIN).encode(), Authorization=f"Bearer {desk.begun}")
        assert (status, answer["code"]) == (404, ErrorCode.NOT_FOUND)
    status, _, _ = await desk.world.get("/v1/view", Authorization=f"Bearer {desk.begun}")
    assert status == 404
    assert not await desk.is_draining()


async def test_a_coordinator_that_does_not_run_is_named(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        folder = run_dir_of(world, tmp_path)
    async with aiohttp.ClientSession() as session, served(folder, []) as address:
        desk = Desk(world, folder, session)
        await desk.open(address)
        for path, order in (("/v1/view", None), ("/v1/order", DRAIN)):
            status, answer = await desk.ask(path, order)
            assert (status, answer["code"]) == (503, ErrorCode.UNAVAILABLE)
            assert world.url in answer["detail"]


async def test_a_socket_serves_the_same_page_to_this_user_alone(tmp_path: Path) -> None:
    shown: list[str] = []
    async with running(memory_parts(make_run())) as world:
        folder = run_dir_of(world, tmp_path)
        path = folder.operate_socket
        async with served(folder, shown, socket=path) as address:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert f"ssh -N -L 8411:{path}" in shown[0]
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
                desk = Desk(world, folder, session)
                await desk.open(address)
                assert (await desk.ask("/v1/view"))[1]["run"] == world.run.digest
                assert (await desk.ask("/v1/view", session=""))[0] == 403
            if os.geteuid() == 0:
                assert await errno_of_another_user(path) == 13
            with pytest.raises(LocalError, match="leave out --socket"), private_socket(path):
                pass
        assert not path.exists()


async def errno_of_another_user(path: Path) -> int:
    """Return the error with which another user's connection to a socket fails; 0 if it is accepted."""
    for folder in path.parents:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)  # the socket alone shall refuse
    script = (
        "import os, socket, sys\nos.setgid(65534); os.setuid(65534)\n"
        "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])\nexcept OSError as error: sys.exit(error.errno)"
    )
    process = await asyncio.create_subprocess_exec("python3", "-S", "-c", script, str(path))
    return await process.wait()


def test_an_abandoned_socket_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "operate.sock"
    with private_socket(path):
        other = tmp_path / "other"
        path.rename(other)  # as after a crash
    other.rename(path)
    with private_socket(path):
        assert stat.S_ISSOCK(path.stat().st_mode)
    path.write_text("a file")
    with pytest.raises(LocalError, match="cannot listen on"), private_socket(path):
        pass
    assert path.read_text() == "a file"
