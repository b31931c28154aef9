"""Seeded choices compared with those at a lower temperature, and with those by larger errors of the scores.

`margin` counts what a choice is off the seed's, and nothing where both agree. Two more statistics ask what would explain the
choice better, and count for a worker where the explanation would have led elsewhere:

    cooler   the margin less that at COOLER times the temperature T: m(z / T + g) - m(z / (COOLER T) + g), m of the same token
    looser   log(q / r), q and r its chances under softmax((z / T + g) / s) at the larger and the smaller scale s of LOOSE

z are the validator's logits and g the assigned noise. If errors of the scores make an honest worker choose by r, looser has
E[exp(looser)] = 1, whatever the policy is. Real errors differ, so both are calibrated (calibration.py).

Both are defined above temperature 0 and without filters. This is the reference; engines have their own tensor
implementations, and a test compares the two.

Letters: N positions, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

COOLER = 0.95
"""Temperature, relative to the run's, that choices are compared with."""
LOOSE = (0.06, 0.12)
"""Nats. Scales of the errors of scores: as in bf16, and twice as large."""

Scores = npt.NDArray[np.float64]


def cooler_of(
    scaled_NV: npt.NDArray[np.floating], noise_NV: npt.NDArray[np.floating], tokens_N: npt.NDArray[np.integer]
) -> Scores:
    """Return `cooler` [N] of chosen tokens, for logits at the sampling temperature."""
    scaled, noise = scaled_NV.astype(np.float64), noise_NV.astype(np.float64)
    return _margins(scaled + noise, tokens_N) - _margins(scaled / COOLER + noise, tokens_N)


def looser_of(scores_NV: npt.NDArray[np.floating], tokens_N: npt.NDArray[np.integer]) -> Scores:
    """Return `looser` [N] of chosen tokens, for noisy scores."""
    small, large = (_log_chances(scores_NV.astype(np.float64) / scale, tokens_N) for scale in LOOSE)
    return large - small


def _margins(scores_NV: Scores, tokens_N: npt.NDArray[np.integer]) -> Scores:
    found: Scores = scores_NV.max(axis=1) - np.take_along_axis(scores_NV, tokens_N[:, None], axis=1)[:, 0]
    return found


def _log_chances(scores_NV: Scores, tokens_N: npt.NDArray[np.integer]) -> Scores:
    chosen = np.take_along_axis(scores_NV, tokens_N[:, None], axis=1)[:, 0]
    found: Scores = chosen - np.logaddexp.reduce(scores_NV, axis=1)
    return found
