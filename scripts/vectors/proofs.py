"""Golden vectors of hidden-state proofs and of choices among some of the tokens. See make_vectors.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_lab.filter_reference import choice_of, cooler_of, looser_of, margins_of, slack_of
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.noise import gumbel_noise
from prime_protocol.proof import build_proofs
from prime_protocol.rollout import Completion, Rollouts, rollouts_for
from vectors.folder import Case, Folder


def hidden_states(num_tokens: int, size: int) -> npt.NDArray[np.uint16]:
    """bf16 values of both signs and many exponents, some of them equal in size, as bits [T, D]."""
    places = np.arange(num_tokens * size)
    values = (places * 40_503 % 30_000 + 1_000) | ((places % 3 == 0) << 15)
    return np.asarray(values, np.uint16).reshape(-1, size)


def proofs(folder: Folder) -> None:
    cases = []
    for lengths, size in [([32], 64), ([1], 8), ([33, 5], 64), ([32], 4_096)]:
        rows = hidden_states(sum(lengths), size)
        case: Case = {"name": f"{lengths} tokens of width {size}", "lengths": lengths, "width": size}
        if size <= 64:
            case["hidden"] = rows.astype(">u2").tobytes().hex()
        else:
            case["pattern"] = "value i is (40503 i mod 30000 + 1000), the sign bit set where 3 divides i"
        cases.append(case | {"expect": [proof.tobytes().hex() for proof in build_proofs(rows, lengths)]})
    folder.cases("proof", cases)


def proven(lease: Lease, completions: Sequence[Completion]) -> tuple[Rollouts, npt.NDArray[np.uint8]]:
    """The same completions with proofs of some hidden states, 48 wide."""
    proofs = [build_proofs(hidden_states(len(one.token_ids), 48), [len(one.token_ids)]) for one in completions]
    with_proofs = [replace(one, proofs=proof.tobytes()) for one, proof in zip(completions, proofs, strict=True)]
    return rollouts_for(lease, with_proofs), np.concatenate(proofs)


def tensors_of(rollouts: Rollouts) -> Any:
    """Return the values as lists, proofs as hex."""
    arrays = {name.rpartition("_")[0]: getattr(rollouts, name) for name in rollouts.__dataclass_fields__}
    lists = {name: array.tolist() for name, array in arrays.items() if name != "proofs" and array is not None}
    return lists if rollouts.proofs_CB is None else lists | {"proofs": rollouts.proofs_CB.tobytes().hex()}


def choices(folder: Folder) -> None:
    logits = np.round(np.random.default_rng(5).normal(0, 2, (2, 12)), 1)  # some are equal
    logits[1, 3:6] = logits[1].max()
    seeds, positions = [7, 2**40], [0, 11]
    noise = gumbel_noise(seeds, positions, 12)
    cases = []
    for filters in ({}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.8, "min_p": 0.05}):
        sampling = Sampling(completion_tokens_max=1, stop_token_ids=(), **filters)
        slack = slack_of(logits, sampling)
        all_tokens = np.arange(12)
        values = {
            "slack": [[None if np.isinf(x) else float(x) for x in row] for row in slack],
            "tokens": choice_of(logits, noise, sampling).tolist(),
            "margins_of_first": margins_of(logits[[0] * 12], noise[[0] * 12], all_tokens, sampling).tolist(),
        }
        name = ", ".join(f"{name} {value}" for name, value in filters.items()) or "no filters"
        case = {"name": name, "logits": logits.tolist(), "seeds": seeds, "positions": positions, "filters": filters}
        cases.append(case | {"expect": values})
    folder.cases("choice", cases)


def compared_choices(folder: Folder) -> None:
    logits = np.round(np.random.default_rng(6).normal(0, 2, (2, 12)), 1)
    seeds, positions = [7, 2**40], [0, 11]
    noise = gumbel_noise(seeds, positions, 12)
    tokens = [0, 4]
    cases = []
    for temperature in (1.0, 0.7):
        scaled = logits / temperature
        values = {
            "cooler": cooler_of(scaled, noise, np.array(tokens)).tolist(),
            "looser": looser_of(scaled + noise, np.array(tokens)).tolist(),
        }
        given = {"logits": logits.tolist(), "seeds": seeds, "positions": positions, "tokens": tokens}
        cases.append({"name": f"temperature {temperature}", "temperature": temperature, **given, "expect": values})
    folder.cases("compared_choices", cases)
