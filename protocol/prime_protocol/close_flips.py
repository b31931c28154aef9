"""Close flips: tokens other than the seed's choice, where claimed and recomputed logprobs agree too closely to explain it.

excess_flips.py bets at most 4 on a flip, because a larger stake would need a cut that noisy engines could gain from. A
worker that samples at a slightly lower temperature and claims the policy's own logprobs makes one flip in 70 tokens, so
that takes long. But its claims agree with the forward pass to the last bits, and an engine whose errors are that small
makes no such flips. Here larger stakes count a flip only where its own error is below the cut. With d = |1 - p / p'| as
in excess_flips.py,

    e = 1 + stake * (clear - min(d + SLACK, CUT / stake))

where `clear` is 1 if the margin is at least MARGIN_MIN and d is at most CUT / stake, and else 0. MARGIN_MIN excludes
flips that rounding of scores or noise could cause. While all errors in a context are below the cut, E[clear - d] <= 0
for any two distributions (excess_flips.py). Larger errors cost CUT and count no flip unless d happens to be small. The
larger the errors, the more flips there are, and the rarer that is, in proportion.

An engine's errors are fixed in one context, and completions of one prompt share contexts, so one context with a small d
could count several times. Tokens that follow the same tokens therefore count as one, with the mean of their e.

Assumption besides that of excess_flips.py: on average over contexts, a clear flip with d below the cut has a
probability of at most E[min(d, cut)]. For errors of any scale that are alike for all tokens of a context, normal, with
heavy tails or of a temperature, it is at most about half of that (tested). Systematic errors of a few tokens that leave
the others exact are within the theorem.

Letters: T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from prime_protocol.evidence import Moments, Sums

CLOSE_FLIPS = "close_flips"
STAKES = (64.0, 1024.0, 16384.0)
"""Stakes, used instead of lambdas."""
CUT = 0.9
"""Maximum loss of a token, as a share of its stake's wealth."""
SLACK = 2e-7
"""Flips of a token that nothing has to explain: a rare fault of a machine is forgotten after 3,000 tokens."""
MARGIN_MIN = 1e-4
"""Nats. Rounding to float32 explains margins up to 1e-5."""
MOMENTS = Moments(cap=0.066, lambdas=STAKES, log_moments=(0.0,) * len(STAKES), num_tokens=0)
"""Moments in a calibration's form: log(1 + stake) is at most 0.066 stakes; the e-value already contains the expectation."""

Floats = npt.NDArray[np.float64]
TokenIds = tuple[int, ...]


def close_bets(margins_T: npt.NDArray[np.floating], apart_T: npt.NDArray[np.floating], stake: float) -> Floats:
    """Return e of each token [...] at one of STAKES, from its margin and d."""
    cut, apart = CUT / stake, apart_T.astype(np.float64)
    is_clear = (margins_T >= MARGIN_MIN) & (apart <= cut)
    e: Floats = 1 + stake * (is_clear - np.minimum(apart + SLACK, cut))
    return e


def close_flip_sums(
    margins_T: npt.NDArray[np.floating], apart_T: npt.NDArray[np.floating], contexts_T: npt.NDArray[np.integer]
) -> Sums:
    """Sum the evidence of a bundle's flips, given margins, d and `contexts_of` [T]. Rounded down, to 1e-6 nats."""
    visits = np.bincount(contexts_T)
    logs = []
    for stake in STAKES:
        e = np.bincount(contexts_T, weights=close_bets(margins_T, apart_T, stake)) / visits
        logs.append(math.floor(float(np.log(e).sum()) * 1e6) / 1e6)
    return Sums(num_tokens=len(margins_T), log_e=tuple(logs))


def contexts_of(completions: Sequence[tuple[TokenIds, TokenIds]]) -> npt.NDArray[np.int64]:
    """Number the contexts of the tokens [T] of completions, each given as prompt and tokens.

    Tokens that follow the same tokens of the same prompt have one number. Numbers begin at 0, without gaps.
    """
    numbers: dict[TokenIds, int] = {}
    keyed = [(numbers.setdefault(prompt, len(numbers)), tokens) for prompt, tokens in completions]
    found = [np.zeros(0, np.int64)] * len(keyed)
    used = before = 0
    for index in sorted(range(len(keyed)), key=keyed.__getitem__):  # completions with a common beginning are neighbours
        (prompt, tokens), (last_prompt, last_tokens) = keyed[index], keyed[before]
        num_shared = 0
        if prompt == last_prompt:
            pairs = zip(last_tokens, tokens, strict=False)
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            num_shared = min(equal + 1, len(tokens), len(found[before]))
        num_new = len(tokens) - num_shared
        found[index] = np.concatenate([found[before][:num_shared], np.arange(used, used + num_new)])
        used, before = used + num_new, index
    return np.concatenate([np.zeros(0, np.int64), *found])
