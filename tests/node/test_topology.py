"""Trees and meshes: every node is reached, and every node computes the same."""

from __future__ import annotations

import itertools
import random

import pytest

from prime_lab.network import neighbours
from prime_node.broadcast.swarm.topology import Topology, TopologyRules, parents, share_of, topology_for

RULES = TopologyRules()
PEERS = [f"peer-{number}" for number in range(300)]


def test_small_files_go_down_a_tree_and_large_ones_swarm() -> None:
    assert topology_for(2**10, 1_000, RULES) is Topology.TREE
    assert topology_for(2**26, 1_000, RULES) is Topology.SWARM


def test_few_peers_are_a_swarm_whatever_the_size() -> None:
    assert topology_for(2**10, RULES.tree_peers_min - 1, RULES) is Topology.SWARM


def test_every_parent_leads_to_one_root_in_a_few_hops() -> None:
    roots, deepest = set(), 0
    for peer in PEERS:
        hops = 0
        while above := parents(peer, PEERS, "run", RULES):
            peer, hops = above[0], hops + 1
        roots.add(peer)
        deepest = max(deepest, hops)
    assert len(roots) == 1
    assert deepest <= 5


def test_no_peer_has_more_children_than_the_fan_out() -> None:
    children: dict[str, int] = {}
    for peer in PEERS:
        for parent in parents(peer, PEERS, "run", RULES)[:1]:
            children[parent] = children.get(parent, 0) + 1
    assert max(children.values()) == RULES.fan_out


@pytest.mark.parametrize("topology", list(Topology))
def test_no_peer_is_its_own_neighbour(topology: Topology) -> None:
    for peer in PEERS[:20]:
        found = neighbours(peer, PEERS, "run", topology=topology, rules=RULES, rng=random.Random(1))
        assert peer not in found
        assert len(found) == len(set(found)) <= RULES.neighbours_max


def test_shares_cover_the_file_once() -> None:
    shares = sorted(share_of(peer, PEERS[:7], "file") for peer in PEERS[:7])
    assert shares[0][0] == 0.0
    assert shares[-1][1] == 1.0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
