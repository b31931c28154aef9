"""Parts of a publication stay on disk until they are uploaded."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from prime_node.broadcast.publish.disk_room import PartSpool
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.manifest import PartEntry


def entry(data: bytes) -> PartEntry:
    return PartEntry(digest=digest_of(data), size=len(data))


def test_parts_come_back_as_they_were_and_leave_nothing_behind(tmp_path: Path) -> None:
    parts = [bytes([number]) * (1000 + number) for number in range(5)]
    with PartSpool(tmp_path) as spool:
        for part in [*parts, parts[2]]:
            spool.keep(entry(part), part)
        assert [spool.read(entry(part)) for part in reversed(parts)] == parts[::-1]
        assert not list(tmp_path.iterdir()), "a crash would leave this file"
        assert os.fstat(spool.file.fileno()).st_size == sum(map(len, parts)), "the same part twice takes room once"


def test_a_full_disk_says_where_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with PartSpool(tmp_path) as spool:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(LocalError, match=f"does not fit into {tmp_path}"):
            spool.keep(entry(b"part"), b"part")
