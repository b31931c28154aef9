"""Packing without sharing: sequences of any length one after another, each seeing itself alone (block-diagonal).

What algo/packing.py saves by sharing prefixes pays with masks of the square of a row; here nothing is square, so sequences
may be as long as the memory for one of them.

Letters: N predictions (trained tokens), T tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prime_node.ports.train_backend import TrainSample
from prime_protocol.errors import LocalError


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """One forward pass. The last token of a sequence predicts nothing, so it is not computed.

    Example: prompt "xy", completion "abc" gives tokens "xyab", length 4, sources (1, 2, 3), targets "abc".
    """

    token_ids: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T] place of each token in its sequence
    lengths: tuple[int, ...]
    """Of each sequence; T in all."""
    samples: tuple[int, ...]
    """Which samples are here, by their index in the batch."""
    sources_N: npt.NDArray[np.int64]
    """[N] whose output predicts: an index into token_ids."""
    targets_N: npt.NDArray[np.int64]
    """[N] the token that is predicted: the completions of `samples`, one after another."""

    @property
    def num_distinct(self) -> int:
        """All tokens; there is no padding."""
        return len(self.token_ids)


def pack_sequences(samples: Sequence[TrainSample], *, micro_batch_tokens: int) -> list[PackedSequences]:
    """Every sample once, first fit decreasing into passes of `micro_batch_tokens`. A pure function.

    Raises LocalError where one sequence alone is longer than that: it cannot be split over passes.
    """
    passes: list[list[int]] = []
    room: list[int] = []
    lengths = [len(sample.prompt_token_ids) + len(sample.completion_token_ids) - 1 for sample in samples]
    for index in sorted(range(len(samples)), key=lambda index: (-lengths[index], index)):
        if lengths[index] > micro_batch_tokens:
            raise LocalError(
                f"a sequence of {lengths[index]:,} tokens is longer than trainer.micro_batch_tokens = {micro_batch_tokens:,}, "
                "which one device must hold whole; raise it where the memory allows, or lower the run's completion_tokens_max"
            )
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
