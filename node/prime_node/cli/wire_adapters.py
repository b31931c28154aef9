"""The part of wire.py for runs whose policies are adapters: the base model, and the engines that merge."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from prime_protocol.adapters import AdapterSpec, unit_for
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights, root_of

if TYPE_CHECKING:
    from prime_node.coordinator.new_run import RunConfig
    from prime_node.ports.engine import Engine, SamplingScorer


def adapter_spec(config: RunConfig) -> AdapterSpec | None:
    """Return what a new run's spec says about its adapters, including the base's state root. Raises LocalError."""
    from prime_node.coordinator.new_run import PretrainedModel

    wanted, model = config.adapters, config.model
    if wanted is None:
        return None
    if not isinstance(model, PretrainedModel):
        raise LocalError('[run.adapters] need a base that others can download: model = { kind = "pretrained", ... }')
    place = Path(model.name_or_path).expanduser()
    return AdapterSpec(
        base=place.resolve().name if place.is_dir() else model.name_or_path,
        base_root=_root(_pretrained(model.name_or_path)),
        rank=wanted.rank,
        alpha=wanted.alpha,
        targets=wanted.targets,
        unit_log2=unit_for(wanted.rank, wanted.alpha),
    )


def base_weights(adapters: AdapterSpec, here: str | None) -> Weights:
    """Load the base model, from this machine's copy or else by its name, and check its state root. Raises LocalError.

    The run's name for it leads to the hub alone, never to a path of this machine.
    """
    from prime_node.adapters.models.pretrained_model import hub_weights

    name = here or adapters.base
    weights = _pretrained(here, follows_links=True) if here else hub_weights(adapters.base)
    found = _root(weights)
    if found != adapters.base_root:
        raise LocalError(
            f"base model {name}: its state root is {found[:16]}, but the run's adapters belong to "
            f"{adapters.base_root[:16]} ({adapters.base}); get that one, in its original type, and name its folder in base_model"
        )
    return weights


def merging_engine(engine: Engine, run: PinnedRun, here: str | None) -> Engine:
    """Return the engine; for adapter policies wrap it in one that first merges them into the base. Raises LocalError."""
    if run.spec.adapters is None:
        return engine
    from prime_node.adapters.engines.merging_engine import MergingEngine

    return MergingEngine(engine, base_weights(run.spec.adapters, here), run.spec.adapters)


def merging_scorer(scorer: SamplingScorer, run: PinnedRun, here: str | None) -> SamplingScorer:
    """Return a validator's scorer, wrapped in the same way. Raises LocalError."""
    if run.spec.adapters is None:
        return scorer
    from prime_node.adapters.engines.merging_engine import MergingScorer

    return MergingScorer(scorer, base_weights(run.spec.adapters, here), run.spec.adapters)


def _pretrained(name: str, *, follows_links: bool = False) -> Weights:
    from prime_node.adapters.models.pretrained_model import pretrained_weights

    return pretrained_weights(name, follows_links=follows_links)


def _root(weights: Weights) -> str:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return root_of(weights, pool=pool)
