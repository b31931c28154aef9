"""Our yamux interoperates with the library's own, respects its window, and ends a link that violates the protocol."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
import trio.testing
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux import yamux as library
from tests.node.libp2p_world import on_trio, sessions

from prime_node.adapters.peers.libp2p_noise import Noise
from prime_node.adapters.peers.libp2p_yamux import ProtocolError, Stream, Yamux

SIZES = (1, 65_524, 1_000_000)
"""Payload sizes; the last one is four windows."""
WINDOW = library.DEFAULT_WINDOW_SIZE

Muxer = type[library.Yamux]


@asynccontextmanager
async def links(dialler: Muxer, listener: Muxer) -> AsyncIterator[tuple[library.Yamux, library.Yamux]]:
    """The two ends of one link."""
    dialled, listened = await sessions(Noise, Noise)
    one = dialler(dialled, dialled.get_remote_peer(), is_initiator=True)
    other = listener(listened, listened.get_remote_peer(), is_initiator=False)
    async with trio.open_nursery() as nursery:
        for end in (one, other):
            nursery.start_soon(end.start)
            await end.event_started.wait()
        yield one, other
        nursery.cancel_scope.cancel()


async def pair_of_streams(one: library.Yamux, other: library.Yamux) -> tuple[library.YamuxStream, library.YamuxStream]:
    opened = await one.open_stream()
    return opened, await other.accept_stream()


@pytest.mark.parametrize(("dialler", "listener"), [(Yamux, library.Yamux), (library.Yamux, Yamux), (Yamux, Yamux)])
@on_trio
async def test_bytes_arrive_as_they_were_written_and_the_end_is_reported(dialler: Muxer, listener: Muxer) -> None:
    async with links(dialler, listener) as ends:
        opened, accepted = await pair_of_streams(*ends)
        for writer, reader in ((opened, accepted), (accepted, opened)):
            for size in SIZES:
                data, came = os.urandom(size), b""
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(writer.write, data)
                    while len(came) < size:
                        came += await reader.read(size - len(came))
                assert came == data
        await opened.close()
        with pytest.raises(MuxedStreamEOF):
            await accepted.read(1)


@on_trio
async def test_frames_may_be_cut_anywhere() -> None:
    async with links(Yamux, Yamux) as (one, _):
        assert isinstance(one, Yamux)
        header = (0, library.TYPE_DATA, library.FLAG_SYN | library.FLAG_FIN, 2, 5)
        frame = library.struct.pack(library.YAMUX_HEADER_FORMAT, *header) + b"hello"
        for place in range(len(frame)):
            await one.take_in(frame[place : place + 1])
        stream = await one.accept_stream()
        assert await stream.read(10) == b"hello"
        with pytest.raises(MuxedStreamEOF):
            await stream.read(10)


@on_trio
async def test_a_peer_that_sends_more_than_it_has_credit_for_loses_the_link() -> None:
    async with links(Yamux, Yamux) as (one, other):
        opened, accepted = await pair_of_streams(one, other)
        accepted.send_window = 2 * WINDOW  # more than the other side granted
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.event_closed.wait)
            with pytest.raises(MuxedStreamError):  # noqa: PT012 - which of the two meets the end is a race
                await accepted.write(bytes(2 * WINDOW))
                await accepted.write(bytes(1))
        assert len(one.stream_buffers.get(opened.stream_id, b"")) <= WINDOW


@on_trio
async def test_a_stream_that_is_opened_twice_ends_the_link() -> None:
    """Before, each repeated SYN gave the other side a further window, and an answer that reset its stream alone."""
    async with links(Yamux, Yamux) as (one, other):
        assert isinstance(other, Yamux)
        opened, _ = await pair_of_streams(one, other)
        credit = other.credit
        again = (0, library.TYPE_WINDOW_UPDATE, library.FLAG_SYN, opened.stream_id, 0)
        with pytest.raises(ProtocolError, match="is open already"):
            await other.take_in(library.struct.pack(library.YAMUX_HEADER_FORMAT, *again))
        assert other.credit == credit


@on_trio
async def test_a_writer_without_credit_learns_of_the_end_of_its_stream() -> None:
    async with links(Yamux, Yamux) as (one, other):
        opened, accepted = await pair_of_streams(one, other)

        async def write_on() -> None:
            with pytest.raises(MuxedStreamError, match="closed"):
                await opened.write(bytes(2 * WINDOW))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_on)
            while len(other.stream_buffers[accepted.stream_id]) < WINDOW:
                await trio.lowlevel.checkpoint()
            await accepted.reset()
        with pytest.raises(MuxedStreamReset):
            await opened.read(1)


@on_trio
async def test_nothing_follows_a_write_that_was_cut() -> None:
    async with links(Yamux, Yamux) as (one, other):
        opened, accepted = await pair_of_streams(one, other)
        scope = trio.CancelScope()

        async def write() -> None:
            with scope:
                await opened.write(bytes(2 * WINDOW))

        async def write_next() -> None:
            with pytest.raises(MuxedStreamError, match="cut"):
                await opened.write(b"the next frame")

        async with trio.open_nursery() as nursery:
            for task in (write, write_next):
                nursery.start_soon(task)
                await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
        received = 0
        while received < WINDOW:
            received += len(await accepted.read(WINDOW))
        await trio.testing.wait_all_tasks_blocked()
        assert received == WINDOW
        assert not other.stream_buffers[accepted.stream_id]


@pytest.mark.parametrize(("size", "is_cut"), [(5, False), (2 * WINDOW, True)])
@on_trio
async def test_a_cancelled_write_has_sent_nothing_or_says_that_it_was_cut(size: int, is_cut: bool) -> None:
    async with links(Yamux, Yamux) as (one, other):
        opened, accepted = await pair_of_streams(one, other)
        scope = trio.CancelScope()

        async def write() -> None:
            with scope:
                await opened.write(bytes(size))

        async with trio.open_nursery() as nursery:
            if not is_cut:
                await one._write_lock.acquire()  # another stream's turn
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
        assert isinstance(opened, Stream)
        assert opened.is_cut is is_cut
        if not is_cut:
            one._write_lock.release()
            await opened.write(b"whole")
            assert await accepted.read(10) == b"whole"


@pytest.mark.parametrize("frame", [(1, 0, 0, 1, 0), (0, 9, 0, 1, 0), (0, library.TYPE_GO_AWAY, 0, 0, 0)])
@on_trio
async def test_nonsense_and_a_farewell_end_the_link_and_nothing_else(frame: tuple[int, ...]) -> None:
    async with links(Yamux, Yamux) as (one, other):
        opened, _ = await pair_of_streams(one, other)
        assert isinstance(opened, Stream)
        await other.secured_conn.write(library.struct.pack(library.YAMUX_HEADER_FORMAT, *frame))
        with pytest.raises((MuxedStreamEOF, MuxedStreamReset)):
            await opened.read(1)
        await one.event_closed.wait()


@on_trio
async def test_a_cancelled_close_still_closes_the_socket() -> None:
    """Before, a link that was cancelled as it closed kept its socket until the garbage collector found it."""
    async with links(Yamux, Yamux) as (one, _):
        with trio.CancelScope() as scope:
            scope.cancel()
            await one.close()
        assert scope.cancelled_caught
        with pytest.raises(trio.ClosedResourceError):
            await one.secured_conn.raw.stream.stream.send_all(b"x")
