"""Addresses from signed and unsigned lists: which ones are listed, dialled and forwarded, and to which callers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, TRAINER, make_run

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.noted_resolver import HOSTS_MAX, NotedResolver
from prime_node.broadcast.swarm.directory import Directory
from prime_node.cli import wire_swarm
from prime_node.coordinator.api.peer_discovery import announced_from
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.web import Request
from prime_protocol.addresses import GLOBAL, LOOPBACK, endpoint_of, may_be_named, place_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.peers import PeerList, PeerRecord
from prime_protocol.replies import PeersReply
from prime_protocol.requests import PeersRequest

RUN = make_run()
NOWHERE = (
    *(
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd20:ce::254",
    ),
    *(
        "0.0.0.0",
        "0.1.2.3",
        "255.255.255.255",
        "240.0.0.1",
        "224.0.0.1",
        "239.1.1.1",
        "ff02::1",
        "::",
        "fe80::1",
        "fe80::1%1",
    ),
    *(
        "2002:7f00:1::1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2001::1",
        "::127.0.0.1",
        "::ffff:0:127.0.0.1",
        "192.88.99.1",
    ),
    *(
        "::ffff:169.254.169.254",
        "fec0::1",
        "100::1",
        "localhost",
        "example.org",
        "010.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "",
    ),
)
INSIDE = {
    "10.1.2.3": "10.0.0.0/8",
    "172.31.0.1": "172.16.0.0/12",
    "192.168.1.7": "192.168.0.0/16",
    "100.64.0.1": "100.64.0.0/10",
    "169.254.1.1": "169.254.0.0/16",
    "192.0.2.1": "192.0.2.0/24",
    "203.0.113.9": "203.0.113.0/24",
    "198.18.0.1": "198.18.0.0/15",
    "2001:db8::1": "2001:db8::/32",
    "fd12:3456:789a::1": "fd12:3456:789a::/48",
    "127.0.0.1": LOOPBACK,
    "127.8.8.8": LOOPBACK,
    "::1": LOOPBACK,
    "::ffff:127.0.0.1": LOOPBACK,
    "::ffff:10.1.2.3": "10.0.0.0/8",
}


@pytest.mark.parametrize("host", NOWHERE)
def test_addresses_that_lead_nowhere_are_told_to_nobody(host: str) -> None:
    assert place_of(host) is None
    assert not any(may_be_named(host, between=(asker,)) for asker in ("8.8.8.8", "127.0.0.1", "10.0.0.1", host))


@pytest.mark.parametrize(("host", "place"), INSIDE.items())
def test_an_address_that_is_not_of_the_internet_is_named_only_inside_its_network(host: str, place: str) -> None:
    assert place_of(host) == place
    assert may_be_named(host, between=(host,))
    assert may_be_named(host, between=("127.0.0.1",)), "whoever asks over loopback is on this machine"
    assert not may_be_named(host, between=("8.8.8.8",))
    assert not may_be_named(host, between=())
    assert not may_be_named(host, between=(host, "8.8.8.8")), "a name that led elsewhere too (DNS rebinding)"


@pytest.mark.parametrize("host", ["8.8.8.8", "2606:4700::1111", "100.63.255.255", "11.0.0.1", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_sent_to_every_peer(host: str) -> None:
    assert place_of(host) == GLOBAL
    assert may_be_named(host, between=())


@pytest.mark.parametrize(
    "address",
    [
        *(
            "/dns4/victim.example/tcp/80",
            "/dnsaddr/x/tcp/1",
            "/ip4/1.2.3.4/udp/1",
            "/ip4/1.2.3.4/tcp/1/ws",
            "/ip4/1.2.3.4/tcp/0",
        ),
        *(
            "/ip4/1.2.3.4/tcp/65536",
            "/ip4/1.2.3.4/tcp/+80",
            "/ip4/1.2.3.4/tcp/٨٠",
            "/ip6/1.2.3.4/tcp/80",
            "/ip4/::1/tcp/80",
        ),
        *(
            "/ip4/1.2.3.4/tcp/80/p2p/x",
            "/ip6zone/eth0/ip6/fe80::1/tcp/80",
            "http://victim.example:80",
            "http://1.2.3.4:99999",
        ),
        *("https://1.2.3.4:80", "http://1.2.3.4", "http://[::1", "/unix/x", "", "/", "//////"),
    ],
)
def test_what_is_no_tcp_port_at_an_ip_address_is_no_address(address: str) -> None:
    assert endpoint_of(address) is None


class Finder:
    """Fake of ports.swarm.PeerFinder."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = frozenset(hosts)

    async def find_peers(self, request: PeersRequest) -> PeersReply:
        raise AssertionError("nobody asks here")


def signed(*records: PeerRecord) -> str:
    listed = PeerList(run=RUN.digest, issued_at_ms=1, peers=records)
    return seal(listed, PayloadType.PEER_LIST, COORDINATOR).to_bytes().decode()


def directory(*hosts: str) -> Directory:
    return Directory(RUN, ANNA, Finder(*hosts), clock=SystemClock(), rng=random.Random(1))


NEIGHBOURS = (
    "http://192.168.1.1:80",
    "http://127.0.0.1:22",
    "http://10.0.0.1:443",
    "http://169.254.169.254:80",
    "http://[::1]:22",
)


@pytest.mark.parametrize("hosts", [("8.8.8.8",), (), ("8.8.8.8", "192.168.1.50"), ("192.168.1.50", "")])
def test_a_hostile_coordinator_cannot_send_its_members_to_their_own_networks(hosts: tuple[str, ...]) -> None:
    """The list is correctly signed. A name that resolves to a private address from time to time is refused, too."""
    mine = directory(*hosts)
    mine.take_in(
        signed(PeerRecord(peer=BEN.key_id, urls=NEIGHBOURS, addresses=("/ip4/192.168.1.1/tcp/80", "/dns4/x/tcp/80")))
    )
    assert BEN.key_id not in mine.records
    assert not [url for url in NEIGHBOURS if mine.may_dial(url)]
    mine.take_in(signed(PeerRecord(peer=BEN.key_id, urls=(*NEIGHBOURS, "http://9.9.9.9:80"))))
    assert mine.records[BEN.key_id].urls == ("http://9.9.9.9:80",)


def test_a_coordinator_in_the_house_names_machines_of_the_house() -> None:
    mine = directory("192.168.1.50")
    mine.take_in(signed(PeerRecord(peer=BEN.key_id, urls=NEIGHBOURS)))
    assert mine.records[BEN.key_id].urls == ("http://192.168.1.1:80",)


def test_a_list_with_inner_addresses_is_passed_on_inside_only() -> None:
    mine = directory("192.168.1.50")
    mine.take_in(signed(PeerRecord(peer=BEN.key_id, urls=("http://192.168.1.7:80", "http://9.9.9.9:80"))))
    assert mine.list_for("192.168.1.9") is not None
    assert [mine.list_for(asker) for asker in ("9.9.9.9", "10.0.0.1", TRAINER.key_id, "")] == [None] * 4
    public = directory("8.8.8.8")
    public.take_in(signed(PeerRecord(peer=BEN.key_id, urls=("http://9.9.9.9:80",))))
    assert public.list_for("9.9.9.9") == public.list_for("192.168.1.9") != None  # noqa: E711 - all three are compared


async def test_every_address_that_a_name_led_to_is_remembered_and_too_many_count_as_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str] = []

    async def resolve(self: object, host: str, port: int = 0, family: object = None) -> list[dict[str, str]]:
        return [{"host": answers[-1]}]

    monkeypatch.setattr("aiohttp.resolver.ThreadedResolver.resolve", resolve)
    resolver = NotedResolver("evil.example")
    for number in range(HOSTS_MAX + 5):
        answers.append(f"192.168.1.{number}")
        await resolver.resolve("evil.example")
    assert not may_be_named("192.168.1.1", between=resolver.hosts)


@pytest.mark.parametrize(
    ("remote", "header", "found"),
    [
        ("10.0.0.5", None, "10.0.0.5"),
        ("10.0.0.5", "203.0.113.7", ""),  # a proxy that the settings do not name: its own address would be dialled
        ("10.0.0.5", "10.0.0.5, 203.0.113.7", ""),  # forged in front
        ("203.0.113.7", "198.51.100.1, 203.0.113.7", "203.0.113.7"),  # named, so that the caller's address counts
        ("203.0.113.7", "203.0.113.7:4711, 172.16.0.1", "203.0.113.7"),  # two of them
    ],
)
def test_behind_a_proxy_that_is_not_named_nothing_is_announced(remote: str, header: str | None, found: str) -> None:
    headers = {} if header is None else {"x-forwarded-for": header}
    proxies = CoordinatorConfig.load({"coordinator": {"proxies": ["172.16.0.1"]}}).behind
    assert announced_from(proxies, Request(params={}, body=b"", headers=headers, remote=remote)) == found


@pytest.mark.parametrize(
    "address", ["/dns4/me.example/tcp/4001", "/ip4/169.254.169.254/tcp/80", "/ip4/1.2.3.4/udp/4001/quic-v1"]
)
def test_settings_that_no_peer_could_follow_are_refused_with_an_example(address: str, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"swarm\.p2p_announce.*write for example /ip4/"):
        wire_swarm.require_tcp("swarm.p2p_announce", (address,))
