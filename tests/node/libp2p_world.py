"""Shared parts of the tests of libp2p's connections."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
import trio.testing
from libp2p.abc import ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport

Test = Callable[..., Awaitable[None]]

ANNA, BEN = create_new_key_pair(b"a" * 32), create_new_key_pair(b"b" * 32)


def on_trio(test: Test) -> Callable[..., None]:
    """Run a test in a trio loop, for at most 20 seconds."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        async def bounded() -> None:
            with trio.fail_after(20):
                await test(**arguments)

        trio.run(bounded)

    return run


def on_virtual_trio(test: Test) -> Callable[..., None]:
    """Run a test in a trio loop whose time passes only in waits."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        bound = functools.partial(test, **arguments)
        trio.run(bound, clock=trio.testing.MockClock(autojump_threshold=0))

    return run


class Dripping(TrioTCPStream):
    """Gives at most a packet's worth of bytes at a time."""

    async def read(self, n: int | None = None) -> bytes:
        return await super().read(min(n or 1_448, 1_448))


async def sessions(dialler: type[Transport], listener: type[Transport]) -> tuple[ISecureConn, ISecureConn]:
    one, other = trio.testing.memory_stream_pair()
    made: dict[str, ISecureConn] = {}

    async def keep(name: str, handshake: Awaitable[ISecureConn]) -> None:
        made[name] = await handshake

    async with trio.open_nursery() as nursery:
        dial = dialler(ANNA, noise_privkey=create_noise_key_pair().private_key)
        listen = listener(BEN, noise_privkey=create_noise_key_pair().private_key)
        peer = ID.from_pubkey(BEN.public_key)
        nursery.start_soon(keep, "dial", dial.secure_outbound(RawConnection(Dripping(one), True), peer))
        nursery.start_soon(keep, "listen", listen.secure_inbound(RawConnection(Dripping(other), False)))
    return made["dial"], made["listen"]
