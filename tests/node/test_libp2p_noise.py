"""Our Noise sessions interoperate with the library's, for any sizes in which bytes arrive."""

from __future__ import annotations

import os

import pytest
from tests.node.libp2p_world import on_trio, on_virtual_trio, sessions

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
import trio.testing
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.security.noise.transport import Transport
from noise.exceptions import NoiseInvalidMessage

from prime_node.adapters.peers.libp2p_noise import Noise

SIZES = (1, 12, 65_519, 65_520, 300_000)


@pytest.mark.parametrize(("dialler", "listener"), [(Noise, Transport), (Transport, Noise), (Noise, Noise)])
@on_trio
async def test_bytes_arrive_as_they_were_written(dialler: type[Transport], listener: type[Transport]) -> None:
    dialled, listened = await sessions(dialler, listener)
    for writer, reader in ((dialled, listened), (listened, dialled)):
        for size in SIZES:
            data = os.urandom(size)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.write, data)
                came = await reader.read(size // 2)
                came += await reader.read(size - len(came))
            assert came == data


@on_trio
async def test_a_record_that_was_changed_on_the_way_is_refused() -> None:
    dialled, listened = await sessions(Noise, Noise)
    sealed = bytearray(dialled.cipher.encrypt(b"x" * 100))
    sealed[50] ^= 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialled.raw.write, len(sealed).to_bytes(2, "big") + sealed)
        with pytest.raises(NoiseInvalidMessage):
            await listened.read(100)


@on_trio
async def test_a_cancelled_write_leaves_whole_or_not_at_all() -> None:
    dialled, listened = await sessions(Noise, Noise)
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            scope.cancel()
            await dialled.write(b"x" * 100_000)
        nursery.start_soon(dialled.write, b"and then")
        with trio.fail_after(5):
            assert await listened.read(100_008) == b"x" * 100_000 + b"and then"


@on_virtual_trio
async def test_a_peer_that_takes_nothing_loses_the_link() -> None:
    dialled, _ = await sessions(Noise, Noise)
    dialled.raw.stream.stream.send_stream.send_all_hook = trio.sleep_forever
    with pytest.raises(ConnectionClosedError, match="read nothing"):
        await dialled.write(b"x")
    with pytest.raises(ConnectionClosedError):
        await dialled.read(1)


@on_trio
async def test_the_end_of_the_link_is_reported() -> None:
    dialled, listened = await sessions(Noise, Noise)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialled.write, b"last words")
        assert await listened.read(4) == b"last"
    await dialled.close()
    assert await listened.read(100) == b" words"
    with pytest.raises(ConnectionClosedError):
        await listened.read(1)
