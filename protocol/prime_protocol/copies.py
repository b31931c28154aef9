"""Fingerprints of text that does not occur twice by chance, to find copies and near-copies across workers and steps.

With different seeds, two honest completions of one prompt may still agree if the text is short or very likely. So only
windows of tokens count to which the policy itself gives a probability of at most exp(-SURPRISE_NATS) = 1e-21 in their
place. Another completion with other seeds contains a given such window with at most that probability, for each place
where it could begin.

Windows begin where the content decides (after four tokens whose hash is 0 mod ANCHOR_SHARE), so an insertion or a
change affects only the windows that it touches. A completion contributes its few smallest hashes per length, so partial
copies are recognised.

The same seed gives the same completion, so bundles for one slot are never compared. With greedy or filtered sampling
nothing is compared: tokens are then more likely than their logprobs suggest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prime_protocol.assignment import Sampling
from prime_protocol.digest import digest_of
from prime_protocol.limits import FINGERPRINTS_MAX
from prime_protocol.rollout import Rollouts

SURPRISE_NATS = 48.0
WINDOWS = (64, 256)
"""Window lengths in tokens. The longer one is for likelier text."""
KEPT = 2
"""Fingerprints kept per length and completion."""
ANCHOR_TOKENS = 4
ANCHOR_SHARE = 16
FINGERPRINT_CHARS = 24

Fingerprints = tuple[tuple[int, str], ...]
"""Pairs (index of the completion in its bundle, fingerprint)."""


def fingerprints(rollouts: Rollouts, sampling: Sampling) -> Fingerprints:
    """Return the fingerprints of an accepted bundle, whose claimed logprobs are the policy's.

    Completions that are short or very likely have none.
    """
    plain = Sampling(
        temperature=sampling.temperature,
        completion_tokens_max=sampling.completion_tokens_max,
        stop_token_ids=sampling.stop_token_ids,
    )
    if sampling.temperature == 0.0 or sampling != plain:
        return ()
    found, start = [], 0
    for index, length in enumerate(rollouts.lengths_N.tolist()):
        part = slice(start, start + length)
        found += [(index, mark) for mark in _of_one(rollouts.token_ids_T[part], rollouts.logprobs_T[part])]
        start += length
    return tuple(found[:FINGERPRINTS_MAX])


def is_repetitive(marks: Fingerprints) -> bool:
    """Return whether two completions of one bundle contain the same window."""
    owner: dict[str, int] = {}
    return any(owner.setdefault(mark, index) != index for index, mark in marks)


def share_text(mine: Rollouts, theirs: Rollouts, sampling: Sampling) -> bool:
    """Return whether two bundles share a fingerprint for different slots."""
    slots: dict[str, set[int]] = {}
    for index, mark in fingerprints(theirs, sampling):
        slots.setdefault(mark, set()).add(int(theirs.slots_N[index]))
    marks = fingerprints(mine, sampling)
    return any(slots.get(mark, set()) - {int(mine.slots_N[index])} for index, mark in marks)


def _of_one(token_ids_T: npt.NDArray[np.int32], logprobs_T: npt.NDArray[np.float32]) -> list[str]:
    if len(token_ids_T) < WINDOWS[0] + ANCHOR_TOKENS:
        return []
    anchors = _anchors(token_ids_T)
    surprise_T = np.concatenate([[0.0], np.cumsum(-logprobs_T.astype(np.float64))])
    tokens = np.ascontiguousarray(token_ids_T, dtype="<i4")
    found: list[str] = []
    for width in WINDOWS:
        starts = anchors[anchors + width <= len(tokens)]
        sayable = starts[surprise_T[starts + width] - surprise_T[starts] >= SURPRISE_NATS]
        marks = {digest_of(tokens[start : start + width].tobytes())[:FINGERPRINT_CHARS] for start in sayable.tolist()}
        found += sorted(marks)[:KEPT]
    return found


def _anchors(token_ids_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Find the places after four tokens that hash to 0: the high bits of a polynomial in an odd number."""
    wide = token_ids_T.astype(np.uint64)
    hash_T = np.zeros(len(wide) - ANCHOR_TOKENS + 1, np.uint64)
    for place in range(ANCHOR_TOKENS):
        hash_T = hash_T * np.uint64(0x9E3779B97F4A7C15) + wide[place : place + len(hash_T)] + np.uint64(1)
    return np.flatnonzero((hash_T >> np.uint64(40)) % np.uint64(ANCHOR_SHARE) == 0) + ANCHOR_TOKENS
