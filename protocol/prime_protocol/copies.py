"""Fingerprints of what cannot be said twice by chance: how copies and near-copies are found, across workers and steps.

Under seeds of their own two honest completions of one prompt may well agree, where the text is short or sure. So only windows
of tokens count that the policy itself gives a probability of at most exp(-SURPRISE_NATS) = 1e-21 in their place: that another
completion, with other seeds, holds a given text as such a window is at most that probable, in each place where it could begin.

Windows begin where the tokens say so (after four tokens whose hash is 0 mod ANCHOR_SHARE), so an insertion or a change hides
only the windows that it touches. Of each length a completion gives its few smallest hashes, so parts are recognised.

The same seed gives the same completion; so bundles for one slot are never compared. Neither is anything where sampling is greedy
or filtered: then tokens are surer than their logprobs say.
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
"""Tokens. The longer one is for text that is surer."""
KEPT = 2
"""Fingerprints of each length and completion."""
ANCHOR_TOKENS = 4
ANCHOR_SHARE = 16
FINGERPRINT_CHARS = 24

Fingerprints = tuple[tuple[int, str], ...]
"""(index of the completion in its bundle, fingerprint)."""


def fingerprints(rollouts: Rollouts, sampling: Sampling) -> Fingerprints:
    """Of an accepted bundle, whose claimed logprobs are the policy's. Short or sure completions have none."""
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
    """Two completions of one bundle hold the same window."""
    owner: dict[str, int] = {}
    return any(owner.setdefault(mark, index) != index for index, mark in marks)


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
    """Places whose four tokens before hash to 0: a polynomial in an odd number, its high bits."""
    wide = token_ids_T.astype(np.uint64)
    hash_T = np.zeros(len(wide) - ANCHOR_TOKENS + 1, np.uint64)
    for place in range(ANCHOR_TOKENS):
        hash_T = hash_T * np.uint64(0x9E3779B97F4A7C15) + wide[place : place + len(hash_T)] + np.uint64(1)
    return np.flatnonzero((hash_T >> np.uint64(40)) % np.uint64(ANCHOR_SHARE) == 0) + ANCHOR_TOKENS
