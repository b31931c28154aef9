"""A stolen gateway, which knows the secret of the link, spoils neither the bundles of others nor the state of the run."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, VALIDATOR, make_parcel, make_run, memory_parts, running
from tests.node.gateway_world import LISTENS, hearing
from tests.node.link_world import BODY_BYTES_MAX, RawGateway, answering, call, linked, no_answer, raw_gateway
from tests.node.newcomers_world import request

from prime_node.adapters.link import gateway_room, link_server, sealed_frames
from prime_node.adapters.link.link_server import LOG_S
from prime_node.adapters.link.sealed_frames import CODE_BYTES, HEAD_BYTES_MAX, FrameKind, LinkFrame
from prime_node.adapters.storage.folder_blobs import FolderBlobs
from prime_node.coordinator.api.forwarded import BEATS_MAX, heartbeats_to_bytes
from prime_node.ports.web import Response
from prime_node.ports.writer_link import ADMIT, BEATS, SHED, ForwardedAnswer, ForwardedCall, HeldParcel
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.parcel import open_parcel
from prime_protocol.requests import LeaveRequest, Stamped


async def test_a_gateway_cannot_replace_the_bundle_of_another_worker(tmp_path: Any) -> None:
    """Before, the writer stored any bytes under any digest that a gateway named: it destroyed bundles that were accepted."""
    parts, server = hearing(replace(memory_parts(make_run(), **LISTENS), bundles=FolderBlobs(tmp_path)))
    async with running(parts, ANNA, BEN) as world, linked(server.port, world.run.digest) as link:
        honest = make_parcel(await world.lease(ANNA), ANNA)
        bundle = (await world.client(ANNA).upload(honest)).bundle
        opened = open_parcel(make_parcel(await world.lease(BEN), BEN), body_bytes_max=10**9)

        async def other_bytes() -> bytes:
            return b"nothing of value"

        async def same_bytes() -> bytes:
            return honest

        async def nothing() -> bytes:  # the bundle is in the shared storage
            return b""

        claimed = HeldParcel("c" * 64, len(honest), opened.envelope.signatures[0].signature, nothing, is_stored=True)
        with pytest.raises(RemoteError, match="stores bundles elsewhere"):
            await link.ask(
                ForwardedCall("/v1/rollouts", signer=BEN.key_id, body=opened.envelope.payload, parcel=claimed)
            )
        for named, fetch in ((bundle, other_bytes), (bundle, same_bytes), (bundle, nothing), ("b" * 64, same_bytes)):
            held = HeldParcel(named, len(honest), opened.envelope.signatures[0].signature, fetch)
            call = ForwardedCall("/v1/rollouts", signer=BEN.key_id, body=opened.envelope.payload, parcel=held)
            with pytest.raises(RemoteError) as error:
                await link.ask(call)
            assert await parts.bundles.get(bundle) == honest
            assert not await parts.bundles.has("b" * 64)
            assert error.value.code is ErrorCode.DIGEST_MISMATCH
        assert (await world.take_task(VALIDATOR)).bundle == bundle


HEADS: dict[str, dict[str, Any]] = {
    "a signer that is no key": {"path": "/v1/join", "signer": "../../keys/root"},
    "a signer that is no text": {"path": "/v1/join", "signer": {"$": 1}},
    "an endless address": {"path": "/v1/status", "address": "x" * 10_000},
    "a digest that is a path": {"path": "/v1/rollouts", "parcel": ["../" * 20, 1, "00" * 64]},
    "a digest that is no text": {"path": "/v1/rollouts", "parcel": [{}, 1, "00" * 64]},
    "a length below zero": {"path": "/v1/rollouts", "parcel": ["b" * 64, -(10**18), "00" * 64]},
    "a short signature": {"path": "/v1/rollouts", "parcel": ["b" * 64, 1, "00"]},
    "half a character": {"path": "/v1/status", "address": "\ud800"},
    "parameters that are no object": {"path": "/v1/status", "params": [1]},
    "no path": {},
}


@pytest.mark.parametrize("name", HEADS)
async def test_a_head_that_no_gateway_sends_reaches_no_endpoint(name: str) -> None:
    async with answering(no_answer) as port, raw_gateway(port) as gateway:
        gateway.send(gateway.sealer.seal(LinkFrame(FrameKind.CALL, 1, HEADS[name])))
        async for frame in gateway.frames():
            if frame.kind is FrameKind.FAULT:
                assert (frame.call, frame.head["code"]) == (1, "malformed")
                return
    pytest.fail("the link has ended")


CALLS = {
    "a body of no endpoint": ForwardedCall(ADMIT, params={"num_bytes": "1"}),
    "a body of an unknown endpoint": ForwardedCall(ADMIT, params={"path": "/v1/x", "num_bytes": "1"}),
    "a body of an endpoint for readers": ForwardedCall(ADMIT, params={"path": "/v1/run", "num_bytes": "1"}),
    "a body of no length": ForwardedCall(ADMIT, params={"path": "/v1/rollouts", "num_bytes": "-1"}),
    "a body of endless length": ForwardedCall(ADMIT, params={"path": "/v1/rollouts", "num_bytes": "9" * 10_000}),
    "refused requests that are no JSON": ForwardedCall(SHED, body=b"{"),
    "refused requests that are no object": ForwardedCall(SHED, body=b"[1]"),
    "refused requests of no kind": ForwardedCall(SHED, body=b'{"ALL":1}'),
    "refused requests below zero": ForwardedCall(SHED, body=b'{"STRANGERS":-1}'),
    "refused requests in words": ForwardedCall(SHED, body=b'{"STRANGERS":"1"}'),
    "a path without its number": ForwardedCall("/v1/manifests/{policy_version}"),
    "a path with another number": ForwardedCall("/v1/manifests/{policy_version}", params={"version": "1"}),
    "a join of no key": ForwardedCall("/v1/join"),
}


async def test_calls_that_no_gateway_makes_are_refused_and_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Before, each left a traceback in the log, as fast as they came, and the last one let a worker without a key join."""
    parts, server = hearing(memory_parts(make_run(), **LISTENS))
    async with running(parts) as world, linked(server.port, world.run.digest) as link:
        await world.learn_epoch()
        for name, made in CALLS.items():
            body = world.stamped(request()) if made.path == "/v1/join" else made.body
            with pytest.raises(RemoteError) as error:
                await link.ask(replace(made, body=body))
            assert error.value.code is ErrorCode.MALFORMED, name
        assert (await world.status())["workers"] == []
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_fault_of_the_coordinator_fills_no_log_however_often_a_gateway_makes_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def fail(call: ForwardedCall) -> ForwardedAnswer:
        raise ZeroDivisionError

    async with answering(fail) as port:
        began_s = time.monotonic()
        for _ in range(20):
            async with linked(port) as link:
                with pytest.raises(RemoteError, match="the error is in its log"):
                    await link.ask(ForwardedCall("/v1/status"))
        passed_s = time.monotonic() - began_s
    for line in ("a call of a gateway", "is linked"):
        assert 1 <= caplog.text.count(line) <= 1 + passed_s / LOG_S, line


STAMPED = Stamped(run="a" * 64, nonce="b" * 32, issued_at_ms=1, epoch="c" * 32, request=HEARTBEAT)
ROW = b"[%b," + STAMPED.model_dump_json().encode() + b"]"
BEATS_BODIES = {
    "nothing": b"",
    "no list": b"{}",
    "too many": b"[" + b",".join([ROW % b'"a","b"'] * (BEATS_MAX + 1)) + b"]",
    "a signer that is no text": b"[" + ROW % b'{"$":1},""' + b"]",
    "an endless address": b"[" + ROW % (b'"a","' + b"x" * 10_000 + b'"') + b"]",
    "half a character": b"[" + ROW % b'"\\ud800",""' + b"]",
    "a payload that is cut off": b"[" + (ROW % b'"a",""')[:-2] + b"]",
    "a payload of another kind": b'[["a","",{}]]',
}


async def test_heartbeats_that_no_gateway_sends_are_no_signs_of_life() -> None:
    parts, server = hearing(memory_parts(make_run(), **LISTENS))
    async with running(parts) as world, linked(server.port, world.run.digest) as link:
        await world.join(ANNA)
        await world.learn_epoch()
        for name, body in BEATS_BODIES.items():
            with pytest.raises(RemoteError) as error:
                await link.ask(ForwardedCall(BEATS, body=body))
            assert error.value.code is ErrorCode.MALFORMED, name
        payload = world.stamped(HEARTBEAT.model_copy(update={"bundles_spooled": 7}))
        rows = [("../../keys/root", payload), (ANNA.key_id, world.stamped(LeaveRequest()))]
        answer = await link.ask(
            ForwardedCall(
                BEATS, body=heartbeats_to_bytes([ForwardedCall("", signer=key, body=one) for key, one in rows])
            )
        )
        assert isinstance(answer.response.body, bytes)
        codes = [found["code"] for found in json.loads(answer.response.body)]
        assert codes == ["unknown_worker", "wrong_type"]
        (row,) = (await world.status())["workers"]
        assert row["bundles_spooled"] == 0


async def ended(gateway: RawGateway) -> bool:
    """Read until the writer ends the link, and return True; its signs of life never end."""
    async with asyncio.timeout(20.0):
        async for _ in gateway.frames():
            pass
    return True


async def faults(gateway: RawGateway, number: int) -> list[LinkFrame]:
    """Return the next faults."""
    found = []
    async with asyncio.timeout(20.0):
        async for frame in gateway.frames():
            found += [frame] if frame.kind is FrameKind.FAULT else []
            if len(found) == number:
                return found
    pytest.fail("the link has ended")


async def test_a_packet_that_is_longer_than_any_body_of_the_run_ends_the_link_before_it_arrives() -> None:
    """Before, the writer waited for two gigabytes, from each of any number of links."""
    async with answering(no_answer) as port, raw_gateway(port) as gateway:
        whole = gateway.sealer.seal(call(1, BODY_BYTES_MAX + HEAD_BYTES_MAX))
        gateway.send(whole[: 4 + 8 + CODE_BYTES])
        assert await ended(gateway)


async def test_a_long_packet_of_many_calls_ends_the_link_before_any_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the writer took all calls of a packet in one turn: 64 MB of short ones kept everyone waiting for a minute."""
    answered = list[ForwardedCall]()

    def answer(call: ForwardedCall) -> ForwardedAnswer:
        answered.append(call)
        return ForwardedAnswer(Response(status=204))

    calls = [call(number, 1_000) for number in range(2_000)]
    async with answering(answer) as port, raw_gateway(port) as gateway:
        gateway.send(gateway.sealer.seal(*calls[:1_000]))
        async for frame in gateway.frames():
            if frame.kind is FrameKind.ANSWER and frame.call == 999:
                break
        monkeypatch.setattr(sealed_frames, "TOGETHER_BYTES_MAX", 2**30)
        together = gateway.sealer.seal(*calls[1_000:], *calls[1_000:])
        monkeypatch.undo()
        gateway.send(together)
        assert await ended(gateway)
    assert len(answered) == 1_000


async def test_the_calls_of_one_address_are_bounded_in_number_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each call of any number of them was kept with its body until it was answered."""
    monkeypatch.setattr(gateway_room, "CALLS_EACH_MAX", 3)
    waiting = asyncio.Event()

    async def never(call: ForwardedCall) -> ForwardedAnswer:
        await waiting.wait()
        return await no_answer(call)

    async with answering(never) as port, raw_gateway(port) as one, raw_gateway(port) as other:
        one.send(one.sealer.seal(call(1), call(2)))
        other.send(other.sealer.seal(call(1), call(2), call(3)))
        assert [fault.head["code"] for fault in await faults(other, 2)] == ["unavailable"] * 2
    monkeypatch.setattr(gateway_room, "HELD_BYTES_MAX", 0)
    async with answering(never, body_bytes_max=2**20) as port, raw_gateway(port) as gateway:
        for number, num_bytes in ((1, 2**20), (2, 2**20), (3, 2**19)):
            gateway.send(gateway.sealer.seal(call(number, num_bytes)))
        (fault,) = await faults(gateway, 1)
        assert (fault.call, fault.head["code"]) == (3, "unavailable")


async def test_the_heads_of_calls_are_short_and_count_like_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a head was as long as a packet and counted for nothing: it held a hundred times a body's bound in memory."""
    monkeypatch.setattr(gateway_room, "HELD_BYTES_MAX", 0)
    waiting = asyncio.Event()

    async def never(call: ForwardedCall) -> ForwardedAnswer:
        await waiting.wait()
        return await no_answer(call)

    async with answering(never, body_bytes_max=1_000) as port, raw_gateway(port) as gateway:
        long = call(1, headers={"a": "b" * (HEAD_BYTES_MAX - 1_000)})
        gateway.send(gateway.sealer.seal(*(replace(long, call=number) for number in (1, 2, 3))))
        (fault,) = await faults(gateway, 1)
        assert (fault.call, fault.head["code"]) == (3, "unavailable")
    async with answering(never) as port, raw_gateway(port) as gateway:
        gateway.send(gateway.sealer.seal(call(1, query={str(number): "" for number in range(65)})))
        (fault,) = await faults(gateway, 1)
        assert fault.head["code"] == "malformed"
        gateway.send(gateway.sealer.seal(call(2, others="b" * HEAD_BYTES_MAX)))
        assert await ended(gateway)


async def test_calls_that_have_ended_count_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_room, "CALLS_EACH_MAX", 1)
    monkeypatch.setattr(gateway_room, "HELD_BYTES_MAX", 0)
    async with answering(no_answer, body_bytes_max=2**20) as port, linked(port) as link:
        for _ in range(5):
            await link.ask(ForwardedCall("/v1/status", body=bytes(2**20)))


async def test_a_parcel_that_is_given_counts_like_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_room, "HELD_BYTES_MAX", 0)
    outcomes: asyncio.Queue[str] = asyncio.Queue()

    async def take(call: ForwardedCall) -> ForwardedAnswer:
        assert call.parcel is not None
        try:
            await call.parcel.fetch()
        except RemoteError as error:
            outcomes.put_nowait(error.code)
        else:
            outcomes.put_nowait("taken")
        await asyncio.Event().wait()
        return await no_answer(call)

    async with answering(take, body_bytes_max=2**20) as port, raw_gateway(port) as gateway:
        frames = gateway.frames()
        for number, outcome in ((1, "taken"), (2, "taken"), (3, "unavailable")):
            gateway.send(gateway.sealer.seal(call(number, parcel=["b" * 64, 1, "00" * 64])))
            async for frame in frames:
                if frame.kind is FrameKind.WANT:
                    break
            gateway.send(gateway.sealer.seal(LinkFrame(FrameKind.GIVEN, number, body=bytes(2**20))))
            assert await outcomes.get() == outcome


async def test_two_calls_of_one_number_end_the_link() -> None:
    async def never(call: ForwardedCall) -> ForwardedAnswer:
        await asyncio.Event().wait()
        return await no_answer(call)

    async with answering(never) as port, raw_gateway(port) as gateway:
        gateway.send(gateway.sealer.seal(call(1), call(1)))
        assert await ended(gateway)


async def test_a_newer_link_takes_the_place_of_the_oldest_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "LINKS_EACH_MAX", 2)
    async with (
        answering(no_answer) as port,
        raw_gateway(port) as oldest,
        raw_gateway(port) as middle,
        raw_gateway(port) as newest,
    ):
        assert await ended(oldest)
        for gateway in (middle, newest):
            gateway.send(gateway.sealer.seal(call(1)))
            async for frame in gateway.frames():
                if frame.kind is FrameKind.ANSWER:
                    break
