"""A swarm of any size on a virtual clock: the product's picker, choker and topology over a fluid network.

There is no concurrency. Time advances in strides. In each, transfers advance (fluid.py), and then all due events run in
the order of their time: requests and answers after the delay of both access links, announcements gathered for a moment,
peers that join, leave and lie. The product's own `broadcast/swarm/picker.py`, `choker.py` and `topology.py` make a peer's
decisions (which piece from which peer, whom to serve, whom to connect to). The same seed gives the same run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prime_lab.bittorrent import BitTorrentPicker
from prime_lab.fluid import Fluid
from prime_lab.homes import BYTES_PER_MBIT, Home, can_connect, fluid_bound_s
from prime_lab.simulated_swarm import Result, SimulatedSwarm
from prime_node.broadcast.swarm.choker import Choker, UploadTurn
from prime_node.broadcast.swarm.download import TREE_S_MAX
from prime_node.broadcast.swarm.picker import Picker
from prime_node.broadcast.swarm.topology import Topology, TopologyRules, parents, share_of, topology_for

ORIGIN = 0


@dataclass(slots=True)
class _Request:
    asker: int
    server: int
    piece: int
    transfer: int = -1


@dataclass(slots=True)
class _Node:
    index: int
    home: Home
    name: str
    picker: Picker | BitTorrentPicker
    choker: Choker
    known: list[str] = field(default_factory=list)
    """Peers on its list."""
    neighbours: set[int] = field(default_factory=set)
    """Neighbours in both directions: links carry requests both ways."""
    asked: dict[tuple[int, int], int] = field(default_factory=dict)
    """Request by (server, piece)."""
    updates: int = 0
    """Pieces not announced yet, as a bit mask."""
    done_at_s: float = math.inf
    is_here: bool = False


class Simulation:
    """One broadcast. Create it, then call `run` once."""

    def __init__(self, world: SimulatedSwarm) -> None:
        self._world = world
        self._rng = random.Random(world.seed)
        num_pieces = max(1, math.ceil(world.file_bytes / world.piece_bytes))
        self._sizes = [min(world.piece_bytes, world.file_bytes - n * world.piece_bytes) for n in range(num_pieces)]
        homes = [world.origin, *world.homes]
        self._fluid = Fluid(
            np.array([home.up_mbit * BYTES_PER_MBIT * (1 - home.loss) / (1 + world.overhead) for home in homes]),
            np.array([home.down_mbit * BYTES_PER_MBIT * (1 - home.loss) / (1 + world.overhead) for home in homes]),
        )
        self._topology = topology_for(world.file_bytes, len(world.homes), world.topology)
        self._names = [f"peer-{index}" for index in range(len(homes))]
        self._numbers = {name: index for index, name in enumerate(self._names)}
        self._nodes: list[_Node] = []
        self._stride = 0
        self._now_s = 0.0
        self._due: dict[int, list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]] = {}
        self._delays_ms = [home.delay_ms for home in homes]
        self._turn = 0
        self._requests: dict[int, _Request] = {}
        self._by_transfer: dict[int, int] = {}
        self._next_request = 0
        self._missing = 0
        self._everything = (1 << num_pieces) - 1
        self._missing_of = [self._everything] * len(homes)
        """Pieces that each home lacks, in one list, since every announcement examines some thirty homes."""
        self._present: list[int] = []
        for index, home in enumerate(homes):
            picker = Picker(self._sizes, rng=self._rng)  # until it joins
            choker = Choker(world.choker if index else world.origin_choker)
            self._nodes.append(_Node(index, home, self._names[index], picker, choker))
        self._present = [node.index for node in self._nodes[1:] if node.home.joins_s == 0.0]
        for node in self._nodes[1:]:
            self._missing += self._is_counted(node)
            if node.home.joins_s == 0.0:
                self._get_peer_list(node)
            self._at(node.home.joins_s, self._join, node)
            if node.home.leaves_s < math.inf:
                self._at(node.home.leaves_s, self._leave, node)

    def run(self) -> Result:
        """Run until all peers that stay are done, or until `time_s_max`."""
        world = self._world
        self._happen()
        while self._missing and self._now_s < world.time_s_max:
            began_s = self._now_s
            ended = self._fluid.advance(world.stride_s)
            for number, into_s in [(self._by_transfer.pop(transfer), into_s) for into_s, transfer in ended]:
                self._sent(number, began_s + into_s)
            self._stride += 1
            self._now_s = self._stride * world.stride_s
            self._happen()
        stayed = [node for node in self._nodes[1:] if self._is_counted(node)]
        done_s = tuple(node.done_at_s - node.home.joins_s for node in stayed if node.done_at_s < math.inf)
        sent = float(self._fluid.sent.sum())
        needed = sum(node.picker.have.bit_count() * world.piece_bytes for node in self._nodes[1:])
        on_time = [node.home for node in stayed if not node.home.joins_s]
        return Result(
            done_s,
            self._missing,
            fluid_bound_s(world.file_bytes, world.origin.up_mbit, on_time),
            float(self._fluid.sent[ORIGIN]) / world.file_bytes,
            max(0.0, 1 - needed / max(1.0, sent)),
            self._now_s,
        )

    def _is_counted(self, node: _Node) -> bool:
        return node.home.leaves_s == math.inf and not node.home.is_liar

    # Time

    def _at(self, time_s: float, happens: Callable[..., None], *arguments: Any) -> None:
        stride = max(self._stride, math.ceil(time_s / self._world.stride_s))
        self._turn += 1
        event = time_s, self._turn, happens, arguments
        if stride in self._due:
            self._due[stride].append(event)
        else:
            self._due[stride] = [event]

    def _happen(self) -> None:
        """Run all due events, and those that they cause at once."""
        while due := self._due.pop(self._stride, None):
            due.sort()
            for _, _, happens, arguments in due:
                happens(*arguments)

    def _way_s(self, one: int, other: int) -> float:
        return (self._delays_ms[one] + self._delays_ms[other]) / 1e3

    # Joining and leaving

    def _get_peer_list(self, node: _Node) -> None:
        """Handle the coordinator's answer, which includes the peer's share of the file."""
        world = self._world
        known = self._rng.sample(self._present, min(world.peer_list_max, len(self._present)))
        node.known = [self._names[one] for one in known if one != node.index]
        rng = random.Random(self._rng.getrandbits(64))
        if world.is_bittorrent:
            node.picker = BitTorrentPicker(self._sizes, rng=rng)
        else:
            share = share_of(node.name, node.known, "file")
            node.picker = Picker(self._sizes, rng=rng, rules=world.picker, share=share)
        node.is_here = True

    def _add_origin(self, node: _Node) -> None:
        node.picker.add(self._names[ORIGIN], has=self._everything, is_web_seed=not self._world.origin_is_peer)

    def _join(self, node: _Node) -> None:
        if not node.is_here:
            self._get_peer_list(node)
            self._present.append(node.index)
        if self._topology is Topology.TREE and self._link_to(node, Topology.TREE):
            # A peer with parents asks only them at first, as download.py does.
            self._at(self._now_s + TREE_S_MAX, self._add_origin, node)
        else:
            self._link_to(node, Topology.SWARM)
            self._add_origin(node)
        round_trip_s = 2 * self._way_s(node.index, ORIGIN)
        self._at(self._now_s + self._world.start_round_trips * round_trip_s, self._tick, node)

    def _link_to(self, node: _Node, topology: Topology) -> bool:
        """Link to the wanted neighbours; return False if none can be reached or there is none."""
        rules = self._world.topology
        wanted = neighbours(node.name, node.known, "run", topology=topology, rules=rules, rng=self._rng)
        others = [
            other for other in (self._nodes[self._numbers[name]] for name in wanted) if self._can_link(node, other)
        ]
        for other in others:
            self._link(node, other)
        return bool(others)

    def _can_link(self, one: _Node, other: _Node) -> bool:
        if not other.is_here or not can_connect(one.home.nat, other.home.nat):
            return False
        return not (one.home.is_nat and other.home.is_nat) or self._rng.random() < self._world.punched_share

    def _link(self, one: _Node, other: _Node) -> None:
        if other.index in one.neighbours:
            return
        for node, source in ((one, other), (other, one)):
            node.neighbours.add(source.index)
            node.picker.add(source.name, has=self._everything if source.home.is_liar else source.picker.have)
        self._at(self._now_s + 2 * self._way_s(one.index, other.index), self._ask_each_other, one, other)

    def _ask_each_other(self, one: _Node, other: _Node) -> None:
        self._ask(one, other.index)
        self._ask(other, one.index)

    def _leave(self, node: _Node) -> None:
        index = node.index
        node.is_here = False
        self._present.remove(index)
        for number in [number for number, one in self._requests.items() if index in (one.asker, one.server)]:
            self._drop(number)
        for other in node.neighbours:
            neighbour = self._nodes[other]
            neighbour.neighbours.discard(index)
            neighbour.picker.remove(node.name)
            self._ask_idle(neighbour)
        node.neighbours.clear()

    # Requests

    def _ask(self, node: _Node, server: int) -> None:
        """Send as many requests as the picker wants."""
        if not node.is_here or node.done_at_s < math.inf or (server != ORIGIN and server not in node.neighbours):
            return
        name = self._names[server]
        while (piece := node.picker.pick(name, self._now_s)) is not None:
            number = self._next_request
            self._next_request += 1
            self._requests[number] = _Request(node.index, server, piece)
            node.asked[server, piece] = number
            self._at(self._now_s + self._way_s(node.index, server), self._asked, number)

    def _ask_idle(self, node: _Node) -> None:
        for name in node.picker.idle():
            self._ask(node, self._numbers[name])

    def _tick(self, node: _Node) -> None:
        if node.is_here and node.done_at_s == math.inf:
            self._ask_idle(node)
            self._at(self._now_s + self._world.tick_s, self._tick, node)

    def _asked(self, number: int) -> None:
        """Handle a request that has reached its server."""
        request = self._requests.get(number)
        if request is None:
            return
        server = self._nodes[request.server]
        turn = server.choker.asked(self._names[request.asker], number, self._now_s)
        if turn is UploadTurn.NOW:
            self._serve(number, request)
        elif turn is UploadTurn.REFUSED:
            way_s = self._way_s(request.asker, request.server)
            self._at(self._now_s + way_s, self._refused, number)

    def _refused(self, number: int) -> None:
        request = self._take(number)
        if request is not None and self._nodes[request.asker].is_here:
            asker = self._nodes[request.asker]
            asker.picker.missed(self._names[request.server], request.piece)
            self._at(self._now_s + 0.25, self._ask, asker, request.server)

    def _serve(self, number: int, request: _Request) -> None:
        request.transfer = self._fluid.open(request.server, request.asker, self._sizes[request.piece])
        self._by_transfer[request.transfer] = number

    def _sent(self, number: int, at_s: float) -> None:
        """Handle the last byte leaving the server."""
        request = self._requests[number]
        request.transfer = -1
        self._free_slot(request, self._sizes[request.piece], at_s)
        way_s = self._way_s(request.asker, request.server)
        self._at(at_s + way_s, self._arrived, number, at_s + way_s)

    def _free_slot(self, request: _Request, num_bytes: int, at_s: float) -> None:
        choker = self._nodes[request.server].choker
        following = choker.done(self._names[request.asker], num_bytes, at_s)
        while following is not None:
            waiting = self._requests.get(following)
            if waiting is not None:
                self._serve(following, waiting)
                return
            following = choker.done(self._names[request.asker], 0, at_s)

    def _arrived(self, number: int, at_s: float) -> None:
        request = self._take(number)
        if request is None:
            return
        node, server, piece = self._nodes[request.asker], self._nodes[request.server], request.piece
        if node.done_at_s < math.inf:
            return
        if server.home.is_liar:
            self._block(node, server)
            return
        others = node.picker.arrived(server.name, piece, at_s)
        node.choker.gave(server.name, self._sizes[piece], at_s)
        if others:
            self._cancel(node, piece, others)
        if not node.updates:
            self._at(at_s + self._world.announce_s + 2 * node.home.delay_ms / 1e3, self._announce, node)
        node.updates |= 1 << piece
        self._missing_of[node.index] = node.picker.missing
        if node.picker.is_done:
            node.done_at_s = at_s
            self._missing -= self._is_counted(node)
        else:
            self._ask(node, request.server)

    def _block(self, node: _Node, liar: _Node) -> None:
        """End the link to a peer that sent wrong bytes."""
        for one, other in ((node, liar), (liar, node)):
            for number in [asked for (server, _), asked in one.asked.items() if server == other.index]:
                self._drop(number)
            one.neighbours.discard(other.index)
            one.picker.remove(other.name)
            self._ask_idle(one)

    def _cancel(self, node: _Node, piece: int, others: tuple[str, ...]) -> None:
        for name in others:
            server = self._numbers[name]
            number = node.asked[server, piece]
            self._at(self._now_s + self._way_s(node.index, server), self._drop, number)
            self._at(self._now_s, self._ask, node, server)

    def _take(self, number: int) -> _Request | None:
        """Remove and return a finished request; None if it was already over."""
        request = self._requests.pop(number, None)
        if request is not None:
            key = request.server, request.piece
            if self._nodes[request.asker].asked.get(key) == number:
                del self._nodes[request.asker].asked[key]
        return request

    def _drop(self, number: int) -> None:
        """End a request without its answer: cancelled, or one side has left."""
        request = self._take(number)
        if request is None:
            return
        server = self._nodes[request.server]
        if request.transfer >= 0:
            del self._by_transfer[request.transfer]
            left = self._fluid.cut(request.transfer)
            self._free_slot(request, int(self._sizes[request.piece] - left), self._now_s)
        else:
            server.choker.withdrawn(self._names[request.asker], number)

    def _announce(self, node: _Node) -> None:
        """Announce new pieces to all neighbours at the same time, which saves more than it distorts."""
        updates, node.updates = node.updates, 0
        if not node.is_here:
            return
        for index in node.neighbours:
            if not updates & self._missing_of[index]:
                continue  # a peer needs no announcement of pieces that it has
            other = self._nodes[index]
            other.picker.has(node.name, updates)
            if updates & other.picker.unasked:
                self._ask(other, node.index)


def neighbours(
    me: str, peers: Collection[str], run: str, *, topology: Topology, rules: TopologyRules, rng: random.Random
) -> list[str]:
    """Return the peers to ask for a file."""
    if topology is Topology.TREE:
        return parents(me, peers, run, rules)
    others = sorted(set(peers) - {me})
    return others if len(others) <= rules.neighbours_max else rng.sample(others, rules.neighbours_max)
