"""A hostile local network with multicast DNS: floods, huge names, loops of pointers, foreign addresses, other peers' keys.

The packets are real ones, on loopback: the multicast group of this machine alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.time_world import until

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

from tests.security.dials import noted_dials

from prime_node.adapters.peers.libp2p_host import PeerSettings
from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
from prime_node.adapters.peers.mdns import LocalPeers
from prime_node.ports.peer_network import PeerAddress
from prime_protocol import limits
from prime_protocol.identity import SigningKey

ANNA, BEN, CORA = (SigningKey(bytes([140 + number]) * 32) for number in range(3))
pytestmark = pytest.mark.xdist_group("mdns")  # one multicast group for the whole machine
GROUP = ("224.0.0.251", 5353)
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
TXT, PTR, SRV, NSEC, A, IN = 16, 12, 33, 47, 1, 1
FOREIGN = (
    *(
        "169.254.169.254",
        "8.8.8.8",
        "192.0.2.1",
        "10.1.1.1",
        "192.168.77.77",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
    ),
    *("100.64.0.1", "172.31.9.9"),
)


@pytest.fixture
def sender() -> Iterator[socket.socket]:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
    made.bind(("127.0.0.1", 0))
    yield made
    made.close()


@contextlib.asynccontextmanager
async def network(key: SigningKey, run: str) -> AsyncIterator[Libp2pNetwork]:
    made = Libp2pNetwork(key, run=run, settings=PeerSettings(listen=LISTEN, lan=True))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def name(*labels: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"


def record(owner: bytes, kind: int, data: bytes, ttl: int = 4_500) -> bytes:
    return owner + struct.pack("!HHIH", kind, IN, ttl, len(data)) + data


def response(*records: bytes) -> bytes:
    return struct.pack("!HHHHHH", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


def service(run: str) -> tuple[str, ...]:
    return (f"_pn-{run[:10]}", "_udp", "local")


def announcement(run: str, key_id: str, *addresses: str, instance: str = "") -> bytes:
    """Return what a peer of the run would send."""
    owner = name(instance or key_id, *service(run))
    texts = [f"dnsaddr{number or ''}={address}/p2p/{key_id}".encode() for number, address in enumerate(addresses)]
    texts = [text for text in texts if len(text) < 256]
    return response(
        record(name(*service(run)), PTR, owner),
        record(owner, SRV, struct.pack("!HHH", 0, 0, 4001) + name(key_id, "local")),
        record(owner, TXT, b"".join(bytes([len(text)]) + text for text in texts)),
        record(name(key_id, "local"), A, socket.inet_aton("127.0.0.1")),
    )


def stranger(number: int) -> str:
    return SigningKey(b"\x07" + number.to_bytes(31, "big")).key_id


def broken(run: str) -> Iterator[bytes]:
    """Return packets that must not break the parser."""
    rng = random.Random(1)
    owner = name(*service(run))
    loop = struct.pack("!HHHHHH", 0, 0x8400, 0, 1, 0, 0)
    yield loop + b"\xc0\x0c" + struct.pack("!HHIH", PTR, IN, 100, 2) + b"\xc0\x0c"  # a pointer to itself
    yield loop + b"\xc0\x0e\xc0\x0c" + struct.pack("!HHIH", PTR, IN, 100, 2) + b"\xc0\x0c"  # two to each other
    yield loop + b"\xff\xff" + struct.pack("!HHIH", PTR, IN, 100, 2) + b"\xff\xff"  # beyond the end
    yield (
        loop + b"".join(b"\x3f" + b"a" * 63 for _ in range(100)) + b"\0" + struct.pack("!HHIH", PTR, IN, 100, 1) + b"\0"
    )
    yield response(record(owner, PTR, b"\x3f" + b"x" * 62))  # a label that is cut
    yield response(record(owner, TXT, b"\xff" + b"x" * 10))
    yield response(record(owner, SRV, b"\0"))
    yield response(record(owner, PTR, name("\x1b[31m\u202e" + "n" * 40, *service(run))))
    yield struct.pack("!HHHHHH", 0, 0x8400, 65_535, 65_535, 65_535, 65_535)
    yield b""
    for _ in range(300):
        yield rng.randbytes(rng.randrange(1, 1_400))
    whole = bytearray(announcement(run, stranger(0), "/ip4/127.0.0.1/tcp/1"))
    for _ in range(300):
        spoilt = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        yield bytes(spoilt)


async def test_broken_answers_hold_up_nobody(sender: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    run = os.urandom(32).hex()
    async with network(ANNA, run) as anna:
        for packet in broken(run):
            sender.sendto(packet, GROUP)
            await asyncio.sleep(0)
        async with network(BEN, run) as ben:
            await until(lambda: BEN.key_id in {one.peer for one in anna.known()})
            assert (await anna.connect(PeerAddress(BEN.key_id, ben.addresses()))).is_direct
    assert not [record for record in caplog.records if record.name.startswith("prime_node") and record.exc_info]
    assert not [record for record in caplog.records if "\x1b" in record.getMessage() or "\u202e" in record.getMessage()]


async def test_foreign_addresses_and_other_peoples_keys_are_not_even_remembered(sender: socket.socket) -> None:
    run = os.urandom(32).hex()
    async with network(ANNA, run) as anna, network(BEN, run) as ben:
        await until(lambda: BEN.key_id in {one.peer for one in anna.known()})
        with noted_dials() as dials:
            for number, host in enumerate(FOREIGN):
                sender.sendto(announcement(run, stranger(number), f"/ip4/{host}/tcp/80"), GROUP)
            sender.sendto(
                announcement(run, stranger(50), "/dns4/victim.example/tcp/80", "/ip4/127.0.0.1/udp/9/quic-v1"), GROUP
            )
            sender.sendto(announcement(run, ANNA.key_id, "/ip4/127.0.0.1/tcp/9", instance="me"), GROUP)
            sender.sendto(announcement(run, CORA.key_id, "/ip4/127.0.0.1/tcp/9"), GROUP)  # not where CORA is
            await until(lambda: CORA.key_id in {one.peer for one in anna.known()})
            assert {one.peer for one in anna.known()} == {BEN.key_id, CORA.key_id}
            assert {one.addresses for one in anna.known() if one.peer == BEN.key_id} == {ben.addresses()}
        assert not [dial for dial in dials if dial[0] not in ("127.0.0.1", GROUP[0])], "hearing is not dialling"


async def test_the_handshake_detects_a_borrowed_key(sender: socket.socket) -> None:
    run = os.urandom(32).hex()
    async with network(ANNA, run) as anna, network(BEN, run) as ben:
        sender.sendto(announcement(run, CORA.key_id, ben.addresses()[0]), GROUP)
        await until(lambda: CORA.key_id in {one.peer for one in anna.known()})
        [lie] = [one for one in anna.known() if one.peer == CORA.key_id]
        with pytest.raises(Exception, match="no peer with this key answers"):
            await anna.connect(lie)


async def test_a_flood_of_names_leaves_few_behind_and_ends_the_search_not_the_machine(
    sender: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prime_protocol.limits.LAN_BYTES_MAX", 2**18)
    run = os.urandom(32).hex()
    found: list[PeerAddress] = []
    local = LocalPeers(ANNA.key_id, run, found=found.append)
    await local.start(["/ip4/127.0.0.1/tcp/4001"])
    try:
        for number in range(600):
            sender.sendto(announcement(run, stranger(number), "/ip4/127.0.0.1/tcp/9"), GROUP)
            await asyncio.sleep(0)
        await until(lambda: local.responder is None)
    finally:
        await local.close()
    assert 0 < len({one.peer for one in found}) <= limits.PEER_HINTS_MAX
    assert "a flood; the search for peers there stops" in caplog.text


@pytest.mark.parametrize("is_text", [True, False], ids=["texts", "lists of types"])
async def test_a_flood_of_records_under_one_name_ends_the_search(
    sender: socket.socket, monkeypatch: pytest.MonkeyPatch, is_text: bool
) -> None:
    """Before, only names counted: 10,000 records of 9 kB under one name took 90 MB."""
    monkeypatch.setattr("prime_protocol.limits.LAN_BYTES_MAX", 2**18)
    run = os.urandom(32).hex()
    local = LocalPeers(ANNA.key_id, run, found=lambda address: None)
    await local.start(["/ip4/127.0.0.1/tcp/4001"])
    try:
        for number in range(200):
            owner = name(stranger(0), *service(run))
            texts = b"".join(b"\xff%255d" % (100 * number + part) for part in range(30))
            types = name(f"next{number}", "local") + b"".join(
                bytes([window, 32]) + b"\xff" * 32 for window in range(100)
            )
            sender.sendto(response(record(owner, TXT, texts) if is_text else record(owner, NSEC, types)), GROUP)
            await asyncio.sleep(0)
        await until(lambda: local.responder is None)
    finally:
        await local.close()


async def test_names_that_lead_nowhere_delay_no_peer_with_an_address(sender: socket.socket) -> None:
    """A look-up takes seconds, and the number of concurrent ones is bounded."""
    run = os.urandom(32).hex()
    async with network(ANNA, run) as anna:
        for number in range(4 * limits.PEER_HINTS_MAX):
            owner = name(f"nobody{number}", *service(run))
            sender.sendto(response(record(name(*service(run)), PTR, owner)), GROUP)
            await asyncio.sleep(0)
        async with network(BEN, run):
            await until(lambda: BEN.key_id in {one.peer for one in anna.known()})


async def test_names_that_come_while_the_search_ends_leave_no_task_behind(sender: socket.socket) -> None:
    """Each name that leads nowhere starts a look-up, also during shutdown."""
    run = os.urandom(32).hex()
    before = asyncio.all_tasks()
    local = LocalPeers(ANNA.key_id, run, found=lambda hints: None)
    await local.start(["/ip4/127.0.0.1/tcp/4001"])

    async def keep_telling() -> None:
        number, end_s = 0, asyncio.get_running_loop().time() + 30.0
        while asyncio.get_running_loop().time() < end_s:
            owner = name(f"nobody{number}", *service(run))
            sender.sendto(response(record(name(*service(run)), PTR, owner)), GROUP)
            number += 1
            await asyncio.sleep(0)

    telling = asyncio.create_task(keep_telling())
    await until(lambda: len(local.asking) == limits.PEER_HINTS_MAX)
    await asyncio.gather(local.close(), local.close())
    assert not telling.done(), "names came all the while"
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    assert not local.asking
    assert asyncio.all_tasks() == before
