"""Parts on disk while two sources deliver the same piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_node.broadcast.swarm.part_store import PARTIAL, PartStore
from prime_protocol.digest import digest_of
from prime_protocol.manifest import PartEntry

DATA = b"a part of one piece"
ENTRY = PartEntry(digest=digest_of(DATA), size=len(DATA))


def test_a_second_copy_of_the_last_piece_may_come_while_the_part_is_finished(tmp_path: Path) -> None:
    """`finish` runs in another thread: between its rename and its record there is no partial file, and the part is not known."""
    store = PartStore(tmp_path, bytes_max=2**20)
    assert store.begin(ENTRY)
    store.put(ENTRY.digest, 0, DATA)
    (tmp_path / f"{ENTRY.digest}{PARTIAL}").rename(tmp_path / ENTRY.digest)
    store.put(ENTRY.digest, 0, DATA)
    assert (tmp_path / ENTRY.digest).read_bytes() == DATA


def test_a_piece_of_a_part_that_was_removed_is_an_error(tmp_path: Path) -> None:
    store = PartStore(tmp_path, bytes_max=2**20)
    assert store.begin(ENTRY)
    store.keep_only(())
    with pytest.raises(FileNotFoundError):
        store.put(ENTRY.digest, 0, DATA)
