"""TOPLOC's published rule on hidden-state proofs, as an oracle to compare with: each proof by itself is good or bad.

The thresholds are those of vllm_validate_poly.py in PrimeIntellect-ai/toploc, commit 5acfbca10c058039b2e6f9a00c3c7cd52e9a2112
(TEXP, TMEAN, TMEDIAN; also arXiv 2501.16007): of the 128 values of a proof at least 90 exponents agree, and over those the
mantissas differ by at most 10 units in the mean and 8 in the median. Proofs of a completion's end may have fewer values; their
share counts. Nothing of that repository's code is used.

Letters: C proofs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prime_protocol.proof import ProofErrors

VALUES = 128
EXPONENTS_MIN, MEAN_MAX, MEDIAN_MAX = 90, 10.0, 8.0


def refused_by_toploc(errors: ProofErrors) -> npt.NDArray[np.bool_]:
    """Return which proofs [C] the rule refuses."""
    mismatches_max = (VALUES - EXPONENTS_MIN) / VALUES * errors.values_C
    found: npt.NDArray[np.bool_] = (
        (errors.exponent_mismatches_C > mismatches_max)
        | (errors.mantissa_error_mean_C > MEAN_MAX)
        | (errors.mantissa_error_median_C > MEDIAN_MAX)
    )
    return found
