"""The training engine's part of wire.py: which backend, on which processes."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli.wire import missing_extra
from prime_protocol.run_spec import RunSpec

if TYPE_CHECKING:
    from prime_node.adapters.ranks import Ranks as Ranks
    from prime_node.ports.train_backend import TrainBackend
    from prime_node.trainer.config import TrainerConfig


def is_launched() -> bool:
    """Whether torchrun started this process."""
    try:
        from prime_node.adapters.ranks import is_launched
    except ImportError as error:
        raise missing_extra("train", "the trainer", error) from None
    return is_launched()


def trainer_ranks(settings: TrainerConfig) -> Ranks:
    """The processes that torchrun started, this one among them. Raises LocalError."""
    from prime_node.adapters.ranks import Ranks

    timeout = timedelta(seconds=settings.ranks.timeout_seconds)
    return Ranks.join(device=settings.device, replicas=settings.ranks.replicas, timeout=timeout)


def follow(ranks: Ranks) -> None:
    """A rank that is not the first works here until the first one dismisses it. Raises LocalError."""
    from prime_node.adapters.leading_backend import follow

    follow(ranks)


def dismiss(ranks: Ranks) -> None:
    """The first rank: the others may go. They must be waiting for a call."""
    from prime_node.adapters.leading_backend import dismiss

    dismiss(ranks)


def train_backend(settings: TrainerConfig, spec: RunSpec, ranks: Ranks | None, *, model: Path) -> TrainBackend:
    """In this process, or on all ranks, which this one then leads. Raises LocalError."""
    from prime_node.adapters.leading_backend import LeadingBackend
    from prime_node.adapters.ranks import ALONE, Ranks
    from prime_node.adapters.sharding import Placement
    from prime_node.adapters.torch_backend import make_backend

    how = settings.ranks
    placement = Placement(
        compute_dtype=how.compute_dtype,
        recompute=how.recompute,
        compile_backend=how.compile_backend,
        offload=how.offload,
        reduce_each_pass=how.reduce_each_pass,
    )
    make = partial(
        make_backend,
        model_folder=model,
        initial_weights=settings.initial_weights,
        seed=settings.seed,
        temperature=spec.sampling.temperature,
        packing=settings.packing,
        row_tokens=settings.row_tokens,
        micro_batch_tokens=settings.micro_batch_tokens,
        device=settings.device,
        threads=settings.threads,
        placement=placement,
    )
    if ranks is None:
        return make(Ranks.single(device=settings.device) if placement.needs_ranks else ALONE)
    return LeadingBackend(make, ranks)
