"""Choice of peers to connect to: a tree for small files, a swarm for large ones. Pure, and the same at every peer.

A small file is done after a few round trips. In a mesh of a thousand peers most of these go to the origin, which then sends
it hundreds of times. So the smallest files go to very many peers down a tree, in which every peer has a parent and a spare
one. All others spread in a mesh of random neighbours, where each uplink carries as much as it can.

Neither needs messages: peers are sorted by the digest of their names and a salt, so all compute the same order. The tree's
salt is the run, so its connections last from one delta to the next; a file's shares are salted with the file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from prime_protocol.digest import digest_of


class Topology(StrEnum):
    """Way in which a file is distributed."""

    TREE = "tree"
    SWARM = "swarm"


@dataclass(frozen=True, slots=True)
class TopologyRules:
    """Settings of the topology."""

    tree_bytes_max: int = 2**16
    """Size above which files spread in a swarm.

    With 1,000 homes the two are equal here (scripts/bench/swarm_sim.py --crossing).
    """
    tree_peers_min: int = 512
    """Number of peers below which a swarm is always used. With 100 homes it was faster at every size."""
    fan_out: int = 4
    """Children of a peer in the tree."""
    neighbours_max: int = 32
    """Peers that a receiver connects to in the swarm."""


def topology_for(sent_bytes: int, num_peers: int, rules: TopologyRules) -> Topology:
    """Return the topology for a file of `sent_bytes` among `num_peers`."""
    is_tree = sent_bytes <= rules.tree_bytes_max and num_peers >= rules.tree_peers_min
    return Topology.TREE if is_tree else Topology.SWARM


def order_of(peers: Collection[str], salt: str) -> list[str]:
    """Return the peers in the order that all peers compute."""
    return sorted(peers, key=lambda peer: digest_of(f"{salt}/{peer}".encode()))


def parents(me: str, peers: Collection[str], run: str, rules: TopologyRules) -> list[str]:
    """Return the peers that `me` asks in the tree: its parent, and the parent's parent as a spare. The root asks the origin."""
    order = order_of({*peers, me}, run)
    place = order.index(me)
    found: list[str] = []
    while place > 0 and len(found) < 2:
        place = (place - 1) // rules.fan_out
        found.append(order[place])
    return found


def share_of(me: str, peers: Collection[str], file: str) -> tuple[float, float]:
    """Return the part of a file, from 0 to 1, that a peer asks the origin for first. The parts of two peers do not overlap."""
    order = order_of({*peers, me}, file)
    place = order.index(me)
    return place / len(order), (place + 1) / len(order)
