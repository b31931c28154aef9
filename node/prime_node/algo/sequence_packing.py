"""Packing without sharing: concatenated sequences of any length, each seeing only itself (block-diagonal).

algo/packing.py saves work by sharing prefixes, but its masks grow with the square of a row. Here nothing is square, so
a sequence may be as long as memory allows.

Letters: N predictions (trained tokens), T tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prime_node.ports.train_samples import TrainSample


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """One forward pass. The last token of a sequence predicts nothing, so it is not computed.

    Example: prompt "xy", completion "abc" gives tokens "xyab", length 4, sources (1, 2, 3), targets "abc".
    """

    token_ids: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T] place of each token in its sequence
    lengths: tuple[int, ...]
    """Length of each sequence; T in all."""
    samples: tuple[int, ...]
    """Samples in this pass, by their index in the batch."""
    sources_N: npt.NDArray[np.int64]
    """[N] source of each prediction: an index into token_ids."""
    targets_N: npt.NDArray[np.int64]
    """[N] predicted token: the completions of `samples`, concatenated."""

    @property
    def num_distinct(self) -> int:
        """Return the number of tokens; there is no padding."""
        return len(self.token_ids)


def pack_sequences(samples: Sequence[TrainSample], *, micro_batch_tokens: int) -> list[PackedSequences]:
    """Pack every sample once, first fit decreasing into passes of `micro_batch_tokens`. A pure function.

    A longer sequence has a pass of its own: workers decide how long sequences are, and none of them may end the trainer.
    """
    passes: list[list[int]] = []
    room: list[int] = []
    lengths = [len(sample.prompt_token_ids) + len(sample.completion_token_ids) - 1 for sample in samples]
    for index in sorted(range(len(samples)), key=lambda index: (-lengths[index], index)):
        place = next((place for place, free in enumerate(room) if lengths[index] <= free), None)
        if place is None:
            place = len(passes)
            passes.append([])
            room.append(micro_batch_tokens)
        passes[place].append(index)
        room[place] -= lengths[index]
    return [_build(sorted(members), samples) for members in passes]


def _build(members: Sequence[int], samples: Sequence[TrainSample]) -> PackedSequences:
    tokens: list[int] = []
    positions: list[npt.NDArray[np.int64]] = []
    lengths: list[int] = []
    sources: list[npt.NDArray[np.int64]] = []
    targets: list[int] = []
    for index in members:
        prompt, completion = samples[index].prompt_token_ids, samples[index].completion_token_ids
        length = len(prompt) + len(completion) - 1
        sources.append(np.arange(len(prompt) - 1, length) + len(tokens))
        tokens += prompt
        tokens += completion[:-1]
        targets += completion
        positions.append(np.arange(length))
        lengths.append(length)
    return PackedSequences(
        token_ids=np.array(tokens, np.int64),
        positions=np.concatenate(positions),
        lengths=tuple(lengths),
        samples=tuple(members),
        sources_N=np.concatenate(sources),
        targets_N=np.array(targets, np.int64),
    )
