#!/usr/bin/env python3
"""Reachability through each kind of NAT, and its delay: real peers in network namespaces (root, iproute2, nftables).

    python scripts/bench/nat.py [--quick] [--json]

Every place runs a process with the libp2p adapter. One public place is bootstrap, relay and dial-back for the others. Measured:
each peer's finding about its own reachability, and its delay; for each pair of kinds whether the link is direct, relayed or
missing, and the time of `connect`; then a street of homes, all pairs, at the same time and 40 ms apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import Check, Output, at_least

sys.path.insert(0, str(Path(__file__).resolve().parent))
from homes import Place, internet, missing

from prime_lab.homes import NatKind

PUBLIC, HOME, SYMMETRIC, CARRIER = NatKind

PORT = 4001
RUN = "a" * 64
FOUND_S_MAX = 40.0
PAIRS = (
    (HOME, HOME), (PUBLIC, HOME), (HOME, PUBLIC), (HOME, SYMMETRIC), (SYMMETRIC, SYMMETRIC),
    (CARRIER, HOME), (CARRIER, CARRIER),
)  # fmt: skip
ROUND_TRIP_MS = 40.0


# A peer, in a process of its own: commands as JSON lines on stdin, answers on stdout


async def be_a_peer(settings: dict[str, Any]) -> None:
    from prime_node.adapters.peers.libp2p_host import PeerSettings
    from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
    from prime_node.ports.peer_network import PeerAddress
    from prime_node.ports.transport import Unreachable
    from prime_protocol.errors import RemoteError
    from prime_protocol.identity import SigningKey

    async def echo(asker: str, payload: bytes) -> bytes:
        return payload

    network = Libp2pNetwork(
        SigningKey(bytes([settings["number"] + 1]) * 32),
        run=RUN,
        settings=PeerSettings(
            listen=(f"/ip4/0.0.0.0/tcp/{PORT}",),
            bootstrap=tuple(PeerAddress(peer, tuple(addresses)) for peer, addresses in settings["bootstrap"]),
            relay=settings["relay"],
            private=settings["private"],
        ),
    )
    network.serve("echo", echo, request_bytes_max=2**20)
    await network.start()
    print(json.dumps({"peer": network.peer_id}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        answer: dict[str, Any] = {}
        started_s = time.monotonic()
        try:
            if command["do"] == "connect":
                link = await network.connect(
                    PeerAddress(command["peer"], tuple(command["addresses"])), timeout_s=command["wait_s"]
                )
                answer = {"direct": link.is_direct}
            elif command["do"] == "ask":
                sent = b"x" * command["bytes"]
                got = await network.request(command["peer"], "echo", sent, timeout_s=20.0, reply_bytes_max=2**20)
                answer = {"whole": got == sent}
        except (RemoteError, Unreachable) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer |= {"s": time.monotonic() - started_s, "reach": network.reachability(), "addresses": network.addresses()}
        answer |= {"links": {link.peer: link.is_direct for link in network.connected()}, "punched": network.punched()}
        print(json.dumps(answer), flush=True)
    await network.close()


@dataclass
class Peer:
    """The parent's hold on such a process."""

    place: Place
    process: asyncio.subprocess.Process
    peer: str = ""

    async def do(self, what: str, **more: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 90.0)
        if not line:
            raise RuntimeError(f"the peer at {self.place.namespace} ended with {await self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def found(self) -> tuple[dict[str, Any], float]:
        """Return its finding about its own reachability, and the seconds until then."""
        started_s = time.monotonic()
        while True:
            status = await self.do("status")
            waited_s = time.monotonic() - started_s
            if status["reach"] != "unknown" or waited_s > FOUND_S_MAX:
                return status, waited_s
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def peers(places: Sequence[Place], *, private: Sequence[int] = ()) -> AsyncIterator[list[Peer]]:
    """A process at each place; the first one is everybody's bootstrap peer and relay."""
    made: list[Peer] = []
    try:
        for number, place in enumerate(places):
            hub = [[made[0].peer, [f"/ip4/{places[0].outer}/tcp/{PORT}"]]] if made else []
            settings = {"number": number, "relay": not made, "bootstrap": hub, "private": number in private}
            process = await asyncio.create_subprocess_exec(
                *place.command(sys.executable, __file__, "--peer", json.dumps(settings)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            peer = Peer(place, process)
            made.append(peer)
            if number == 0:
                peer.peer = (await peer.answer())["peer"]
        for peer in made[1:]:
            peer.peer = (await peer.answer())["peer"]
        yield made
    finally:
        for peer in made:
            with contextlib.suppress(ProcessLookupError):
                peer.process.kill()
            await peer.process.wait()


async def pair(kinds: tuple[NatKind, NatKind], *, wait_s: float = 45.0) -> dict[str, Any]:
    """One hub and two peers: what each finds out, and the result of a link from the first to the second."""
    with internet([PUBLIC, *kinds]) as places:
        async with peers(places) as (hub, caller, called):
            (status, found_s), (goal, _) = await asyncio.gather(caller.found(), called.found())
            linked = await caller.do("connect", peer=called.peer, addresses=goal["addresses"], wait_s=wait_s)
            echoed = await caller.do("ask", peer=called.peer, bytes=100_000 if linked.get("direct") else 1_000)
            from_hub = await caller.do("ask", peer=hub.peer, bytes=100_000)
    link = "none" if "error" in linked else "direct" if linked["direct"] else "relayed"
    return {
        "caller": kinds[0],
        "called": kinds[1],
        "caller_finds": status["reach"],
        "called_finds": goal["reach"],
        "found_s": round(found_s, 2),
        "link": link,
        "connect_s": round(linked["s"], 2),
        "punched": linked["punched"],
        "echo": echoed.get("whole", False),
        "echo_of_hub": from_hub.get("whole", False),
    }


async def street_of(homes: int, private: int, *, round_trip_ms: float = 0.0) -> dict[str, Any]:
    """Many homes, all pairs at once; the last ones are private."""
    with internet([PUBLIC, *[HOME] * (homes + private)], round_trip_ms=round_trip_ms) as places:
        hidden = range(homes + 1, homes + private + 1)
        async with peers(places, private=hidden) as everybody:
            open_ones, closed = everybody[1 : homes + 1], everybody[homes + 1 :]
            found = await asyncio.gather(*(peer.found() for peer in open_ones))
            where = {peer.peer: status["addresses"] for peer, (status, _) in zip(open_ones, found, strict=True)}
            started_s = time.monotonic()

            async def call_all(number: int, peer: Peer) -> list[float]:
                took = []
                for other in open_ones[number + 1 :]:
                    linked = await peer.do("connect", peer=other.peer, addresses=where[other.peer], wait_s=45.0)
                    took.append(linked["s"])
                return took

            took = await asyncio.gather(*(call_all(number, peer) for number, peer in enumerate(open_ones)))
            all_s = time.monotonic() - started_s
            states = [await peer.do("status") for peer in open_ones]
            hub = everybody[0].peer
            direct = sum(state["links"].get(other.peer, False) for state in states for other in open_ones)
            secluded = [await peer.do("ask", peer=hub, bytes=1_000) for peer in closed]
    num_pairs = homes * (homes - 1) // 2
    connect_s = sorted(itertools.chain(*took))
    return {
        "homes": homes,
        "round_trip_ms": round_trip_ms,
        "pairs": num_pairs,
        "direct": direct // 2,
        "all_pairs_s": round(all_s, 2),
        "connect_s_median": round(statistics.median(connect_s), 2),
        "connect_s_max": round(connect_s[-1], 2),
        "private": private,
        "private_fetches": sum(answer.get("whole", False) for answer in secluded),
        "private_announces": sum(len(answer["addresses"]) for answer in secluded),
    }


async def measure(quick: bool) -> tuple[list[dict[str, Any]], list[Check]]:
    """Return one row for each pair and street, and the checks."""
    kinds = PAIRS[:2] if quick else PAIRS
    rows = [await pair(kind) for kind in kinds]
    street = await street_of(3 if quick else 6, 1)
    apart = [] if quick else [await street_of(6, 1, round_trip_ms=ROUND_TRIP_MS)]
    by_kinds = {(row["caller"], row["called"]): row for row in rows}
    checks = [
        ("two homes end up with a direct link", by_kinds[HOME, HOME]["link"] == "direct"),
        ("a home finds out that it needs a relay", by_kinds[HOME, HOME]["called_finds"] == "relayed"),
        ("an open peer finds out that it is open", by_kinds[PUBLIC, HOME]["caller_finds"] == "public"),
        ("an open peer reaches a home directly", by_kinds[PUBLIC, HOME]["link"] == "direct"),
        ("all pairs of a street of homes are direct", street["direct"] == street["pairs"]),
        *((f"and {ROUND_TRIP_MS:.0f} ms apart", far["direct"] == far["pairs"]) for far in apart),
        *(
            (f"{caller} and {called} end up with a direct link", row["link"] == "direct")
            for (caller, called), row in by_kinds.items()
            if CARRIER in (caller, called)
        ),
        (
            "a private peer fetches and announces nothing",
            street["private_fetches"] == 1 and street["private_announces"] == 0,
        ),
    ]
    return [*rows, street, *apart], [at_least(name, int(ok), 1) for name, ok in checks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs of kinds and three homes, below a minute")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        asyncio.run(be_a_peer(json.loads(arguments.peer)))
        return 0
    if why := missing():
        print(f"nat.py {why}", file=sys.stderr)
        return 2
    output = Output(as_json=arguments.json)
    rows, checks = asyncio.run(measure(arguments.quick))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    return output.finish(checks)


if __name__ == "__main__":
    sys.exit(main())
