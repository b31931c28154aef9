"""Disk space for a policy: tensors that are written and read like others, or an error if the disk is too small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prime_node.broadcast.publish.disk_room import DiskRoom
from prime_protocol.errors import TransientFault
from prime_protocol.manifest import TensorEntry


def entry(dtype: str, *shape: int) -> TensorEntry:
    return TensorEntry(name=f"{dtype} {shape}", dtype=dtype, shape=shape, digest="00" * 32)


def test_tensors_do_not_overlap_and_leave_no_file(tmp_path: Path) -> None:
    table = [entry("bf16", 3, 5), entry("fp32", 7), entry("bf16", 0, 4), entry("u8", 1)]
    room = DiskRoom(table, tmp_path)
    tensors = [room.tensor(one.dtype, one.shape) for one in table]
    for number, tensor in enumerate(tensors):
        tensor.data[:] = number + 1
    assert [sorted(set(tensor.data.tolist())) for tensor in tensors] == [[1], [2], [], [4]]
    assert [tensor.data.dtype for tensor in tensors] == [np.uint16, np.uint32, np.uint16, np.uint8]
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_the_disk_has_no_room_for_is_an_error_and_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the system took all that was free before it refused, and every other process met a full disk."""
    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("the disk is filled"))
    with pytest.raises(TransientFault, match=r"a policy of .* bytes does not fit into .*Free some space there"):
        DiskRoom([entry("fp32", 2**40)], tmp_path)
