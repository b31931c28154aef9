"""Two ways of packing. Prefix-sharing: many sequences become few rows in which every shared prefix is computed once.

The sequences of a batch form a tree: all prompts share a template, the completions of a group share a prompt, and often
their first tokens too. A token's hidden state depends only on its ancestors in the tree. So one row token serves every
sequence that passes through it, and one row token may predict several next tokens. Gradients add up by themselves.

    trunk   the prefix of all sequences, computed once: P tokens
    rows    R rows of W tokens; each holds whole subtrees below the trunk, in depth-first order, then padding

In depth-first order the descendants of token j are the tokens j + 1 .. subtree_end[j] - 1, so in a row

    token i sees token j  if and only if  j <= i < subtree_end[j]

and every row sees the trunk. That one array is the whole attention mask. A batch that shares nothing gives the ordinary
block-diagonal packing. Nothing here depends on a model; adapters/training/packed_attention.py computes with it.

Without sharing: concatenated sequences, each seeing only itself (block-diagonal). Sharing saves work, but its masks grow with the
square of a row. Without it nothing is square, so a sequence may be as long as memory allows.

Letters: N predictions (trained tokens), P trunk tokens, R rows, T tokens of a pass, W tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prime_node.ports.train_samples import TrainSample


@dataclass(frozen=True, slots=True)
class PackedRows:
    """One forward pass: P + R * W tokens, and which of their outputs predict which tokens.

    Two completions "ab", "ac" of the prompt "xy" (the last token of a sequence predicts nothing, so it is not
    computed):

        trunk "xy", predictions (y -> a), (a -> b), (y -> a), (a -> c), one row "a".
    """

    token_ids: npt.NDArray[np.int64]  # [P + R * W] the trunk, then the rows
    positions: npt.NDArray[np.int64]  # [P + R * W] place of each token in its sequence
    subtree_end_RW: npt.NDArray[np.int64]
    """[R, W] first token of the row that is not a descendant of this one; padding sees only itself."""
    trunk_tokens: int
    """Length P of the trunk."""
    samples: tuple[int, ...]
    """Samples in this pass, by their index in the batch, in the order of the predictions."""
    sources_N: npt.NDArray[np.int64]
    """[N] source of each prediction: an index into token_ids."""
    targets_N: npt.NDArray[np.int64]
    """[N] predicted token: the completions of `samples`, concatenated."""
    num_distinct: int
    """Tokens without padding."""


def pack(samples: Sequence[TrainSample], *, row_tokens: int, micro_batch_tokens: int) -> list[PackedRows]:
    """Pack every sample once, in as many forward passes as `micro_batch_tokens` requires.

    `row_tokens` is the preferred W: a longer sample makes all rows longer, a small batch makes them shorter. The result
    is a pure function of the arguments.
    """
    if not samples:
        return []
    sequences = [sample.prompt_token_ids + sample.completion_token_ids[:-1] for sample in samples]
    order = sorted(range(len(samples)), key=sequences.__getitem__)
    trunk = _trunk_tokens(sequences, order)
    width = max(row_tokens, max(map(len, sequences)) - trunk)
    pieces = list(_pieces(samples, sequences, order, trunk, width))
    rows = _first_fit_decreasing(pieces, width)
    width = max(sum(piece.num_tokens for piece in row) for row in rows)
    rows_per_pass = max(1, (micro_batch_tokens - trunk) // width)
    return [
        _build(rows[start : start + rows_per_pass], samples, sequences, trunk, width)
        for start in range(0, len(rows), rows_per_pass)
    ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Samples that share one row, in sorted order, and the row tokens that they need."""

    members: tuple[int, ...]
    num_tokens: int


def _trunk_tokens(sequences: Sequence[tuple[int, ...]], order: Sequence[int]) -> int:
    """Return the length of the prefix that all sequences share, leaving at least one token of each for the rows."""
    shared = _common_prefix(sequences[order[0]], sequences[order[-1]])
    return min(shared, min(map(len, sequences)) - 1)


def _pieces(
    samples: Sequence[TrainSample],
    sequences: Sequence[tuple[int, ...]],
    order: Sequence[int],
    trunk: int,
    width: int,
) -> Iterator[_Piece]:
    """Iterate over pieces: the samples of one prompt stay together, unless their subtree is longer than a row."""
    members: list[int] = []
    num_tokens = 0
    for index in order:
        cost = len(sequences[index]) - trunk
        if members:
            last = members[-1]
            added = len(sequences[index]) - max(trunk, _common_prefix(sequences[last], sequences[index]))
            same_prompt = samples[last].prompt_token_ids == samples[index].prompt_token_ids
            if same_prompt and num_tokens + added <= width:
                members.append(index)
                num_tokens += added
                continue
            yield _Piece(tuple(members), num_tokens)
        members, num_tokens = [index], cost
    yield _Piece(tuple(members), num_tokens)


def _first_fit_decreasing(pieces: Sequence[_Piece], width: int) -> list[list[_Piece]]:
    rows: list[list[_Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_tokens):
        for row, free in enumerate(room):
            if piece.num_tokens <= free:
                rows[row].append(piece)
                room[row] -= piece.num_tokens
                break
        else:
            rows.append([piece])
            room.append(width - piece.num_tokens)
    return rows


def _build(
    rows: Sequence[Sequence[_Piece]],
    samples: Sequence[TrainSample],
    sequences: Sequence[tuple[int, ...]],
    trunk: int,
    width: int,
) -> PackedRows:
    first = rows[0][0].members[0]
    token_ids = np.zeros(trunk + len(rows) * width, np.int64)
    positions = np.zeros_like(token_ids)
    token_ids[:trunk] = sequences[first][:trunk]
    positions[:trunk] = np.arange(trunk)
    ends_RW = np.tile(np.arange(1, width + 1), (len(rows), 1))
    members: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    num_distinct = trunk
    for row_index, row in enumerate(rows):
        tree = _RowTree(trunk)
        base = trunk + row_index * width
        for piece in row:
            tree.leave()
            for index in piece.members:
                first_source = len(samples[index].prompt_token_ids) - 1
                tree.add(sequences[index])
                members.append(index)
                targets += samples[index].completion_token_ids
                sources += range(first_source, trunk)
                sources += [base + node for node in tree.path[max(0, first_source - trunk) :]]
        tree.leave()
        used = len(tree.token_ids)
        num_distinct += used
        token_ids[base : base + used] = tree.token_ids
        positions[base : base + used] = tree.positions
        ends_RW[row_index, :used] = tree.ends
    return PackedRows(
        token_ids=token_ids,
        positions=positions,
        subtree_end_RW=ends_RW,
        trunk_tokens=trunk,
        samples=tuple(members),
        sources_N=np.array(sources, np.int64),
        targets_N=np.array(targets, np.int64),
        num_distinct=num_distinct,
    )


class _RowTree:
    """One row's tokens in depth-first order, built from sorted sequences."""

    def __init__(self, trunk: int) -> None:
        self._trunk = trunk
        self._sequence: tuple[int, ...] = ()
        self.path: list[int] = []
        """Row positions of the last sequence's tokens below the trunk."""
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []

    def add(self, sequence: tuple[int, ...]) -> None:
        """Follow the prefix shared with the last sequence, then branch off."""
        shared = min(_common_prefix(self._sequence, sequence) - self._trunk, len(self.path))
        self._close(max(0, shared))
        depth = self._trunk + len(self.path)
        new = sequence[depth:]
        self.path += range(len(self.token_ids), len(self.token_ids) + len(new))
        self.token_ids += new
        self.positions += range(depth, len(sequence))
        self.ends += [0] * len(new)
        self._sequence = sequence

    def leave(self) -> None:
        """Return to the trunk: the next sequence shares nothing with the last one."""
        self._close(0)

    def _close(self, depth: int) -> None:
        for node in self.path[depth:]:
            self.ends[node] = len(self.token_ids)
        del self.path[depth:]


def _common_prefix(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    shared = min(len(left), len(right))
    if left[:shared] == right[:shared]:
        return shared
    return next(place for place in range(shared) if left[place] != right[place])


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
    return [_concatenated(sorted(members), samples) for members in passes]


def _concatenated(members: Sequence[int], samples: Sequence[TrainSample]) -> PackedSequences:
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
