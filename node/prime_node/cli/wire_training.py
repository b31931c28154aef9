"""The part of wire.py for the trainer: which backend, on which processes, and the parts of its loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_node.cli import wire, wire_adapters
from prime_node.cli.missing_extra import needing_extra
from prime_node.cli.wire_gpus import require_trainer_memory
from prime_node.cli.wire_rows import rows_in
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import PinnedRun, RunSpec

if TYPE_CHECKING:
    from prime_node.adapters.training.ranks import Ranks as Ranks
    from prime_node.adapters.web.http_client import HttpClient
    from prime_node.broadcast.follow.trust import Trust
    from prime_node.observe import Recorder
    from prime_node.ports.engine import Engine
    from prime_node.ports.environment import Environment, Tokenizer
    from prime_node.ports.teacher import Teacher
    from prime_node.ports.train_backend import TrainBackend
    from prime_node.ports.transport import PublishPort
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.evaluate import Evaluator
    from prime_node.trainer.lessons import Lessons
    from prime_node.trainer.trainer import Trainer

log = logging.getLogger(__name__)

EVALUATION_CACHE_BYTES = 2**28
"""Keys and values of one batch of an evaluation on a CPU, whose memory the trainer shares with all other roles of `up`."""


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    with needing_extra("trainer", "trainers"):
        from prime_node.adapters.training.ranks import is_launched
    return is_launched()


def require_device(settings: TrainerConfig) -> None:
    """Raise LocalError if torch is missing, or has no such device here."""
    with needing_extra("trainer", "trainers"):
        from prime_node.adapters.hardware import has_gpu

    for name, device in (("device", settings.device), ("evaluation_device", settings.evaluation_device)):
        if device is not None and device.startswith("cuda") and not has_gpu():
            raise LocalError(f'trainer.{name} = "{device}", but torch finds no GPU here: `prime-node doctor` says why')


def trainer_ranks(settings: TrainerConfig) -> Ranks:
    """Return the processes that torchrun started, including this one. Raises LocalError."""
    from prime_node.adapters.training.ranks import Ranks
    from prime_node.cli.launch import meeting_place

    settled = settings.ranks
    timeout = timedelta(seconds=settled.timeout_seconds)
    return Ranks.join(device=settings.device, replicas=settled.replicas, timeout=timeout, meeting=meeting_place())


def follow_first_rank(ranks: Ranks) -> None:
    """Serve the first rank as another rank until it dismisses this one. Raises LocalError."""
    from prime_node.adapters.training.leading_backend import follow

    follow(ranks)


def dismiss_ranks(ranks: Ranks) -> None:
    """Dismiss the other ranks, from the first one. They must be waiting for a call."""
    from prime_node.adapters.training.leading_backend import dismiss

    dismiss(ranks)


def train_backend(
    settings: TrainerConfig,
    spec: RunSpec,
    ranks: Ranks | None,
    *,
    model: Path,
    on_pass: Callable[[int, int], None] = lambda done, total: None,
) -> TrainBackend:
    """Return a backend in this process, or on all ranks with this one leading. Raises LocalError.

    `on_pass` gets how many passes of a batch are done, and their number; not on several ranks.
    """
    with needing_extra("trainer", "trainers"):
        from prime_node.adapters.models.lora import LoraSettings
        from prime_node.adapters.training.leading_backend import LeadingBackend
        from prime_node.adapters.training.ranks import ALONE, Ranks
        from prime_node.adapters.training.sharding import Placement
        from prime_node.adapters.training.torch_backend import make_backend
    from prime_node.algo.shares import Packing

    how = settings.ranks
    placement = Placement(
        compute_dtype=settings.compute_dtype,
        recompute=how.recompute,
        compile_backend=how.compile_backend,
        offload=how.offload,
        reduce_each_pass=how.reduce_each_pass,
    )
    initial_weights, lora = settings.initial_weights, None
    if settings.lora is not None:
        lora = LoraSettings(**settings.lora.model_dump())
    if spec.adapters is not None:
        if lora is not None:
            raise LocalError(
                "trainer.lora: this run's policies are adapters already, and its RunSpec says which; leave it out"
            )
        wire_adapters.base_weights(spec.adapters, initial_weights)  # check the base model before anything is computed
        initial_weights = initial_weights or spec.adapters.base
        adapters = spec.adapters
        lora = LoraSettings(adapters.rank, adapters.alpha, adapters.targets, alone=True, unit_log2=adapters.unit_log2)
    if settings.on_gpu:
        rank = None if lora is None else lora.rank
        require_trainer_memory(settings, model, nproc=1 if ranks is None else ranks.count, adapter_rank=rank)
    make = partial(
        make_backend,
        model_folder=model,
        initial_weights=initial_weights,
        seed=settings.seed,
        temperature=spec.sampling.temperature,
        packing=settings.packing or (Packing.SEQUENCES if settings.on_gpu else Packing.TREE),
        row_tokens=settings.row_tokens,
        micro_batch_tokens=settings.micro_batch_tokens,
        device=settings.device,
        threads=settings.threads,
        placement=placement,
        lora=lora,
        critic=None if settings.critic is None else settings.critic.settings(),
    )
    if ranks is None:
        return make(Ranks.single(device=settings.device) if placement.needs_ranks else ALONE, on_pass=on_pass)
    return LeadingBackend(make, ranks)


def teacher_of(settings: TrainerConfig) -> Teacher | None:
    """Return the teacher that the settings name."""
    if settings.teacher is None:
        return None
    from prime_node.adapters.engines.vllm_teacher import VllmTeacher

    return VllmTeacher(settings.teacher.url, model=settings.teacher.model)


@contextlib.asynccontextmanager
async def trainer_rows(settings: TrainerConfig, run: PinnedRun, folder: Path) -> AsyncIterator[Recorder]:
    """Open the trainer's metrics: metrics.jsonl always, and the services that the settings name. Raises LocalError."""
    from prime_node.observe import Headlines, Recorders
    from prime_node.trainer.rows import line_of

    files = rows_in(folder, run, tensorboard=settings.tensorboard, wandb_project=settings.wandb_project)
    rows: Recorder = Recorders(files, Headlines(line_of))
    async with contextlib.AsyncExitStack() as stack:
        if settings.metrics_port is not None:
            with needing_extra("operator", "metrics for Prometheus"):
                from prime_node.adapters.prometheus_metrics import PrometheusMetrics
            from prime_node.adapters.web.aiohttp_server import AiohttpServer
            from prime_node.observe import Gauges
            from prime_node.ports.web import CallerBounds
            from prime_node.trainer.rows import metrics_route

            metrics, server = PrometheusMetrics(), AiohttpServer()
            any_name = CallerBounds(is_host=lambda address, host: True)  # figures alone, for a monitoring system
            port = await server.start(
                [metrics_route(metrics)], host=settings.metrics_host, port=settings.metrics_port, bounds=any_name
            )
            stack.push_async_callback(server.stop, grace_s=1.0)
            log.info("metrics on http://%s:%d/metrics", settings.metrics_host, port)
            rows = Recorders(rows, Gauges(metrics, prefix="prime_trainer_"))
        yield rows


def trainer_evaluator(
    run: PinnedRun,
    settings: TrainerConfig,
    backend: TrainBackend,
    model: Path,
    tokenizer: Tokenizer,
    environments: Mapping[str, Environment],
) -> Evaluator | None:
    """Return the trainer's evaluator, None if the settings ask for no evaluation.

    Its engine computes with the trainer's own weights where one process holds them whole. Raises LocalError.
    """
    if not settings.evaluates:
        return None
    from prime_node.adapters.training.torch_backend import TorchBackend

    shares = isinstance(backend, TorchBackend) and settings.evaluation_device is None
    tensors = backend.shared_tensors() if isinstance(backend, TorchBackend) and shares else None
    device = settings.evaluation_device or settings.device
    in_bf16 = tensors is None and device != "cpu" and settings.compute_dtype == "bf16"
    options: dict[str, Any] = {"cache_bytes_max": EVALUATION_CACHE_BYTES} if device == "cpu" else {}
    dtype = "bf16" if in_bf16 else "fp32"
    made = wire.transformers_engine(
        model, dtype=dtype, threads=settings.threads, device=device, tensors=tensors, **options
    )
    engine = wire_adapters.merging_engine(made, run, settings.initial_weights)
    return evaluator_of(run, settings, engine, tokenizer, environments)


def evaluator_of(
    run: PinnedRun,
    settings: TrainerConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    environments: Mapping[str, Environment],
) -> Evaluator:
    """Return an evaluator of a run's policies, with an engine on this machine."""
    from prime_node.envs.episodes import bounds_of
    from prime_node.trainer.evaluate import Evaluator, held_out

    stopping = settings.sft.check_problems
    questions = held_out(environments, tokenizer, evaluation=settings.evaluation_problems, stopping=stopping)
    return Evaluator(
        engine,
        tokenizer,
        questions,
        run.spec.sampling,
        seed=settings.evaluation_seed,
        samples=settings.evaluation_samples,
        pass_at=settings.evaluation_pass_at,
        bounds=bounds_of(run.spec),
    )


def lessons_of(
    spec: RunSpec, settings: TrainerConfig, worlds: Mapping[str, Environment], tokenizer: Tokenizer
) -> Lessons:
    """Return the sampler of the supervised phase's problems."""
    from prime_node.trainer.lessons import Lessons

    shares = {environment.name: environment.weight for environment in spec.environments}
    sft = settings.sft
    return Lessons(worlds, shares, tokenizer, seed=settings.seed, problems=sft.problems, batch_size=sft.batch_size)


def trainer_parts(
    run: PinnedRun,
    client: HttpClient,
    key: SigningKey,
    settings: TrainerConfig,
    backend: TrainBackend,
    metrics: Recorder,
    *,
    trust: Trust,
    publish_to: PublishPort,
    worlds: dict[str, Environment],
    model: Path,
    folder: Path,
) -> Trainer:
    """Return all parts of the trainer's loop. Raises LocalError."""
    from prime_node.broadcast.publish.publisher import Publisher
    from prime_node.trainer.checkpointing import Checkpoints
    from prime_node.trainer.committing import Committer
    from prime_node.trainer.further_rewards import KeptRewards
    from prime_node.trainer.trainer import Trainer, record_published
    from prime_node.training_data.feed import Feed, KeptBundles

    spec, read = run.spec, wire.tokenizer(model)
    wire.check_model(model, run)
    return Trainer(
        run=run,
        config=settings,
        backend=backend,
        feed=Feed(
            client,
            run,
            clock=wire.clock(),
            wait_seconds=settings.wait_seconds,
            verified=trust.verified,
            copies=KeptBundles(folder / "bundles"),
        ),
        publisher=Publisher(
            publish_to,
            run,
            key,
            clock=wire.clock(),
            cosigners=_cosigners(run, key, settings.cosign_keys),
            pending_max=spec.async_level,
            rules=settings.publish.rules(),
            on_published=record_published(metrics),
            folder=folder,
            copy_of=backend.copy_of,
        ),
        evaluator=trainer_evaluator(run, settings, backend, model, read, worlds),
        rewards=KeptRewards(folder / "rewards"),
        lessons=lessons_of(spec, settings, worlds, read),
        checkpoints=Checkpoints(
            folder / "checkpoints",
            run=run.digest,
            kept=settings.checkpoints_kept,
            keep_every=settings.checkpoints_keep_every,
        ),
        metrics=metrics,
        clock=wire.clock(),
        teacher=teacher_of(settings),
        committer=None if spec.replay is None else Committer(spec.replay, folder / "states"),
    )


def _cosigners(run: PinnedRun, key: SigningKey, files: Sequence[Path]) -> list[SigningKey]:
    """Return the trainer's other keys. Raises LocalError before computing anything that could not be published."""
    from prime_node.keyfile import load_key

    cosigners = [load_key(file) for file in files]
    trainers = run.keys.current.of(Role.TRAINER)
    ours = {one.key_id for one in (key, *cosigners)}.intersection(trainers)
    if len(ours) < (needed := run.keys.current.threshold(Role.TRAINER)):
        raise LocalError(
            f"manifests need {needed} of the trainer keys {', '.join(trainers)} by key ring {run.keys.version}, and this trainer "
            f"has {len(ours)}: give it the right key, and more in trainer.cosign_keys"
        )
    return cosigners
