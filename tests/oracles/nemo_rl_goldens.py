"""Inputs and results of NeMo-RL's own golden cases of its clipped loss, in float64.

Numbers from NVIDIA-NeMo/RL, tests/unit/algorithms/data/clipped_pg_loss_goldens.json at 4e6a3f23, made by its loss at aa739509.
Tokens that its masks leave out are left out here: three of the first sequence and two of the second. Its divisors are 1e-8
larger than the counts, so its results are smaller by a part in 5e8.

Left out: `kl_on_policy_unfiltered`, whose reference term goes through the sampling too, and both `vapo` cases, whose term of
positive examples is absent here. docs/algorithms.md names both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LENGTHS = (3, 2)
NOW = (-1.6, -0.8, -1.1, -0.7, -1.4)
BEFORE = (-1.0, -1.1, -0.8, -0.9, -1.0)
SAMPLED = (-1.2, -1.5, -0.7, -1.4, -0.7)
ADVANTAGES = (1.2, -0.7, 0.4, -1.1, 0.6)


@dataclass(frozen=True)
class Golden:
    """One case: this project's settings for NeMo-RL's, the loss, and its gradient at each token."""

    loss: str
    value: float
    gradient: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    before: tuple[float, ...] | None = BEFORE
    sampled: tuple[float, ...] = SAMPLED


_PPO = (-0.13171479239913675, 0.18898023268267997, -0.05926545753600652, 0.26870860625782017, -0.08043840536339991)
_ALL = (-0.23999999952, 0.13999999972, -0.07999999984, 0.21999999956000002, -0.11999999976)
_BEFORE_FAR = (-1.0, -3.0, -0.8, -0.9, -1.0)

GOLDENS = {
    "ppo_token": Golden("grpo", 0.18627018364195694, _PPO),
    "force_on_policy": Golden("grpo", -0.07999999984, _ALL, before=None),
    "reinforce": Golden("gpg", 0.373999999252, _ALL),
    "dual_clip": Golden(
        "ppo_clip",
        0.417289950119277,
        (_PPO[0], 0.0, *_PPO[2:]),
        kwargs={"dual_clip": 3.0},
        before=None,
        sampled=_BEFORE_FAR,  # the loss ppo_clip has the ratio to the sampler
    ),
    "cispo_with_token_is": Golden(
        "cispo",
        0.03329652014119518,
        (-0.23450932909773395, 0.2506265487024803, -0.057909594638482234, 0.435262414594309, -0.07111854904320782),
        {"rollout_is": "token", "rollout_is_threshold": "inf"},
        {"eps_low": 0.2, "eps_high": 0.2},
    ),
    "tis_token": Golden(
        "tis",
        0.3209028399844618,
        (-0.1608768107267998, 0.24567430248748398, -0.05362560357559994, 0.3493211881351662, -0.059590236335788666),
        kwargs={"weight_min": 0.7, "weight_max": 1.3},
    ),
    "icepop_token": Golden(
        "mis",
        -0.21450241430239975,
        (-0.1608768107267998, 0.0, -0.05362560357559994, 0.0, 0.0),
        kwargs={"weight_min": 0.75, "weight_max": 1.25},
    ),
    "seq_mask_tis": Golden(
        "grpo",
        0.383435358421665,
        (0.0, 0.0, 0.0, 0.4430255947574536, -0.059590236335788666),
        {
            "rollout_is": "token",
            "rollout_is_threshold": "inf",
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": f"{1 / 1.15}_{1 / 0.95}",  # of mu / pi_prox; NeMo-RL's are of pi_prox / mu
        },
    ),
    "gspo_sequence_is": Golden(
        "gspo",
        -0.06433245613699731,
        (-0.06749293963637779,) * 3 + (0.06907318137816686,) * 2,
        {"rollout_is": "sequence", "rollout_is_threshold": "inf"},
        {"eps_low": 0.2, "eps_high": 0.2},
    ),
}
