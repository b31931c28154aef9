"""The network of a simulated run: it delays, reorders, repeats and loses requests and answers, and cuts peers off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from tests.node.seeded_parts_world import SimulatedProcess, SimulatedServer, SkewedClock

from prime_node.ports.transport import Unreachable
from prime_node.ports.web import Request, Response, Route
from prime_protocol.body_claim import CLAIM_HEADER, claim_of
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.manifest import Manifest
from prime_protocol.requests import JoinRequest, LeaveRequest
from prime_protocol.rollout import EngineInfo
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import Timestamp, check_follows, check_fresh

RETRIED = {ErrorCode.EXPIRED, ErrorCode.WRONG_EPOCH, ErrorCode.REPLAYED, ErrorCode.TOO_MANY_REQUESTS}
"""Errors after which a client signs again and repeats."""
WORK_TWICE = ("/v1/rollouts", "/v1/blobs", "/v1/manifests")
"""Uploads: what is stored twice is the same."""
LOST_SHARE, REPEATED_SHARE = 0.03, 0.05
ANSWER_S_MAX = 120.0
"""Time in which a running process answers a request or breaks its connection, whatever fails behind it."""


class Place(Protocol):
    """One coordinator or gateway as its peers see it."""

    web: SimulatedServer
    process: SimulatedProcess


class BadNetwork:
    """The network, and what clients do about it."""

    def __init__(self, run: PinnedRun, drawn: random.Random) -> None:
        self._run = run
        self.drawn = drawn
        self.places: Sequence[Place] = ()
        self.asked: dict[str, int] = {}
        """Number of the coordinator that a peer asks at present."""
        self.has_gateways = False
        """Whether some of its places are gateways: a request that is repeated then arrives anywhere."""
        self.is_noisy = True
        self.pace = 1.0
        """Share of the usual delays."""
        self.clocks: dict[str, SkewedClock] = {}
        self.cut_off: Counter[str] = Counter()
        self.epoch, self.is_epoch_old = "", True

    async def send(
        self, key: SigningKey, path: str, make: Callable[[], bytes], *, method: str = "POST", template: str = ""
    ) -> tuple[int, bytes]:
        """Send one request over the bad network. Raises Unreachable and RemoteError."""
        name = name_of(key)
        await asyncio.sleep(self.pace * self.drawn.uniform(0.0, 0.3))
        if self.cut_off[name] or self._is_drawn(LOST_SHARE):
            raise Unreachable("the request was lost")
        body, place = make(), self.asked.get(name, 0)
        headers = {CLAIM_HEADER.lower(): self.announced(key, body)} if path == "/v1/rollouts" else {}
        if self._is_drawn(REPEATED_SHARE):
            places = (place, self.drawn.randrange(len(self.places)) if self.has_gateways else place)
            answers = await asyncio.gather(
                *(self.deliver(path, body, method, template, at, headers) for at in places), return_exceptions=True
            )
            answered = [one for one in answers if not isinstance(one, BaseException)]
            assert len(answered) < 2 or path in WORK_TWICE or method == "GET", f"{path}: one request worked twice"
            found = self.drawn.choice(answers)
            if isinstance(found, BaseException):
                raise found
        else:
            found = await self.deliver(path, body, method, template, place, headers)
        await asyncio.sleep(self.pace * self.drawn.uniform(0.0, 0.3))
        if self.cut_off[name] or self._is_drawn(LOST_SHARE):
            raise Unreachable("the answer was lost")
        return found

    def _is_drawn(self, share: float) -> bool:
        return self.is_noisy and self.drawn.random() < share

    async def deliver(
        self,
        path: str,
        body: bytes,
        method: str = "GET",
        template: str = "",
        place: int = 0,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, bytes]:
        at = self.places[place % len(self.places)]
        if not at.process.may_act.is_set():
            await at.process.may_act.wait()
        web = at.web
        route = web.routes.get((method, template or path)) or web.routes.get((method, "/{path:.*}"))
        if route is None:
            raise Unreachable("nothing listens")
        params = dict(zip(_names(template), path.split("/")[3:], strict=False)) if template else {}
        answering = asyncio.ensure_future(_answer(route, Request(params, body, headers, "127.0.0.1")))
        web.answering[answering] = None
        try:
            await asyncio.wait({answering}, timeout=ANSWER_S_MAX)
            if answering.cancelled():
                raise Unreachable("the connection broke")
            assert answering.done(), f"{path} has not been answered in {ANSWER_S_MAX:.0f} s"
            response, whole = answering.result()
        finally:
            answering.cancel()
            web.answering.pop(answering, None)
        if not at.process.may_act.is_set():
            await at.process.may_act.wait()
        if web.may_send is not None and not web.may_send():
            raise Unreachable("the connection was cut: its coordinator may not lead")
        if response.after is not None:
            response.after()
        return response.status, whole

    def signed(self, key: SigningKey, message: Any) -> bytes:
        """Return a signed request, by the clock of its sender."""
        fields = {
            "run": self._run.digest,
            "nonce": secrets.token_hex(16),
            "issued_at_ms": self.clock_of(key).now_ms(),
            "epoch": self.epoch,
            "request": message.model_dump(mode="json"),
        }
        return seal(json.dumps(fields).encode(), PayloadType.REQUEST, key).to_bytes()

    def announced(self, key: SigningKey, body: bytes) -> str:
        """Return what announces a body, by the clock of its sender."""
        now_ms, nonce = self.clock_of(key).now_ms(), secrets.token_hex(16)
        return claim_of(
            body, key, run=self._run.digest, action="rollouts", nonce=nonce, now_ms=now_ms, epoch=self.epoch
        )

    def clock_of(self, key: SigningKey) -> SkewedClock:
        return self.clocks.setdefault(name_of(key), SkewedClock())

    async def ask(self, key: SigningKey, name: str, make: Callable[[], bytes]) -> tuple[int, bytes]:
        """Ask until there is an answer, as clients do. Raises RemoteError for one that stays."""
        while True:
            try:
                if self.is_epoch_old:
                    await self.learn_epoch(key)
                return await self.send(key, f"/v1/{name}", make)
            except Unreachable:
                self._rotate(key)
                await asyncio.sleep(0.5)
            except RemoteError as error:
                if error.code is ErrorCode.UNAVAILABLE:
                    self._rotate(key)
                if error.code is ErrorCode.WRONG_EPOCH:
                    self.is_epoch_old = True
                elif not error.is_transient and error.code not in RETRIED:
                    raise
                await asyncio.sleep(error.retry_after_s or 0.5)

    def _rotate(self, key: SigningKey) -> None:
        self.asked[name_of(key)] = (self.asked.get(name_of(key), 0) + 1) % len(self.places)
        self.is_epoch_old = self.is_epoch_old or len(self.places) > 1

    async def learn_epoch(self, key: SigningKey) -> None:
        _, body = await self.send(key, "/healthz", bytes, method="GET")
        if "epoch" not in (found := json.loads(body)):
            raise Unreachable("this coordinator is a standby")
        self.epoch, self.is_epoch_old = found["epoch"], False

    async def message(self, key: SigningKey, name: str, message: Any) -> tuple[int, bytes]:
        return await self.ask(key, name, lambda: self.signed(key, message))


def take_timestamp(stamps: dict[SigningKey, Timestamp], clock: SkewedClock, peer: SigningKey, stamp: Timestamp) -> None:
    """Take a timestamp as Trust does, by the peer's clock. Raises RemoteError if the coordinator contradicts itself."""
    now_ms, known = clock.now_ms(), stamps.get(peer)
    try:
        if known is None:
            check_fresh(stamp, now_ms)
        if known is None or check_follows(stamp, known, now_ms):
            stamps[peer] = stamp
    except RemoteError as error:
        if error.code is not ErrorCode.EXPIRED:
            raise


async def head_at(net: BadNetwork, place: int) -> int:
    """Return the number of the newest policy at a place. Raises Unreachable or RemoteError."""
    _, body = await net.deliver("/v1/head", b"", place=place)
    return parse_json(open_envelope(body).payload, Manifest).policy_version


async def require_head(net: BadNetwork, num_gateways: int, version: int) -> None:
    """Wait until each gateway has a link; its newest policy must be this one."""
    for place in range(num_gateways):
        while True:
            with contextlib.suppress(Unreachable, RemoteError):
                assert await head_at(net, place) == version, "a gateway shows an old policy"
                break
            await asyncio.sleep(0.5)


async def require_changes(net: BadNetwork, num_gateways: int, worker: SigningKey, engine: EngineInfo) -> None:
    """Let a worker come and go until each gateway has shown a viewer a change. Raises AssertionError."""
    came = JoinRequest(name="again", software="1", engine=engine, rollouts_max=64)
    for gateway in net.places[:num_gateways]:
        seen = asyncio.create_task(_first_change(gateway))
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                while not seen.done():
                    await net.message(worker, "join", came)
                    await asyncio.wait({seen}, timeout=1.5)
                    with contextlib.suppress(RemoteError):  # it has left, and the answer was lost
                        await net.message(worker, "leave", LeaveRequest())
                    await asyncio.wait({seen}, timeout=1.5)
        except TimeoutError:
            raise AssertionError("a gateway shows its viewers no live changes") from None
        finally:
            seen.cancel()
        seen.result()


async def _first_change(place: Place) -> None:
    live = await place.web.routes["GET", "/v1/live"].handler(Request({}, b"", {}, "127.0.0.1"))
    assert live.after is not None
    assert not isinstance(live.body, bytes)
    try:
        async for frames in live.body:
            if frames.startswith(b"id: "):
                return
    finally:
        live.after()


async def look_at_gateway(net: BadNetwork, place: int, head: Manifest) -> None:
    """Read a blob of a policy in pieces through a gateway, and its live changes for a while. Raises AssertionError."""
    digest = net.drawn.choice([part.digest for encoding in head.encodings for part in encoding.parts])
    _, found = await net.deliver(f"/v1/blobs/{digest}", b"", "GET", "/v1/blobs/{digest}", place)
    assert digest_of(found) == digest, "a gateway has changed a blob"
    await head_at(net, place)
    web = net.places[place].web
    live = await web.routes["GET", "/v1/live"].handler(Request({}, b"", {}, "127.0.0.1"))
    assert live.after is not None
    assert not isinstance(live.body, bytes)
    versions: list[int] = []
    try:
        async with asyncio.timeout(net.drawn.uniform(0.0, 5.0)):
            async for frames in live.body:
                versions += [int(number) for number in re.findall(rb"id: ([0-9]+)\n", frames)]
    except TimeoutError:
        pass
    finally:
        live.after()
    assert versions == sorted(set(versions)), "a viewer got a change twice, or an old one after a new one"


async def _answer(route: Route, request: Request) -> tuple[Response, bytes]:
    """Return the answer of a handler, and its whole body."""
    if route.admit is not None and request.body:
        admission = route.admit(replace(request, body=b""), len(request.body))
        await admission if isinstance(admission, Awaitable) else None
    response = await route.handler(request)
    if isinstance(response.body, bytes):
        return response, response.body
    return response, b"".join([piece async for piece in response.body])


def name_of(key: SigningKey) -> str:
    """Return the short name of a peer."""
    return key.key_id[-4:]


def _names(template: str) -> list[str]:
    return [part[1:-1] for part in template.split("/") if part.startswith("{")]
