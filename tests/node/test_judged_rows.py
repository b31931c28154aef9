"""Hidden states that sequences of one beginning share, whichever of them was computed first."""

from __future__ import annotations

import pytest
import torch

from prime_node.adapters.engines.vllm_judging import JudgedSequence, taken_rows

WIDTH = 2
FIRST, SHARED, END = 4, 8, 12


def sequence(name: str, *, shared: int) -> JudgedSequence:
    return JudgedSequence(name, FIRST, END, shared, [5, 6], [1, 1], [1, 1], [0, 1])


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_any_sequence_may_have_the_shared_rows(whole: int) -> None:
    kept = {
        name: {FIRST: torch.ones(END - FIRST, WIDTH)} if place == whole else {SHARED: torch.ones(END - SHARED, WIDTH)}
        for place, name in enumerate("abc")
    }
    asked = [sequence("a", shared=0), sequence("b", shared=SHARED), sequence("c", shared=SHARED)]
    assert taken_rows(asked, kept).shape == (6, WIDTH)


def test_a_sequence_without_any_row_is_reported() -> None:
    with pytest.raises(RuntimeError, match="0 of 8 positions"):
        taken_rows([sequence("a", shared=0)], {})
