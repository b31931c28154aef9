"""The part of wire.py for `prime-node replay`: which source, environments and backend re-execute a step."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli import wire, wire_training
from prime_node.cli.wire_classes import has_gpu_driver
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX

if TYPE_CHECKING:
    from prime_node.cli.wire_training import Ranks
    from prime_node.ports.environment import Environment
    from prime_node.ports.transport import LedgerSource, ReplaySource
    from prime_node.replay.material import Material
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.step_runner import StepRunner
    from prime_node.training_data.feed import Feed
    from prime_protocol.run_spec import PinnedRun


async def replay_model(source: ReplaySource, run: PinnedRun, folder: Path) -> Path:
    """Return a folder with the run's configuration and tokenizer, which hold no code. Raises RemoteError or LocalError."""
    from prime_node.adapters.models.model_folder import require_listed, require_plain
    from prime_node.broadcast.follow.pinned import fetch_model_files

    require_listed(run.spec.model_files)
    await fetch_model_files([source], run, folder / "model")
    await asyncio.to_thread(require_plain, folder / "model")
    return folder / "model"


def take_bounds(source: ReplaySource, run: PinnedRun) -> None:
    """Let a source that was opened for a target send blobs as large as the run's, bundles among them."""
    from prime_node.adapters.storage.folder_source import FolderSource
    from prime_node.adapters.web.http_client import HttpClient

    assert isinstance(source, FolderSource | HttpClient), "open_source opens a target so"
    bounds = run.spec.limits
    bytes_max = max(bounds.blob_bytes_max, bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX)
    source.bounds = bounds.model_copy(update={"blob_bytes_max": bytes_max})


def as_ledger(source: ReplaySource) -> LedgerSource:
    """Return the ledger of a coordinator that was opened by its URL."""
    from prime_node.adapters.web.http_client import HttpClient

    assert isinstance(source, HttpClient), "open_source opens a URL so"
    return source


def replay_runner(
    material: Material,
    config: TrainerConfig,
    feed: Feed,
    worlds: dict[str, Environment],
    model: Path,
    *,
    numerics: str,
    genesis: bool,
    ranks: Ranks | None = None,
) -> StepRunner:
    """Return the trainer's parts that compute steps. Raises LocalError.

    `numerics` names the device and the type to compute with, where this machine has them. Whole weights come from a training
    state, so only `genesis` and adapters need those that the recipe names.
    """
    from prime_node.trainer.config import RanksConfig
    from prime_node.trainer.step_runner import StepRunner

    named = numerics.split("/")
    if len(named) > 3 and named[3] == "bf16":
        config = config.model_copy(update={"ranks": RanksConfig(compute_dtype="bf16")})
    if len(named) > 1 and named[1] == "cuda" and has_gpu_driver():
        config = config.model_copy(update={"device": "cuda"})
    if not genesis and config.lora is None and material.run.spec.adapters is None:
        critic = None if config.critic is None else config.critic.model_copy(update={"initial_weights": None})
        config = config.model_copy(update={"initial_weights": None, "critic": critic})
    wire_training.require_device(config)
    spec = material.run.spec
    lessons = wire_training.lessons_of(spec, config, worlds, wire.tokenizer(model))
    on_pass = partial(material.progress.note, "passes")
    backend = wire_training.train_backend(config, spec, ranks, model=model, on_pass=on_pass)
    return StepRunner(run=material.run, config=config, backend=backend, feed=feed, lessons=lessons, clock=wire.clock())
