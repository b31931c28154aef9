"""Losses, one file a family: formulas per token, to minimise. base.py defines a loss's inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prime_node.algo.losses.base import LossFunction, LossInputs, LossOutputs, needs
from prime_node.algo.losses.clipped import (
    dapo,
    decoupled_ppo,
    dr_grpo,
    grpo,
    grpo_is,
    gspo,
    mis,
    ppo_clip,
    tis,
)
from prime_node.algo.losses.covariance import choose_clip_cov, choose_kl_cov, clip_cov, kl_cov
from prime_node.algo.losses.distillation import Distillation, opd, sft
from prime_node.algo.losses.objective import LOG_RATIO_ABS, Aggregation, BoundLoss, LossSum, Objective
from prime_node.algo.losses.penalty import NO_PENALTY, Penalty
from prime_node.algo.losses.rollout_correction import NO_CORRECTION, RolloutCorrection
from prime_node.algo.losses.weighted import (
    aipo,
    aipo_stop_gradient,
    cispo,
    dppo_binary_kl,
    dppo_binary_tv,
    dppo_kl,
    gmpo,
    gpg,
    sapo,
)
from prime_node.algo.registry import find_by_name, import_object
from prime_node.ports.train_backend import AggregationKind
from prime_node.ports.train_samples import TrainingMode
from prime_protocol.errors import LocalError

__all__ = [
    "LOG_RATIO_ABS",
    "LOSSES",
    "Aggregation",
    "AggregationKind",
    "Distillation",
    "LossInputs",
    "LossOutputs",
    "LossSum",
    "Objective",
    "Penalty",
    "RolloutCorrection",
    "find_loss",
    "needs",
]


@dataclass(frozen=True, slots=True)
class KnownLoss:
    """A loss and its paper's aggregation."""

    function: LossFunction
    aggregation: AggregationKind = AggregationKind.TOKEN_MEAN
    choose: Callable[..., set[int]] | None = None
    """Choice of the tokens that it treats differently, by its settings."""


LOSSES: Mapping[str, KnownLoss] = {
    "aipo": KnownLoss(aipo),
    "aipo_stop_gradient": KnownLoss(aipo_stop_gradient),
    "cispo": KnownLoss(cispo),
    "clip_cov": KnownLoss(clip_cov, choose=choose_clip_cov),
    "dapo": KnownLoss(dapo),
    "decoupled_ppo": KnownLoss(decoupled_ppo),
    "dppo_binary_kl": KnownLoss(dppo_binary_kl),
    "dppo_binary_tv": KnownLoss(dppo_binary_tv),
    "dppo_kl": KnownLoss(dppo_kl),
    "dr_grpo": KnownLoss(dr_grpo, AggregationKind.CONSTANT_LENGTH),
    "gmpo": KnownLoss(gmpo, AggregationKind.SEQUENCE_MEAN),
    "gpg": KnownLoss(gpg),
    "grpo": KnownLoss(grpo),
    "grpo_is": KnownLoss(grpo_is),
    "gspo": KnownLoss(gspo, AggregationKind.SEQUENCE_MEAN),
    "kl_cov": KnownLoss(kl_cov, choose=choose_kl_cov),
    "mis": KnownLoss(mis),
    "opd": KnownLoss(opd),
    "ppo_clip": KnownLoss(ppo_clip),
    "sapo": KnownLoss(sapo, AggregationKind.SEQUENCE_MEAN),
    "sft": KnownLoss(sft),
    "tis": KnownLoss(tis),
}


def find_loss(
    name: str,
    *,
    import_path: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    aggregation: AggregationKind | None = None,
    constant_length: int | None = None,
    penalty: Penalty = NO_PENALTY,
    correction: RolloutCorrection = NO_CORRECTION,
    distillation: Distillation | None = None,
) -> Objective:
    """Return an objective whose mode `rl` is the loss of this name, or a custom one by `import_path`.

    `import_path` is "package.module.function". `kwargs` are the loss's settings; `aggregation` defaults to the paper's.
    `penalty` is added to it, after `correction` has weighed it. A custom loss is called for each sequence separately. The
    modes `sft` and `opd` are the losses of these names, unless `distillation` replaces the second; `opsd` has the loss of `opd`.
    Raises LocalError.
    """
    settings = dict(kwargs or {})
    known = find_by_name("loss", name, LOSSES) if import_path is None else KnownLoss(import_object(import_path))
    try:
        inspect.signature(known.function).bind(None, **settings)
    except TypeError as error:
        raise LocalError(f"loss {import_path or name}: {error}") from None
    taught = BoundLoss(opd, settings if name == "opd" else {}) if distillation is None else BoundLoss(distillation, {})
    return Objective(
        {
            TrainingMode.RL: BoundLoss(
                known.function,
                settings,
                per_sequence=import_path is not None,
                penalty=penalty,
                correction=correction,
                choose=known.choose,
            ),
            TrainingMode.OPD: taught,
            TrainingMode.OPSD: taught,
            TrainingMode.SFT: BoundLoss(sft, {}),
        },
        Aggregation(aggregation or known.aggregation, constant_length),
    )
