"""Meaning of the golden vectors whose meaning is computed numbers: noise, choices, proofs and the sums of the statistics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.protocol.vector_files_world import Case

from prime_lab.filter_reference import choice_of, cooler_of, looser_of, margins_of, slack_of
from prime_protocol.assignment import Sampling
from prime_protocol.close_flips import close_flip_sums, contexts_of
from prime_protocol.evidence import Sums
from prime_protocol.excess_flips import apart, flip_sums
from prime_protocol.noise import gumbel_noise
from prime_protocol.proof import build_proofs
from prime_protocol.reward_ranks import rank_sums
from prime_protocol.shading import SHADING, SHADING_BY_REWARD, by_reward_sums, reward_classes, rises, shading_sums


def near(sums: Sums) -> list[Any]:
    """Return a statistic's sums, which implementations compute with differences of rounding."""
    return [pytest.approx(log_e, abs=2e-6) for log_e in sums.log_e]


def choice(case: Case, folder: Path) -> Any:
    logits = np.array(case["logits"])
    sampling = Sampling(completion_tokens_max=1, stop_token_ids=(), **case["filters"])
    noise = gumbel_noise(case["seeds"], case["positions"], logits.shape[1])
    every = np.arange(logits.shape[1])
    return {
        "slack": [[None if np.isinf(x) else float(x) for x in row] for row in slack_of(logits, sampling)],
        "tokens": choice_of(logits, noise, sampling).tolist(),
        "margins_of_first": margins_of(logits[[0] * len(every)], noise[[0] * len(every)], every, sampling).tolist(),
    }


def compared_choices(case: Case, folder: Path) -> Any:
    scaled = np.array(case["logits"]) / case["temperature"]
    noise = gumbel_noise(case["seeds"], case["positions"], scaled.shape[1])
    tokens = np.array(case["tokens"])
    return {"cooler": cooler_of(scaled, noise, tokens).tolist(), "looser": looser_of(scaled + noise, tokens).tolist()}


def proof(case: Case, folder: Path) -> Any:
    places = np.arange(sum(case["lengths"]) * case["width"])
    if "pattern" in case:
        values = (places * 40_503 % 30_000 + 1_000) | ((places % 3 == 0) << 15)
    else:
        values = np.frombuffer(bytes.fromhex(case["hidden"]), ">u2")
    rows = values.astype(np.uint16).reshape(-1, case["width"])
    return [found.tobytes().hex() for found in build_proofs(rows, case["lengths"])]


def shading(case: Case, folder: Path) -> Any:
    rises_T = rises(np.array(case["claimed"]), np.array(case["recomputed"]))
    by_reward = by_reward_sums(rises_T, np.array(case["owners"]), reward_classes(case["rewards"]))
    found = {SHADING: shading_sums(rises_T), SHADING_BY_REWARD: by_reward}
    return {name: near(sums) for name, sums in found.items()}


def noise(case: Case, folder: Path) -> Any:
    values = gumbel_noise([case["seed"]], [case["position"]], 152_064)[0]
    first = [float(x) for x in values[:8]]
    return {
        "first_8": pytest.approx(first, abs=2e-6),
        "argmax_of_264": int(values[:264].argmax()),
        "argmax_of_152064": int(values.argmax()),
    }


def close_flips(case: Case, folder: Path) -> Any:
    moved = apart(np.array(case["claimed"]), np.array(case["recomputed"]))
    contexts = contexts_of([(tuple(prompt), tuple(tokens)) for prompt, tokens in case["completions"]])
    return near(close_flip_sums(np.array(case["margins"]), moved, contexts))


def excess_flips(case: Case, folder: Path) -> Any:
    return near(flip_sums(np.array(case["flips"]), apart(np.array(case["claimed"]), np.array(case["recomputed"]))))


def reward_ranks(case: Case, folder: Path) -> Any:
    return {name: near(sums) for name, sums in rank_sums(case["groups"]).items()}


KINDS_OF_NUMBERS: dict[str, Callable[[Case, Path], Any]] = {
    "choice": choice,
    "close_flips": close_flips,
    "compared_choices": compared_choices,
    "excess_flips": excess_flips,
    "noise": noise,
    "proof": proof,
    "reward_ranks": reward_ranks,
    "shading": shading,
}
