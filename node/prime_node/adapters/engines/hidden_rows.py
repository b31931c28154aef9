"""Hidden states of unfinished completions, kept until their chunk of 32 can be committed to (prime_protocol.proof).

A row is stored by its completion and the position of the token that was chosen from it. If a position is computed again (a swap
discarded its token, a prompt came in parts), the new row replaces the old one: the token comes from the last row. A chunk is
therefore committed to only when the completion is SLACK tokens past it: no engine goes back that far.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_protocol.proof import CHUNK_TOKENS, CHUNKS_AT_ONCE, Bits, build_proofs

SLACK = 8
_Row = npt.NDArray[np.uint16]


@dataclass
class _Pending:
    """State of one completion."""

    rows: dict[int, _Row] = field(default_factory=dict)
    """Rows by position, for chunks that are not committed to yet."""
    committed: list[bytes] = field(default_factory=list)
    """One proof for each whole chunk, in order."""
    handed_on: int = 0
    """Number of chunks that are committed to or queued for it."""


class HiddenRows:
    """Rows of many completions, each identified by any hashable name."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, _Pending] = {}
        self._whole: list[tuple[_Pending, list[_Row]]] = []
        """Queue of chunks. They are processed many at a time, because one alone costs several times as much."""

    def add(self, names: Sequence[Hashable], positions: Iterable[int], hidden_ND: Tensor) -> None:
        """Add row n of `hidden_ND`, from which the token at positions[n] of completion names[n] is chosen. Skip the name None."""
        for name, position, row in zip(names, positions, bf16_bits(hidden_ND), strict=False):
            if name is None:
                continue
            pending = self._pending.get(name)
            if pending is None:
                pending = self._pending[name] = _Pending()
            pending.rows[position] = row
            first = CHUNK_TOKENS * pending.handed_on
            if position >= first + CHUNK_TOKENS + SLACK:
                rows = [pending.rows.pop(place) for place in range(first, first + CHUNK_TOKENS)]
                pending.handed_on += 1
                self._whole.append((pending, rows))
        if len(self._whole) >= CHUNKS_AT_ONCE:
            self._commit()

    def take(self, lengths: Mapping[Hashable, int]) -> dict[Hashable, bytes]:
        """Return the proofs of finished completions with these numbers of tokens, and forget the completions."""
        taken = {name: self._pending.pop(name, _Pending()) for name in lengths}
        for name, pending in taken.items():
            for first in range(CHUNK_TOKENS * pending.handed_on, lengths[name], CHUNK_TOKENS):
                end = min(first + CHUNK_TOKENS, lengths[name])
                self._whole.append((pending, [pending.rows[place] for place in range(first, end)]))
        self._commit()
        return {name: b"".join(pending.committed) for name, pending in taken.items()}

    def drop(self, names: Sequence[Hashable]) -> None:
        """Forget completions whose proofs are no longer needed."""
        for name in names:
            self._pending.pop(name, None)

    def _commit(self) -> None:
        if not self._whole:
            return
        rows = np.stack([row for _, chunk in self._whole for row in chunk])
        proofs = build_proofs(rows, [len(chunk) for _, chunk in self._whole])
        for (pending, _), proof in zip(self._whole, proofs, strict=True):
            pending.committed.append(proof.tobytes())
        self._whole.clear()


def bf16_bits(hidden_ND: Tensor) -> Bits:
    """Return the bits of a bf16 copy in the CPU's memory."""
    return hidden_ND.detach().to(torch.bfloat16, copy=True).cpu().view(torch.int16).numpy().view(np.uint16)
