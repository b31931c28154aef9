"""The patches of docs/upstream apply to the installed libraries, and change what they say."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from tests.source_tree import ROOT

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
import trio.testing
from libp2p import new_host
from libp2p.io.exceptions import IncompleteReadError
from libp2p.io.trio import TrioTCPStream
from libp2p.network import auto_connector
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer import id as peer_id
from libp2p.peer.id import ID
from libp2p.security.noise import io as noise_io
from libp2p.security.noise.transport import Transport
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.yamux import yamux as library
from tests.node.libp2p_world import sessions

from prime_node.adapters.peers.libp2p_noise import Noise

PATCHES = ROOT / "docs" / "upstream"
QUIET_S = 0.1
"""Time without a step of any task after which none of them polls: the library does each 0.01 s."""


def patched(path: str, module: ModuleType, folder: Path, patch: str) -> ModuleType:
    """Return a module of its own from a patched copy of the source at `path`."""
    copy = folder / path
    copy.parent.mkdir(parents=True)
    shutil.copy(str(module.__file__), copy)
    subprocess.run(["git", "apply", str(PATCHES / patch)], cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location("patched_copy", copy)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


async def waits_quietly(muxers: ModuleType) -> bool:
    """Return whether nothing runs while a writer waits for its window. All bytes arrive in any case."""
    sent = bytes(3 * library.DEFAULT_WINDOW_SIZE)
    dialled, listened = await sessions(Noise, Noise)
    one = muxers.Yamux(dialled, dialled.get_remote_peer(), is_initiator=True)
    other = muxers.Yamux(listened, listened.get_remote_peer(), is_initiator=False)
    async with trio.open_nursery() as nursery:
        for end in (one, other):
            nursery.start_soon(end.start)
            await end.event_started.wait()
        opened = await one.open_stream()
        accepted = await other.accept_stream()
        nursery.start_soon(opened.write, sent)
        while opened.send_window:
            await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1.0) as waiting:
            await trio.testing.wait_all_tasks_blocked(cushion=QUIET_S)
        received = b""
        while len(received) < len(sent):
            received += await accepted.read(len(sent) - len(received))
        assert received == sent
        nursery.cancel_scope.cancel()
    return not waiting.cancelled_caught


def test_a_yamux_writer_without_credit_is_woken_and_does_not_poll(tmp_path: Path) -> None:
    path = "libp2p/stream_muxer/yamux/yamux.py"
    made = patched(path, library, tmp_path, "yamux-window.patch")
    assert trio.run(waits_quietly, made)
    assert not trio.run(waits_quietly, library), "this release has the change: drop the patch"


class Counted(RawConnection):
    """A connection that counts its reads."""

    num_reads = 0

    async def read(self, n: int | None = None) -> bytes:
        self.num_reads += 1
        return await super().read(n)


async def reads_of(packets: ModuleType) -> int:
    """Return how often the connection is read for 50 packets that have all arrived."""
    one, other = trio.testing.memory_stream_pair()
    dialled, listened = await library_sessions()
    sender, receiver = RawConnection(TrioTCPStream(one), True), Counted(TrioTCPStream(other), False)
    writing = packets.NoiseTransportReadWriter(sender, dialled.conn.noise_state)
    reading = packets.NoiseTransportReadWriter(receiver, listened.conn.noise_state)
    sent = [bytes([number]) * (number + 1) for number in range(50)]
    for one_packet in sent:
        await writing.write_msg(one_packet)
    assert [await reading.read_msg() for _ in sent] == sent
    num_reads = receiver.num_reads
    await sender.close()
    with pytest.raises(IncompleteReadError):
        await reading.read_msg()
    return num_reads


async def library_sessions() -> tuple[SecureSession, SecureSession]:
    dialled, listened = await sessions(Transport, Transport)
    assert isinstance(dialled, SecureSession)
    assert isinstance(listened, SecureSession)
    return dialled, listened


def test_noise_reads_all_packets_that_have_arrived_at_once(tmp_path: Path) -> None:
    made = patched("libp2p/security/noise/io.py", noise_io, tmp_path, "noise-buffered-reads.patch")
    assert trio.run(reads_of, made) == 1
    assert trio.run(reads_of, noise_io) >= 100, "this release has the change: drop the patch"


async def holds_more_than_it_granted(muxers: ModuleType) -> bool:
    """Return whether a link keeps what its peer sends beyond the credit. Otherwise the link ends."""
    dialled, listened = await sessions(Noise, Noise)
    one = muxers.Yamux(dialled, dialled.get_remote_peer(), is_initiator=True)
    other = library.Yamux(listened, listened.get_remote_peer(), is_initiator=False)
    async with trio.open_nursery() as nursery:
        for end in (one, other):
            nursery.start_soon(end.start)
            await end.event_started.wait()
        opened = await one.open_stream()
        await other.accept_stream()
        too_much = library.DEFAULT_WINDOW_SIZE + 1
        header = library.struct.pack(library.YAMUX_HEADER_FORMAT, 0, library.TYPE_DATA, 0, opened.stream_id, too_much)
        nursery.start_soon(listened.write, header + bytes(too_much))
        while not one.event_shutting_down.is_set() and len(one.stream_buffers[opened.stream_id]) < too_much:
            await trio.lowlevel.checkpoint()
        holds = not one.event_shutting_down.is_set()
        nursery.cancel_scope.cancel()
    return holds


def test_a_yamux_link_ends_when_its_peer_sends_beyond_its_credit(tmp_path: Path) -> None:
    path = "libp2p/stream_muxer/yamux/yamux.py"
    made = patched(path, library, tmp_path, "yamux-credit.patch")
    assert trio.run(waits_quietly, library) is trio.run(waits_quietly, made), "within the credit all bytes arrive"
    assert not trio.run(holds_more_than_it_granted, made)
    assert trio.run(holds_more_than_it_granted, library), "this release has the change: drop the patch"


def test_both_yamux_patches_apply_together(tmp_path: Path) -> None:
    path = "libp2p/stream_muxer/yamux/yamux.py"
    patched(path, library, tmp_path, "yamux-window.patch")
    subprocess.run(["git", "apply", str(PATCHES / "yamux-credit.patch")], cwd=tmp_path, check=True)


def test_a_peer_id_of_any_length_is_refused(tmp_path: Path) -> None:
    made = patched("libp2p/peer/id.py", peer_id, tmp_path, "peer-id-length.patch")
    assert made.ID(bytes(42)).to_bytes() == bytes(42)
    with pytest.raises(ValueError, match="peer id"):
        made.ID(bytes(65))
    source = Path(
        str(peer_id.__file__)
    ).read_text()  # the class itself has our bound, once the host's module is imported
    assert "MAX_PEER_ID_LENGTH" not in source, "this release has the change: drop the patch"


async def looks_for_peers(connectors: ModuleType) -> bool:
    """Return whether a connector looks for peers to dial where the settings ask for none."""
    looked = False

    class Looking(connectors.AutoConnector):  # type: ignore[name-defined]
        async def _get_candidate_peers(self) -> list[ID]:
            nonlocal looked
            looked = True
            return []

    settings = ConnectionConfig(min_connections=0, low_watermark=0, high_watermark=100)
    connector = Looking(new_host(connection_config=settings).get_network())
    await connector.start()
    await connector.maybe_connect()
    await connector.stop()
    return looked


def test_a_connector_without_a_low_watermark_dials_no_peer(tmp_path: Path) -> None:
    made = patched("libp2p/network/auto_connector.py", auto_connector, tmp_path, "auto-connector-off.patch")
    assert not trio.run(looks_for_peers, made)
    assert trio.run(looks_for_peers, auto_connector), "this release has the change: drop the patch"
