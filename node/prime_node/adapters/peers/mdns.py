"""Peers of the same run on the local network, by multicast DNS (zeroconf). Hints only.

Records are those of libp2p's own discovery: a TXT entry `dnsaddr=<multiaddr>/p2p/<key>` for each address. The service's name
holds the beginning of the run's digest, so that two runs in one house do not meet. Anyone on the local network receives them
and can send anything. So a record is an address to try, where the key has to prove itself, and it counts only if it is in a
network that this machine is in. (The library's own class blocks its caller, looks for our address by a route to the internet,
and shows all hosts of a process to each other.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from zeroconf import InterfaceChoice, IPVersion, RecordUpdate, RecordUpdateListener, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.own_addresses import is_next_to_us, own_addresses
from prime_node.patience import cancel_all
from prime_node.ports.peer_network import PeerAddress
from prime_protocol import limits
from prime_protocol.addresses import LOOPBACK, endpoint_of, place_of
from prime_protocol.identity import KeyId

log = logging.getLogger(__name__)

ANSWER_MS_MAX = 3_000
"""Milliseconds to resolve the addresses behind a discovered name."""
CLOSE_S_MAX = 3.0
RECORD_BYTES, TYPE_BYTES = 512, 36
"""Estimates of a record's memory without its texts, and of a number in a list."""


class LocalPeers:
    """Announcer of this peer on the local network, which passes the others to `found`. Used from the event loop."""

    def __init__(self, me: KeyId, run: str, *, found: Callable[[PeerAddress], None]) -> None:
        self._me = me
        self._type = f"_pn-{run[:10]}._udp.local."
        self._found = found
        self.responder: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self.asking: set[asyncio.Task[None]] = set()
        self._telling: asyncio.Future[None] | None = None
        """Task in which the library repeats our own announcement for a while."""
        self._closing: asyncio.Task[None] | None = None
        self._only_here = False
        """Whether this peer listens on loopback alone, and so looks for peers there alone."""
        self._heard_since_s = -limits.PEER_HINTS_S_MAX
        self._heard_of: set[KeyId] = set()
        """Peers discovered since then."""

    async def start(self, listening: Sequence[str]) -> None:
        """Announce this peer and look for others.

        `listening` are the multiaddrs on which this peer listens. A network without multicast costs a log line.
        """
        addresses = local_addresses(listening)
        if not addresses:
            return
        self._closing = None
        inner = [address.split("/")[2] for address in addresses]
        self._only_here = all(host.startswith("127.") for host in inner)
        try:
            self.responder = AsyncZeroconf(
                interfaces=["127.0.0.1"] if self._only_here else InterfaceChoice.Default, ip_version=IPVersion.V4Only
            )
            service = AsyncServiceInfo(
                self._type,
                f"{self._me}.{self._type}",
                port=int(addresses[0].split("/")[4]),
                properties={
                    f"dnsaddr{number or ''}": f"{address}/p2p/{self._me}" for number, address in enumerate(addresses)
                },
                server=f"{self._me}.local.",
                parsed_addresses=inner,
            )
            # A name is a key, so it is unique: no need to probe first.
            self._telling = asyncio.ensure_future(
                await self.responder.async_register_service(service, cooperating_responders=True)
            )
            self.responder.zeroconf.async_add_listener(_Flood(self._give_up), None)
            self._browser = AsyncServiceBrowser(self.responder.zeroconf, self._type, handlers=[self._heard])
        except Exception as error:  # noqa: BLE001 - zeroconf and the system raise many kinds; only hints are lost
            log.info("the search for peers on the local network is off: %s", error or type(error).__name__)
            faults.note(log, "searching peers on the local network", error)
            await self.close()

    async def close(self) -> None:
        """Send the goodbye. No task is left when it returns. Idempotent: a second caller waits for the same end."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        """Close the browser first, since each name that it receives starts a look-up."""
        browser, self._browser = self._browser, None
        zeroconf, self.responder = self.responder, None
        telling, self._telling = self._telling, None
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                if browser is not None:
                    await browser.async_cancel()
                await cancel_all(*self.asking, *([] if telling is None else [telling]))
                if zeroconf is not None:
                    await zeroconf.async_close()
        except Exception as error:  # noqa: BLE001 - a goodbye that is not delivered is no fault
            faults.note(log, "local network", error)

    def _give_up(self, num_bytes: int) -> None:
        """Stop listening after a flood: the library keeps every record that it receives for as long as its sender wants."""
        log.warning(
            "the local network announces %d KiB of records, which is a flood; the search for peers there stops",
            num_bytes // 1_024,
        )
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    def _heard(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """Handle a received name.

        A record with its address, as honest peers send it, is taken at once, so names that lead nowhere delay only each
        other.
        """
        if self._closing is not None or state_change is ServiceStateChange.Removed:
            return
        try:
            service = AsyncServiceInfo(self._type, name)
            if service.load_from_cache(zeroconf):
                self._take(service)
                return
        except Exception as error:  # noqa: BLE001 - the name is a stranger's, and the library raises many kinds
            faults.note(log, "a name on the local network", error)
            return
        if len(self.asking) < limits.PEER_HINTS_MAX:
            task = asyncio.get_running_loop().create_task(self._look_up(zeroconf, service))
            self.asking.add(task)
            task.add_done_callback(self.asking.discard)

    async def _look_up(self, zeroconf: Zeroconf, service: AsyncServiceInfo) -> None:
        try:
            if await service.async_request(zeroconf, ANSWER_MS_MAX):
                self._take(service)
        except Exception as error:  # noqa: BLE001 - the edge of the task, and the library raises many kinds
            faults.note(log, "resolving a peer on the local network", error)

    def _take(self, service: AsyncServiceInfo) -> None:
        for record in read_records(service.properties):
            near = tuple(one for one in record.addresses if self._is_near(one))
            if near and record.peer != self._me and self._has_room(record.peer):
                log.info("peer %s is on the local network, at %s", record.peer, ", ".join(near))
                self._found(PeerAddress(record.peer, near))

    def _is_near(self, address: str) -> bool:
        """Return whether an address is in our own network, and no service of our own machine.

        So a sender can only name machines that it could reach itself.
        """
        end = endpoint_of(address)
        if end is None or place_of(end.host) is None or ":" in end.host:
            return False
        return place_of(end.host) == LOOPBACK if self._only_here else is_next_to_us(end.host)

    def _has_room(self, peer: KeyId) -> bool:
        """Return whether one more peer is within PEER_HINTS_MAX in PEER_HINTS_S_MAX.

        So a flood neither fills the log nor permanently crowds out the others.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s - self._heard_since_s >= limits.PEER_HINTS_S_MAX:
            self._heard_since_s = now_s
            self._heard_of.clear()
        if peer not in self._heard_of and len(self._heard_of) >= limits.PEER_HINTS_MAX:
            return False
        self._heard_of.add(peer)
        return True


class _Flood(RecordUpdateListener):
    """Detector of too many remembered records. It reports once."""

    def __init__(self, give_up: Callable[[int], None]) -> None:
        self._give_up = give_up
        self._heard_bytes = 0
        self._is_over = False

    def async_update_records(self, zc: Zeroconf, now: float, records: list[RecordUpdate]) -> None:
        self._heard_bytes += sum(_memory_of(update.new) for update in records)
        if self._is_over or self._heard_bytes < limits.LAN_BYTES_MAX // 4:
            return
        self._heard_bytes = 0  # adding up all records takes a while
        names = zc.cache.names()
        num_bytes = sum(_memory_of(record) for name in names for record in zc.cache.entries_with_name(name))
        if num_bytes > limits.LAN_BYTES_MAX:
            self._is_over = True
            self._give_up(num_bytes)


def _memory_of(record: object) -> int:
    """Estimate a record's memory in bytes: its texts, its list of types, and its names."""
    return RECORD_BYTES + len(getattr(record, "text", b"")) + TYPE_BYTES * len(getattr(record, "rdtypes", ()))


def read_records(records: dict[bytes, bytes | None]) -> tuple[PeerAddress, ...]:
    """Return the peer that a TXT record names, with its valid addresses: one peer at most, none if the record is invalid."""
    by_peer: dict[KeyId, list[str]] = {}
    for name, value in records.items():
        text = (value or b"").decode("ascii", "replace")
        if not name.startswith(b"dnsaddr") or len(text) > limits.PEER_ADDRESS_CHARS_MAX:
            continue
        try:
            parsed = PeerAddress.parse(text)
        except ValueError:
            continue
        by_peer.setdefault(parsed.peer, []).extend(parsed.addresses)
    if len(by_peer) != 1:
        return ()
    [(peer, addresses)] = by_peer.items()
    return (PeerAddress(peer, tuple(addresses[: limits.PEER_ADDRESSES_MAX])),)


def local_addresses(listening: Sequence[str]) -> tuple[str, ...]:
    """Return where others on the local network reach what listens there.

    Example: /ip4/0.0.0.0/tcp/4001 is /ip4/192.168.1.7/tcp/4001.
    """
    hosts = own_addresses()
    found: list[str] = []
    for address in listening:
        _, kind, host, *rest = address.split("/")
        if kind == "ip4" and rest[:1] == ["tcp"]:
            found += [f"/ip4/{one}/tcp/{rest[1]}" for one in (hosts if host == "0.0.0.0" else [host])]
    return tuple(dict.fromkeys(found))[: limits.PEER_ADDRESSES_MAX]
