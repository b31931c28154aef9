"""Golden vectors of hidden-state proofs. See make_vectors.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_protocol.assignment import Lease
from prime_protocol.proof import build_proofs
from prime_protocol.rollout import Completion, Rollouts, rollouts_for
from vectors_folder import Case, Folder


def hidden_states(num_tokens: int, size: int) -> npt.NDArray[np.uint16]:
    """bf16 values of both signs and many exponents, some of them equal in size, as bits [T, D]."""
    places = np.arange(num_tokens * size)
    return ((places * 40_503 % 30_000 + 1_000) | ((places % 3 == 0) << 15)).astype(np.uint16).reshape(-1, size)


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
    """As lists; proofs as hex."""
    arrays = {name.rpartition("_")[0]: getattr(rollouts, name) for name in rollouts.__dataclass_fields__}
    lists = {name: array.tolist() for name, array in arrays.items() if name != "proofs" and array is not None}
    return lists if rollouts.proofs_CB is None else lists | {"proofs": rollouts.proofs_CB.tobytes().hex()}
