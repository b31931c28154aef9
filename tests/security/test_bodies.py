"""A body is read only after its sender is known, and counts against its sender's class alone. A real coordinator's sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    TRAINER,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.security.raw_http import Raw, ask, claim, get, post

from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_protocol import limits
from prime_protocol.body_claim import REQUEST_HEADER
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.limits import Limits
from prime_protocol.rollout import body_bytes_max

BODY = b"x" * 300_000


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(memory_parts(make_run()), ANNA, BEN) as world:
        yield world


async def test_an_unannounced_body_is_refused_by_its_length_before_it_is_sent(world: World) -> None:
    for path in ("/v1/rollouts", "/v1/blobs", "/v1/manifests", "/v1/check_result"):
        answer = await ask(world.url, post(path, limits.STRANGER_BODY_BYTES_MAX + 1))
        assert answer.code == ErrorCode.TOO_LARGE
        assert answer.headers["connection"] == "close"


CHANGES: list[tuple[dict[str, Any], ErrorCode]] = [
    ({"run": digest_of(b"another")}, ErrorCode.WRONG_RUN),
    ({"action": "blobs"}, ErrorCode.MALFORMED),
    ({"body_bytes": len(BODY) + 1}, ErrorCode.MALFORMED),
    ({"issued_at_ms": 1}, ErrorCode.EXPIRED),
    ({"epoch": "0" * 32}, ErrorCode.WRONG_EPOCH),
]


@pytest.mark.parametrize(("changes", "code"), CHANGES, ids=[next(iter(changes)) for changes, _ in CHANGES])
async def test_an_announcement_is_checked_before_the_body_is_sent(
    world: World, changes: dict[str, Any], code: ErrorCode
) -> None:
    line = await claim(world, ANNA, BODY, **changes)
    assert (await ask(world.url, post("/v1/rollouts", len(BODY), line))).code == code


async def test_a_key_that_does_not_take_part_is_refused_before_the_body_is_sent(world: World) -> None:
    for path, action, code in (
        ("/v1/blobs", "blobs", ErrorCode.WRONG_ROLE),
        ("/v1/manifests", "manifests", ErrorCode.WRONG_ROLE),
        ("/v1/check_result", "check_result", ErrorCode.WRONG_ROLE),
    ):
        line = await claim(world, ANNA, BODY, action=action)
        assert (await ask(world.url, post(path, len(BODY), line))).code == code
    line = await claim(world, TRAINER, BODY)
    assert (await ask(world.url, post("/v1/rollouts", len(BODY), line))).code == ErrorCode.UNKNOWN_WORKER


async def test_a_forged_announcement_is_refused_before_the_body_is_sent(world: World) -> None:
    line = (await claim(world, TRAINER, BODY)).replace(TRAINER.key_id, ANNA.key_id)
    assert (await ask(world.url, post("/v1/rollouts", len(BODY), line))).code == ErrorCode.BAD_SIGNATURE


async def test_an_announcement_counts_once(world: World) -> None:
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    line = await claim(world, ANNA, parcel)
    head = post("/v1/rollouts", len(parcel), line)
    assert (await ask(world.url, head + parcel)).status == 200
    assert (await ask(world.url, head)).code == ErrorCode.REPLAYED


@pytest.mark.parametrize("num_announced", [1, 2])
async def test_an_announced_body_is_charged_to_its_sender_once(num_announced: int) -> None:
    """The rate allows so few requests that each counts: join, lease, and one upload, which is sent once or twice."""
    tokens = 2 + num_announced
    async with running(memory_parts(make_run(), requests_per_second=tokens / 10), ANNA) as world:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        for _ in range(num_announced):
            line = await claim(world, ANNA, parcel)
            assert (await ask(world.url, post("/v1/rollouts", len(parcel), line) + parcel)).status == 200
        line = await claim(world, ANNA, parcel)
        assert (
            await ask(world.url, post("/v1/rollouts", len(parcel), line) + parcel)
        ).code == ErrorCode.TOO_MANY_REQUESTS


async def test_a_request_in_an_announced_body_is_charged_once() -> None:
    async with running(memory_parts(make_run(), requests_per_second=0.2)) as world:
        await world.join(ANNA)
        codes = []
        for _ in range(2):
            await world.learn_epoch()
            body = world.signed(HEARTBEAT, ANNA)
            line = await claim(world, ANNA, body, action="heartbeat")
            codes.append((await ask(world.url, post("/v1/heartbeat", len(body), line) + body)).status)
    assert codes == [200, 429]


async def test_an_announcement_without_a_body_pays_for_nothing() -> None:
    """Without a body the announcement is not checked, so the request itself is charged."""
    async with running(memory_parts(make_run(), requests_per_second=0.2)) as world:
        await world.join(ANNA)
        statuses = []
        for _ in range(2):
            signed = f"{REQUEST_HEADER}: {world.signed(HEARTBEAT, ANNA).decode()}"
            line = await claim(world, ANNA, BODY, action="heartbeat")
            statuses.append((await ask(world.url, post("/v1/heartbeat", 0, signed, line))).status)
    assert statuses == [200, 429]


async def test_a_body_is_the_one_that_was_announced(world: World) -> None:
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    line = await claim(world, ANNA, parcel)
    other = parcel[:-1] + bytes([parcel[-1] ^ 1])
    assert (await ask(world.url, post("/v1/rollouts", len(parcel), line) + other)).code == ErrorCode.DIGEST_MISMATCH


async def test_no_body_is_requested_before_its_sender_is_admitted(world: World) -> None:
    raw = await Raw.to(world.url)
    await raw.send(post("/v1/rollouts", len(BODY), "Expect: 100-continue"))
    assert (await raw.answer()).code == ErrorCode.TOO_LARGE, "no 100 came before it"
    raw.close()
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    raw = await Raw.to(world.url)
    line = await claim(world, ANNA, parcel)
    await raw.send(post("/v1/rollouts", len(parcel), line, "Expect: 100-continue"))
    assert await raw.line() == b"HTTP/1.1 100 Continue\r\n"
    await raw.line()
    await raw.send(parcel)
    assert (await raw.answer()).status == 200
    raw.close()


async def held(world: World, *lines: str, path: str = "/v1/join", num_bytes: int = 1_000) -> Raw:
    """Begin a body and do not end it."""
    raw = await Raw.to(world.url)
    await raw.send(post(path, num_bytes, *lines) + b"x")
    return raw


async def test_strangers_who_fill_their_share_take_nothing_from_members_and_roles(world: World) -> None:
    fill = [await held(world) for _ in range(limits.BODIES_EACH_MAX)]
    assert (await ask(world.url, post("/v1/join", 1_000) + b"x")).code == ErrorCode.UNAVAILABLE
    await world.client(ANNA).heartbeat(HEARTBEAT)
    reply = await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
    assert reply.verdict is None
    await world.judge()
    await world.client(TRAINER).put_blob(BODY)
    for raw in fill:
        raw.close()


async def test_strangers_bytes_are_bounded_besides_their_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRANGERS_BODY_BYTES_EACH_MAX", 100_000)
    raw = await Raw.to(world.url)
    await raw.send(post("/v1/join", 130_000) + b"x" * 120_000)
    assert (await raw.answer()).code == ErrorCode.UNAVAILABLE
    raw.close()


async def test_a_member_that_fills_its_share_takes_nothing_from_others(world: World) -> None:
    fill = [
        await held(world, await claim(world, ANNA, BODY), path="/v1/rollouts", num_bytes=len(BODY))
        for _ in range(limits.BODIES_EACH_MAX)
    ]
    line = await claim(world, ANNA, BODY)
    assert (await ask(world.url, post("/v1/rollouts", len(BODY), line) + b"x")).code == ErrorCode.UNAVAILABLE
    assert (await world.client(BEN).upload(make_parcel(await world.lease(BEN), BEN))).verdict is None
    await world.client(TRAINER).put_blob(BODY)
    for raw in fill:
        raw.close()


async def test_a_validator_that_fills_its_share_leaves_room_for_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one of the run's own keys could take the share of all of them, and no policy could be published."""
    monkeypatch.setattr(limits, "ROLES_BODY_BYTES_MAX", 0)
    blob = b"x" * 95_000
    async with running(memory_parts(make_run(limits=Limits(blob_bytes_max=100_000)))) as world:
        fill = [await Raw.to(world.url) for _ in range(3)]
        for raw in fill:
            line = await claim(world, VALIDATOR, blob, action="logprobs")
            await raw.send(post("/v1/logprobs", len(blob), line) + blob[:-1])
        assert (await fill[-1].answer()).code == ErrorCode.UNAVAILABLE
        await world.client(TRAINER).put_blob(blob)
        for raw in fill:
            raw.close()


async def test_what_a_body_held_is_given_back_however_it_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODIES_EACH_MAX", 1)
    for _ in range(3):
        raw = await held(world)
        raw.close()

        async def is_free() -> bool:
            return (await ask(world.url, post("/v1/join", 2) + b"{}")).code == ErrorCode.WRONG_TYPE

        await world.until(is_free)


async def test_the_least_rate_rises_with_the_length_so_that_no_body_takes_longer_than_another() -> None:
    """Two bodies of which as many bytes have arrived: the longer one is cut first, the shorter one when its time is over."""
    web = AiohttpServer(body_grace_s=0.1, body_s_max=2.0)
    async with running(replace(memory_parts(make_run()), web=web), ANNA, BEN) as world:
        began_s, ended_s = time.monotonic(), {}

        async def begin(key: SigningKey, num_bytes: int) -> None:
            body = b"x" * num_bytes
            raw = await Raw.to(world.url)
            await raw.send(post("/v1/rollouts", num_bytes, await claim(world, key, body)) + body[:200_000])
            assert (await raw.answer()).code == ErrorCode.MALFORMED
            ended_s[num_bytes] = time.monotonic() - began_s
            raw.close()

        await asyncio.gather(begin(ANNA, 200_001), begin(BEN, 1_000_000))
    assert list(ended_s) == [1_000_000, 200_001]
    assert ended_s[1_000_000] < 0.7 * ended_s[200_001]
    assert ended_s[200_001] >= 2.0, "all of its time"


async def test_a_signed_request_needs_no_body_and_has_only_one_place(world: World) -> None:
    epoch = (await world.client(ANNA).heartbeat(HEARTBEAT), world.client(ANNA).epoch)[1]
    signed = world.signed(HEARTBEAT, ANNA, epoch=epoch).decode()
    line = f"{REQUEST_HEADER}: {signed}"
    assert (await ask(world.url, post("/v1/heartbeat", 2, line) + b"{}")).code == ErrorCode.MALFORMED
    assert (await ask(world.url, post("/v1/heartbeat", 0, line))).status == 200
    assert (await ask(world.url, post("/v1/heartbeat", 0, line))).code == ErrorCode.REPLAYED
    long = f"{REQUEST_HEADER}: " + "x" * limits.HEADER_ENVELOPE_BYTES_MAX
    assert (await ask(world.url, post("/v1/heartbeat", 0, long + "x"))).code == ErrorCode.TOO_LARGE
    assert (await ask(world.url, get("/healthz"))).status == 200


@pytest.mark.parametrize("turns", [1, 3])
def test_the_bound_of_an_upload_is_the_one_that_spec_states(turns: int) -> None:
    """Compare the formula of SPEC.md, section 14, with the code that refuses, including proofs and turns."""
    rollouts, tokens, context = 7, 100, 900
    proofs = -(-tokens // 32)
    per_turn = 12 + 4 * context if turns > 1 else 0
    size = 65_536 + rollouts * turns * (21 + 258 * proofs + 20 * tokens + per_turn)
    found = body_bytes_max(
        num_rollouts=rollouts, completion_tokens_max=tokens, turns_max=turns, context_tokens_max=context
    )
    assert found == size
