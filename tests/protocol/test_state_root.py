"""The state root: the digest of a policy's table of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prime_protocol.digest import digest_of
from prime_protocol.manifest import Manifest
from prime_protocol.weights import num_bytes, root_of, state_root

Changed = Callable[..., Manifest]


ROWS = [("b", "bf16", (2, 3), "00" * 32), ("a", "fp32", (), "11" * 32)]


def test_a_state_root_is_the_digest_of_its_table() -> None:
    text = b"a\0fp32\0\0" + b"11" * 32 + b"\nb\0bf16\x002,3\0" + b"00" * 32 + b"\n"
    assert state_root(ROWS) == state_root(ROWS[::-1]) == digest_of(text)


OTHER_ROWS = [
    ("c", "bf16", (2, 3), "00" * 32),
    ("b", "fp16", (2, 3), "00" * 32),
    ("b", "bf16", (3, 2), "00" * 32),
    ("b", "bf16", (23,), "00" * 32),
    ("b", "bf16", (2, 3), "01" * 32),
]


@pytest.mark.parametrize("row", OTHER_ROWS)
def test_every_column_counts(row: Any) -> None:
    assert state_root([row, ROWS[1]]) != state_root(ROWS)


def test_a_root_of_weights_is_the_root_of_their_table(sample: Any) -> None:
    assert root_of(sample.weights[0]) == sample.manifests[0].manifest.state_root
    assert num_bytes(sample.weights[0]) == 300 * 2 + 300 * 2 + 5 * 4


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "a\x7f", "", "x" * 201])
def test_a_tensor_cannot_be_named_so_that_rows_run_together(name: str, sample: Any, changed: Changed) -> None:
    with pytest.raises(ValueError, match="name"):
        changed(sample.manifests[0].manifest.tensors[0], name=name)
