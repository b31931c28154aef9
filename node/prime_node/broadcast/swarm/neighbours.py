"""The peers that this machine is linked to, as sources of its pool.

Waiting: `run` keeps as many links as the topology wants and chooses among the directory's records. Each link has a task that
reads the peer's notifications and ends with it. An unreachable peer rests. A peer that sent a wrong byte is not linked again
while this process runs, and its notifications are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from prime_node.broadcast.swarm.directory import Directory
from prime_node.broadcast.swarm.piece_sets import span, spans
from prime_node.broadcast.swarm.sources import NamedSource, SourceKind, SourcePool
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.broadcast.swarm.topology import Topology, TopologyRules, parents, share_of, topology_for
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.patience import RateLimit, cancel_all, first_of
from prime_node.ports.clock import Clock
from prime_node.ports.swarm import PeerLink
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.errors import RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.peers import PeerRecord, PeerUpdate
from prime_protocol.requests import PeersRequest

log = logging.getLogger(__name__)

REST_S_MIN, REST_S_MAX = 1.0, 300.0
LOOK_S = 1.0
"""Seconds between checks for links to make."""
AT_ONCE_MAX, SLOW_S = 8, 3.0
"""Links being made at the same time, and seconds after which one no longer counts. Dozens at once, of each newcomer, made
handshakes and holes time out on a busy machine, and be tried again."""
LINE_MS = 100
"""Shortest mean time between two notifications of a link, in milliseconds. An honest peer sends no more."""
RUNS_PER_MS, PIECES_PER_MS = 4, 10_000
"""Work of a notification: a full line of runs takes 2 s, and a set of CHUNKS_MAX pieces 0.1 s, whatever the peer sends."""

Connect = Callable[[PeerRecord], PeerLink | None]
"""Function that makes a link without waiting; it returns None if the record names no address that this machine can dial."""


@dataclass(slots=True)
class _Rest:
    failures: int = 0
    until_s: float = 0.0


class Neighbours:
    """The current links: the PeerEvents and the DownloadPlan of the pool's peers. Used from the event loop only."""

    def __init__(
        self,
        directory: Directory,
        pool: SourcePool,
        connect: Connect,
        uplink: Uplink,
        swarm_tasks: SwarmTasks,
        *,
        clock: Clock,
        rng: random.Random,
        rules: TopologyRules | None = None,
    ) -> None:
        """Link to peers of `directory` and add them to `pool`. Peers that give bytes are served first by `uplink`."""
        self.blocklist: dict[KeyId, str] = {}
        """Peers that sent wrong bytes, and what was wrong."""
        self._directory = directory
        self._pool = pool
        self._connect = connect
        self._uplink = uplink
        self._swarm_tasks = swarm_tasks
        self._clock = clock
        self._rng = rng
        self._rules = rules or TopologyRules()
        self._links: dict[KeyId, PeerLink] = {}
        self._tasks: dict[KeyId, asyncio.Task[None]] = {}
        self._rests: dict[KeyId, _Rest] = {}
        self._begun_s: dict[KeyId, float] = {}
        """Times at which links were begun from which nothing has come yet."""
        self._wake = asyncio.Event()

    @property
    def linked(self) -> tuple[KeyId, ...]:
        """Linked peers whose notifications have been received."""
        return tuple(named.name for named in self._pool.peers if named.name in self._links)

    def links(self) -> list[PeerLink]:
        """Return the links to the peers in `linked`."""
        return [self._links[peer] for peer in self.linked]

    def named_links(self) -> list[tuple[KeyId, PeerLink]]:
        """Return the peers in `linked` with their links."""
        return [(peer, self._links[peer]) for peer in self.linked]

    async def run(self, offer_of: Callable[[], PeersRequest]) -> None:
        """Keep links until cancelled, then close them. `offer_of` returns what the directory asks with."""
        try:
            await first_of(self._directory.run(self.links, self._wake.set, offer_of=offer_of), self._keep_linking())
        finally:
            await cancel_all(*self._tasks.values())

    async def _keep_linking(self) -> NoReturn:
        while True:
            self.link_more()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()

    def link_more(self) -> None:
        """Begin a link to each chosen peer that has none."""
        now_s = self._clock.monotonic_s()
        waiting = {
            peer: record
            for peer, record in self._directory.candidates.items()
            if peer not in self._tasks
            and peer not in self.blocklist
            and self._rests.get(peer, _Rest()).until_s <= now_s
        }
        above = parents(self._directory.me, self._directory.records, self._directory.run_digest, self._rules)
        first = [waiting.pop(peer) for peer in above if peer in waiting]
        num_begun = sum(now_s - begun_s < SLOW_S for begun_s in self._begun_s.values())
        room = min(AT_ONCE_MAX - num_begun, self._rules.neighbours_max - len(self._tasks))
        others = self._rng.sample(list(waiting.values()), len(waiting)) if room > 0 else []
        for record in [*first, *others]:
            if room <= 0 and record not in first:
                break
            link = self._connect(record)
            if link is not None:
                room -= 1
                self._links[record.peer], self._begun_s[record.peer] = link, now_s
                self._tasks[record.peer] = asyncio.create_task(self._listen(record.peer, link))

    async def _listen(self, peer: KeyId, link: PeerLink) -> None:
        """Run one link from its first notification to its last."""
        named = NamedSource(peer, link, SourceKind.PEER, events=self)
        pace = RateLimit(1_000.0, self._clock)  # in milliseconds of `_work_ms`
        try:
            async for updates in link.updates():
                self._heard(named, updates)
                self._rests.pop(peer, None)
                if self._begun_s.pop(peer, None) is not None:
                    self._wake.set()
                self._pool.add(named)
                await pace.take(_work_ms(updates))  # further lines wait unread
        except (RemoteError, Unreachable) as error:
            self._rest(peer, error)
        except Exception as error:  # noqa: BLE001 - the edge of the task; nothing awaits it
            self._swarm_tasks.note(f"the link to peer {peer}", error)
            self._rest(peer, error)
        finally:
            self._pool.remove(peer)
            self._links.pop(peer, None)
            self._tasks.pop(peer, None)
            if self._begun_s.pop(peer, None) is not None:
                self._wake.set()
            await link.close()

    def _heard(self, named: NamedSource, updates: PeerUpdate) -> None:
        """Store what a peer announced. PeerUpdate has checked the runs."""
        for name, ranges in updates.pieces.items():
            held = named.has.pop(name, 0)
            named.has[name] = held | spans(ranges)
        while len(named.has) > limits.PEER_UPDATE_ENCODINGS_MAX:
            del named.has[next(iter(named.has))]
        named.head = max(named.head, updates.head)

    def _rest(self, peer: KeyId, error: Exception) -> None:
        rest = self._rests.setdefault(peer, _Rest())
        rest.failures += 1
        pause_s = min(REST_S_MAX, REST_S_MIN * 2 ** min(rest.failures - 1, 10)) * self._rng.uniform(0.5, 1.0)
        rest.until_s = self._clock.monotonic_s() + pause_s
        log.info("peer %s: %s; connecting again in %.0f s at the earliest", peer, error, pause_s)

    # PeerEvents

    def gave(self, named: NamedSource, num_bytes: int) -> None:
        """Record verified bytes: the uplink serves this peer before those that gave none."""
        self._uplink.gave(named.name, num_bytes)

    def lied(self, named: NamedSource, error: RemoteError) -> None:
        """Drop a peer that sent wrong bytes, until this process ends."""
        log.warning("peer %s sent wrong bytes (%s); it is not used again", named.name, error.detail)
        self.blocklist[named.name] = error.detail
        task = self._tasks.get(named.name)
        if task is not None:
            task.cancel()
        self._pool.remove(named.name)

    # DownloadPlan

    async def prepare(self) -> None:
        """Prepare all links. A link that fails here fails again when it is used, and is handled then."""
        for error in await asyncio.gather(*(link.prepare() for link in self.links()), return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, RemoteError | Unreachable | OSError):
                self._swarm_tasks.note("preparing a link", error)

    def share(self, encoding: str, num_pieces: int) -> tuple[float, float]:
        """Return our share of an encoding, among the listed peers that do not have all of it.

        All peers compute it from nearly the same list.
        """
        whole = span(0, num_pieces)
        done = {named.name for named in self._pool.peers if named.has.get(encoding, 0) == whole}
        return share_of(self._directory.me, self._directory.records.keys() - done, encoding)

    def parents(self, sent_bytes: int) -> frozenset[str] | None:
        """Return our linked parents if an encoding of this size goes down the tree.

        Return None at the tree's root, and in a swarm.
        """
        directory = self._directory
        if topology_for(sent_bytes, len(directory.records) + 1, self._rules) is Topology.SWARM:
            return None
        above = parents(directory.me, directory.records, directory.run_digest, self._rules)
        return frozenset(above).intersection(self.linked) or None


def _work_ms(updates: PeerUpdate) -> int:
    """Return how many milliseconds of a link's time a notification uses."""
    num_runs = sum(map(len, updates.pieces.values()))
    num_pieces = sum(ranges[-1][1] for ranges in updates.pieces.values() if ranges)
    return max(LINE_MS, num_runs // RUNS_PER_MS, num_pieces // PIECES_PER_MS)
