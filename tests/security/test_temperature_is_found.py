"""A slightly lower temperature is found within 64 audited rollouts of an engine that no calibration knows, simulated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prime_node.cli.shipped import shipped_calibration
from prime_protocol.check_policy import EVIDENCE_MAX, CheckPolicy
from prime_protocol.close_flips import CLOSE_FLIPS, close_flip_sums
from prime_protocol.evidence import folded, log_evidence
from prime_protocol.excess_flips import EXCESS_FLIPS, apart, flip_sums

CHECKS = CheckPolicy(
    calibration=shipped_calibration(), flips_explained=True, close_flips_seen=True, shading_seen=True, unseeded=True
)
"""Checks with 11 statistics, of which 9 show nothing here: the least that the other two can give."""
WORKERS, BUNDLES, TOKENS = 40, 8, 8 * 16
ERROR = 1e-6
"""Nats between claims and recomputed logprobs, as of one engine in float32 on other hardware."""


def highest(temperature: float, seed: int) -> float:
    """Nats of evidence after 64 rollouts of 16 tokens against a worker that claims the logprobs of temperature 1."""
    rng = np.random.default_rng(seed)
    wealth = folded({}, {}, statistics=CHECKS.statistics)
    for _ in range(BUNDLES):
        logits, noise = 2 * rng.standard_normal((TOKENS, 8)), rng.gumbel(size=(TOKENS, 8))
        rows, chosen = np.arange(TOKENS), (logits / temperature + noise).argmax(axis=1)
        noisy = logits + noise
        margins_T = noisy.max(axis=1) - noisy[rows, chosen]
        d_T = apart(ERROR * rng.standard_normal(TOKENS), np.zeros(TOKENS))
        sums = {
            EXCESS_FLIPS: flip_sums(margins_T > 0, d_T),
            CLOSE_FLIPS: close_flip_sums(margins_T, d_T, rows),
        }
        wealth = folded(wealth, sums, statistics=CHECKS.statistics)
    return log_evidence(wealth)


@pytest.mark.parametrize("temperature", [0.98, 1.02])
def test_a_temperature_of_two_percent_apart_is_found_within_64_audited_rollouts(temperature: float) -> None:
    found = sum(highest(temperature, seed) >= math.log(EVIDENCE_MAX) for seed in range(WORKERS))
    assert found >= 39


def test_the_run_s_own_temperature_is_no_evidence() -> None:
    assert max(highest(1.0, seed) for seed in range(WORKERS)) <= 0
