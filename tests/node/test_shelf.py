"""A seeder keeps the newest policies and their update paths from nothing; it withdraws and deletes the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.node.coordinator_world import make_manifest, make_run

from prime_node.broadcast.seed.seed_store import POLICIES_KEPT, SeedStore
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.part_store import PartStore
from prime_protocol.digest import digest_of
from prime_protocol.manifest import BasePolicy, Encoding, PartEntry, SignedManifest

SIGNED, _ = make_manifest(make_run(), None)
[SHAPE] = SIGNED.manifest.encodings


@dataclass
class Library:
    """A seed store, and blobs whose length equals their cost."""

    parts: PartStore
    seed_store: SeedStore

    def encoding(self, version: int, base: int | None, size: int) -> Encoding:
        """Return an encoding whose one part is on the disk."""
        data = f"{version} from {base} ".encode().ljust(size, b".")
        self.parts.write(digest_of(data), data)
        part = PartEntry(digest=digest_of(data), size=size)
        of = None if base is None else BasePolicy(policy_version=base, state_root="0" * 64)
        return SHAPE.model_copy(update={"base": of, "parts": (part,), "index": part})

    def put(self, version: int, *encodings: tuple[int | None, int]) -> SignedManifest:
        made = tuple(self.encoding(version, base, size) for base, size in encodings)
        manifest = SIGNED.manifest.model_copy(update={"policy_version": version, "encodings": made})
        signed = SignedManifest(manifest, SIGNED.digest, SIGNED.envelope)
        self.seed_store.put(signed)
        return signed

    def kept(self, signed: SignedManifest) -> list[int | None]:
        """Return the bases of the encodings that are still stored."""
        return [one.base_version for one in signed.manifest.encodings if self.parts.has(one.parts[0].digest)]


@pytest.fixture
def library(tmp_path: Path) -> Library:
    parts = PartStore(tmp_path / "parts", bytes_max=2**30)
    return Library(parts, SeedStore(parts, HaveSet(), tmp_path / "manifests"))


def test_the_newest_policies_are_kept_with_all_their_encodings(library: Library) -> None:
    put = [library.put(0, (None, 9_000))]
    put.append(library.put(1, (0, 100)))
    put += [library.put(version, (version - 1, 100), (0, 3_000)) for version in range(2, POLICIES_KEPT)]
    assert all(library.kept(signed) == [one.base_version for one in signed.manifest.encodings] for signed in put)


def test_what_a_newcomer_needs_to_reach_them_outlives_their_number(library: Library) -> None:
    """The history has one anchor, a delta from every policy to the next, and some longer deltas."""
    put = [library.put(0, (None, 9_000))]
    for version in range(1, 30):
        shortcut = ((version - 4, 150),) if version % 4 == 0 else ()
        put.append(library.put(version, (version - 1, 100), *shortcut))
    assert library.kept(put[0]) == [None]
    assert [library.kept(put[version]) for version in (4, 8, 12, 16, 20)] == [[0], [4], [8], [12], [16]]
    assert library.kept(put[3]) == library.kept(put[13]) == []
    assert library.seed_store.manifest_at_hand(4) is not None
    assert library.seed_store.manifest_at_hand(3) is None


def test_a_new_anchor_lets_the_old_one_and_its_deltas_go(library: Library) -> None:
    put = [library.put(0, (None, 9_000))]
    put += [library.put(version, (version - 1, 100)) for version in range(1, 10)]
    put.append(library.put(10, (9, 100), (None, 5_000)))
    assert library.kept(put[0]) == [None]
    put += [library.put(version, (version - 1, 100)) for version in range(11, 10 + POLICIES_KEPT)]
    assert library.kept(put[0]) == library.kept(put[5]) == []
    assert library.kept(put[10]) == [9, None]


def test_a_policy_without_an_update_path_here_is_kept_for_holders_of_its_base(library: Library) -> None:
    signed = library.put(40, (39, 100))
    assert library.kept(signed) == [39]
