"""A stolen gateway, which knows the secret of the link, spoils neither the bundles of others nor the state of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.node.coordinator_world import ANNA, BEN, VALIDATOR, make_parcel, make_run, memory_parts, running
from tests.node.gateway_world import LISTENS, hearing
from tests.node.link_world import answering, linked, no_answer, raw_gateway

from prime_node.adapters.link.sealed_frames import FrameKind, LinkFrame
from prime_node.adapters.storage.folder_blobs import FolderBlobs
from prime_node.ports.writer_link import ForwardedCall, HeldParcel
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.parcel import open_parcel


async def test_a_gateway_cannot_replace_the_bundle_of_another_worker(tmp_path: Any) -> None:
    """Before, the writer stored any bytes under any digest that a gateway named: it destroyed bundles that were accepted."""
    parts, server = hearing(replace(memory_parts(make_run(), **LISTENS), bundles=FolderBlobs(tmp_path)))
    async with running(parts) as world, linked(server.port, world.run.digest) as link:
        await world.publish()
        await world.join(ANNA, BEN)
        honest = make_parcel(await world.lease(ANNA), ANNA)
        bundle = (await world.client(ANNA).upload(honest)).bundle
        opened = open_parcel(make_parcel(await world.lease(BEN), BEN), body_bytes_max=10**9)

        async def other_bytes() -> bytes:
            return b"nothing of value"

        async def same_bytes() -> bytes:
            return honest

        async def nothing() -> bytes:  # the bundle is in the shared storage
            return b""

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
