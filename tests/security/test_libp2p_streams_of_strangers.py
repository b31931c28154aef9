"""A stranger's link cannot open streams without a limit, whatever protocol they are for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
import trio.testing
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.peerinfo import PeerInfo
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux import yamux as library
from multiaddr import Multiaddr
from tests.node.libp2p_world import on_trio, on_virtual_trio, sessions

from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_node.adapters.peers.libp2p_noise import SMALL_RECORDS, SMALL_RECORDS_S, Noise
from prime_node.adapters.peers.libp2p_streams import AskingStream, Streams
from prime_node.adapters.peers.libp2p_yamux import SMALL_BYTES, SMALL_FRAMES, SMALL_S, Yamux
from prime_protocol import limits
from prime_protocol.identity import SigningKey
from prime_protocol.peer_frames import REPLY_HEADER_BYTES, pack_answer, pack_request, parse_reply_header

PROTOCOL = "/library/1"
HEADER = library.struct.Struct(library.YAMUX_HEADER_FORMAT)
MANY = 3 * limits.PEER_STREAMS_MAX


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[IHost, IHost]]:
    """A stranger with the library's own host, linked to a host of ours."""
    ours, stranger = make_host(SigningKey(bytes([1]) * 32), PeerSettings()), new_host()
    async with ours.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]), stranger.run([]):
        await stranger.connect(PeerInfo(ours.get_id(), ours.get_transport_addrs()))
        yield stranger, ours
        for one, other in ((stranger, ours), (ours, stranger)):
            await one.get_network().close_peer(other.get_id())


async def send(link: library.Yamux, flags: int, name: int, body: bytes = b"") -> None:
    """Send a frame over a link of the library, between its own."""
    kind = library.TYPE_DATA if body else library.TYPE_WINDOW_UPDATE
    async with link._write_lock:
        await link.secured_conn.write(HEADER.pack(0, kind, flags, name, len(body)) + body)


@on_trio
async def test_the_other_side_opens_a_bounded_number_of_streams_and_more_once_some_have_ended() -> None:
    dialled, listened = await sessions(Noise, Noise)
    link = Yamux(listened, listened.get_remote_peer(), is_initiator=False)
    answers: dict[int, list[int]] = {}

    async def read() -> None:
        with suppress(IOException):
            while True:
                _, _, flags, name, _ = HEADER.unpack(await dialled.read(HEADER.size))
                answers.setdefault(flags, []).append(name)

    async def write(flags: int, names: range) -> None:
        for name in names:
            await dialled.write(HEADER.pack(0, library.TYPE_WINDOW_UPDATE, flags, name, 0))

    async def until(flags: int, number: int) -> None:
        while len(answers.get(flags, ())) < number:
            await trio.lowlevel.checkpoint()

    async def accept() -> None:
        with suppress(MuxedConnUnavailable):
            while True:
                await link.accept_stream()

    first, last = range(1, 2 * MANY, 2), range(1_001, 1_001 + 20, 2)
    async with trio.open_nursery() as nursery:
        for task in (link.start, read, accept):
            nursery.start_soon(task)
        await write(library.FLAG_SYN, first)
        await until(library.FLAG_RST, MANY - limits.PEER_STREAMS_MAX)
        assert answers[library.FLAG_ACK] == list(first)[: limits.PEER_STREAMS_MAX]
        assert answers[library.FLAG_RST] == list(first)[limits.PEER_STREAMS_MAX :]
        assert len(link.streams) == limits.PEER_STREAMS_MAX
        await write(library.FLAG_RST, first[: len(last)])
        await write(library.FLAG_SYN, last)
        await until(library.FLAG_ACK, limits.PEER_STREAMS_MAX + len(last))
        assert len(link.streams) == limits.PEER_STREAMS_MAX
        await write(library.FLAG_SYN, range(2, 3))  # a number of our own streams
        await link.event_closed.wait()
        nursery.cancel_scope.cancel()


@on_trio
async def test_streams_that_are_reset_at_once_start_a_bounded_number_of_handlers() -> None:
    running = 0

    async def work_on(stream: INetStream) -> None:
        nonlocal running
        running += 1
        await trio.sleep_forever()

    async with linked() as (stranger, ours):
        ours.set_stream_handler(PROTOCOL, work_on)
        refused = 0
        for _ in range(MANY):
            try:
                stream = await stranger.new_stream(ours.get_id(), [PROTOCOL])
                await stream.reset()
            except (StreamFailure, StreamError):
                refused += 1
        assert running == limits.PEER_STREAMS_MAX
        assert refused == MANY - running


@on_trio
async def test_requests_that_are_too_long_wait_for_their_refusals() -> None:
    """Before, each of them began a task: nine bytes of a stranger cost 3 kB, without a bound."""

    async def answer(peer: str, payload: bytes) -> bytes:
        return payload

    async with linked() as (stranger, ours), trio.open_nursery() as nursery:
        Streams(ours, nursery).serve(PROTOCOL, answer, request_bytes_max=0)
        stream = await stranger.new_stream(ours.get_id(), [PROTOCOL])
        num_tasks = trio.lowlevel.current_statistics().tasks_living
        await stream.write(b"".join(pack_request(number, b"x") for number in range(5_000)))
        for number in range(3):
            header = parse_reply_header(await _read(stream, REPLY_HEADER_BYTES))
            await _read(stream, header.num_bytes)
            assert (header.number, header.refused) == (number, True)
        assert trio.lowlevel.current_statistics().tasks_living < num_tasks + 50
        await stream.reset()


class _Answering:
    """A stream to a peer that has sent these bytes at once, and sends no more."""

    missing_bytes = 0
    is_read = False

    def __init__(self, data: bytes) -> None:
        self.muxed_stream, self._data = self, data

    async def read(self, num_bytes: int) -> bytes:
        if not self._data:
            self.is_read = True
            await trio.sleep_forever()
        data, self._data = self._data[:num_bytes], self._data[num_bytes:]
        return data


@on_trio
async def test_replies_to_no_request_leave_the_thread_to_other_links() -> None:
    """Before, a megabyte of them took the thread for seconds."""
    replies = b"".join(pack_answer(number, b"") for number in range(500))
    stream, turns = _Answering(replies), 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AskingStream(stream, "peer").read_replies)
        while not stream.is_read:
            await trio.lowlevel.checkpoint()
            turns += 1
        assert turns > 400
        nursery.cancel_scope.cancel()


async def _read(stream: INetStream, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += await stream.read(num_bytes - len(data))
    return data


@on_trio
async def test_streams_that_both_sides_have_finished_with_do_not_count() -> None:
    async def read_to_the_end(stream: INetStream) -> None:
        with pytest.raises(StreamError):
            await stream.read(1)  # and leaves its own half open, as the library's handlers do

    async with linked() as (stranger, ours):
        ours.set_stream_handler(PROTOCOL, read_to_the_end)
        for _ in range(MANY):
            stream = await stranger.new_stream(ours.get_id(), [PROTOCOL])
            await stream.close()


@pytest.mark.parametrize("opens", [False, True])
@on_trio
async def test_bytes_to_streams_that_were_never_open_or_have_ended_cut_the_link(opens: bool) -> None:
    """Before, a stranger could send frames of 64 KiB to stream 999 at any rate, and kept its link."""
    body = bytes(2**15)
    async with linked() as (stranger, ours):
        link = stranger.get_network().get_connections(ours.get_id())[0].muxed_conn
        [connection] = ours.get_network().get_connections(stranger.get_id())
        name, sent = link.next_stream_id + 100, 0
        if opens:
            for flag in (library.FLAG_SYN, library.FLAG_RST):
                await send(link, flag, name)
        with suppress(IOException):
            while not connection.muxed_conn.event_closed.is_set():
                before = connection.muxed_conn.credit
                await send(link, 0, name, body)
                sent += len(body)
                while connection.muxed_conn.credit == before and not connection.muxed_conn.event_closed.is_set():
                    await trio.lowlevel.checkpoint()
        assert connection.muxed_conn.credit >= 0
        windows = sent / library.DEFAULT_WINDOW_SIZE
        assert 1 <= windows < 10 if opens else windows < 1


@on_trio
async def test_what_was_on_its_way_to_a_stream_that_we_reset_or_refuse_cuts_no_link() -> None:
    body = bytes(library.DEFAULT_WINDOW_SIZE)  # and no name of a protocol
    async with linked() as (stranger, ours):
        link = stranger.get_network().get_connections(ours.get_id())[0].muxed_conn
        [connection] = ours.get_network().get_connections(stranger.get_id())
        first = link.next_stream_id + 100
        for name in range(first, first + 2 * MANY, 2):
            await send(link, library.FLAG_SYN, name)
        for name in range(first, first + 2 * MANY, 2):
            await send(link, 0, name, body)
        while connection.muxed_conn.credit >= 8 * len(body):  # those of the library's own streams are left
            await trio.lowlevel.checkpoint()
        assert not connection.muxed_conn.event_shutting_down.is_set()


@on_virtual_trio
async def test_small_frames_are_processed_at_a_bounded_rate() -> None:
    """Before, one link that sent bare headers at 14 Mbit/s delayed the answers to all other links by half a second."""
    _, listened = await sessions(Noise, Noise)
    for frame, turns in (
        (HEADER.pack(0, library.TYPE_WINDOW_UPDATE, 0, 998, 1), 8),
        (HEADER.pack(0, library.TYPE_DATA, 0, 998, 1) + b"x", 8),
        (HEADER.pack(0, library.TYPE_DATA, 0, 998, SMALL_BYTES) + bytes(SMALL_BYTES), 0),
    ):
        link = Yamux(listened, listened.get_remote_peer(), is_initiator=False)
        link.next_stream_id, link.credit = 1_000, 2**30  # stream 998 has ended
        began_s = trio.current_time()
        await link.take_in(9 * SMALL_FRAMES * frame)
        assert trio.current_time() - began_s == pytest.approx(turns * SMALL_S)


@pytest.mark.parametrize("content", [b"", b"x"])
@on_virtual_trio
async def test_small_records_are_opened_at_a_bounded_rate(content: bytes) -> None:
    """Before, empty records, which no stream's window bounds, took 74 % of a core at 5 MB/s."""
    dialled, listened = await sessions(Noise, Noise)
    sealed = [dialled.cipher.encrypt(part) for part in (*9 * SMALL_RECORDS * [content], b"the end")]
    records = b"".join(len(one).to_bytes(2, "big") + one for one in sealed)
    began_s, num_bytes = trio.current_time(), 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialled.raw.write, records)
        while num_bytes < 9 * SMALL_RECORDS * len(content) + len(b"the end"):
            num_bytes += len(await listened.read())
    assert trio.current_time() - began_s == pytest.approx(8 * SMALL_RECORDS_S)
