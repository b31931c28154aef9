"""The only place that chooses adapters. Everything is imported on use: `verify` must not wait for torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from prime_node.cli import wire_adapters
from prime_node.cli.missing_extra import needing_extra
from prime_node.cli.place import HOME, named_in
from prime_node.cli.wire_classes import (
    engine_info,
    has_gpu_driver,
    parts_of_kind,
    slow_arithmetic,
    vllm_extra,
    worker_kind,
)
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import JoinLink, PinnedRun, RunSpec

if TYPE_CHECKING:
    from prime_node.adapters.engines.transformers_engine import TransformersEngine
    from prime_node.adapters.engines.vllm_engine import VllmEngine
    from prime_node.adapters.environments.launcher import Launcher
    from prime_node.adapters.storage.folder_source import FolderSource
    from prime_node.adapters.system_clock import SystemClock
    from prime_node.adapters.web.http_client import HttpClient as HttpClient  # cli names it too
    from prime_node.broadcast.follow.trust import LinkedPeers, Trust
    from prime_node.config import SandboxSettings
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.ports.engine import Engine
    from prime_node.ports.environment import Environment, Tokenizer, TurnEnvironment
    from prime_node.ports.transport import PublicSource
    from prime_node.ports.web import WebServer
    from prime_node.validator.scoring_workers import ScoringWorkers
    from prime_node.worker.config import WorkerConfig
    from prime_protocol.telemetry import Hardware
    from prime_protocol.weights import Weights

log = logging.getLogger(__name__)


def clock() -> SystemClock:
    """Return the machine's own clock."""
    from prime_node.adapters.system_clock import SystemClock

    return SystemClock()


def web_server() -> WebServer:
    """Return an HTTP server."""
    from prime_node.adapters.web.aiohttp_server import AiohttpServer

    return AiohttpServer()


# Sources


def client(link: JoinLink, key: SigningKey) -> HttpClient:
    """Return a role's client of the coordinator, for use as a context manager."""
    from prime_node.adapters.web.http_client import HttpClient

    return HttpClient(link.url, run=link.run, clock=clock(), key=key)


@contextlib.asynccontextmanager
async def public_source(
    url: str, *, stall_s: float | None = None, key: SigningKey | None = None, run: str | None = None
) -> AsyncIterator[HttpClient]:
    """Open the public half of a coordinator or of a mirror, or with an auditor's key also its bundles.

    Callers that read much from it wrap it in paced(). With a key, `run` or the URL names the run's digest.

    Raises LocalError for an address that is none.
    """
    from prime_node.adapters.web.http_answers import STALL_S
    from prime_node.adapters.web.http_client import HttpClient

    named = named_in(url)  # checks the address first
    parts = urlsplit(url)
    base = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    async with HttpClient(base, run=run or named or "", clock=clock(), stall_s=stall_s or STALL_S, key=key) as client:
        yield client


def paced(source: PublicSource) -> PublicSource:
    """Return the same source, abandoned if it is too slow on average."""
    from prime_node.broadcast.audit.paced import PacedSource

    return PacedSource(source, clock=clock())


def folder_source(folder: Path, *, archived: Path | None = None) -> FolderSource:
    """Return a source that reads a published folder, and bundles for auditors from a folder of their own."""
    from prime_node.adapters.storage.folder_source import FolderSource

    return FolderSource(folder, archived=archived)


# Parts of a run


async def pinned_run(client: HttpClient, digest: str, folder: Path, *, mirrors: Sequence[str] = ()) -> PinnedRun:
    """Return the run of that digest, with its configuration and tokenizer in `folder`/model.

    They come from the coordinator, or from a mirror if it is unreachable. Waits while none answers. Raises RemoteError, or
    LocalError for unreadable files.
    """
    from prime_node.adapters.models.model_folder import require_listed, require_plain
    from prime_node.adapters.web.http_client import HttpClient
    from prime_node.broadcast.follow.pinned import fetch_model_files, fetch_run
    from prime_node.patience import ask_until_answered

    async with contextlib.AsyncExitStack() as stack:
        others = [await stack.enter_async_context(HttpClient(url, run=digest, clock=clock())) for url in mirrors]
        sources = (client, *others)
        run = await fetch_run(digest, *sources, clock=clock())
        for source in sources:
            source.bounds = run.spec.limits
        client.also_at(run.spec.coordinators)
        require_listed(run.spec.model_files)
        fetch = partial(fetch_model_files, sources, run, folder / "model")
        await ask_until_answered(fetch, what="the run's model files", clock=clock())
    await asyncio.to_thread(require_plain, folder / "model")
    return run


def tokenizer(model: Path) -> Tokenizer:
    """Return the tokenizer in a model folder. Raises LocalError."""
    from prime_node.adapters.models.hf_tokenizer import HfTokenizer

    return HfTokenizer(model)


def environments(spec: RunSpec, model: Path, settings: EnvironmentSettings, *, folder: Path) -> dict[str, Environment]:
    """Return all environments of a run by name, in a process that cannot open the role's `folder`. Raises LocalError."""
    from prime_node.cli.wire_environments import start_environments

    return dict(start_environments(spec.environments, model, hidden=_secrets(folder), settings=settings))


def scoring_workers(
    spec: RunSpec,
    model: Path,
    settings: EnvironmentSettings,
    launcher: Launcher | None,
    *,
    folder: Path,
    workers_max: int,
) -> ScoringWorkers:
    """Return a validator's scoring workers, at most `workers_max`: each has all environments of the run, in its own process.

    `launcher` starts the processes if this process has confined itself.
    """
    from prime_node.cli.wire_environments import end_environments, start_environments
    from prime_node.validator.scoring_workers import ScoringWorkers

    start = partial(
        start_environments, spec.environments, model, hidden=_secrets(folder), settings=settings, launcher=launcher
    )
    return ScoringWorkers(start, workers_max=workers_max, end=end_environments)


def check_environments(spec: RunSpec, model: Path, settings: EnvironmentSettings, *, folder: Path) -> None:
    """Check that the environments can be built. Raises LocalError."""
    from prime_node.cli.wire_environments import end_environments, start_environments

    end_environments(start_environments(spec.environments, model, hidden=_secrets(folder), settings=settings))


def turn_environments(
    spec: RunSpec, model: Path, settings: EnvironmentSettings, launcher: Launcher | None, *, folder: Path
) -> dict[str, TurnEnvironment]:
    """Return the environments that a worker must run because they answer the model, in their own process.

    Raises LocalError.

    `launcher` starts the process if this process has confined itself.
    """
    from prime_node.cli.wire_environments import start_environments
    from prime_node.ports.environment import TurnEnvironment

    answering = [each for each in spec.environments if each.turns_max > 1]
    if not answering:
        return {}
    made = start_environments(answering, model, hidden=_secrets(folder), settings=settings, launcher=launcher)
    return {name: each for name, each in made.items() if isinstance(each, TurnEnvironment)}


def environment_launcher(settings: EnvironmentSettings, sandbox: SandboxSettings, *, folder: Path) -> Launcher | None:
    """Return a launcher for a role that will confine itself and start its environments later; None if it has no benefit."""
    from prime_node.cli.wire_environments import open_launcher

    return open_launcher(settings, hidden=_secrets(folder), changeable=(folder, *sandbox.also_write))


def _secrets(folder: Path) -> tuple[Path, ...]:
    """Return what no environment may open, wherever the role's folder is."""
    return folder, folder.parent / "keys", HOME


# Parts of the roles


async def trust(
    run: PinnedRun, sources: Sequence[tuple[str, HttpClient]], folder: Path, *, peers: LinkedPeers = tuple
) -> Trust:
    """Return the run's key rings and timestamps, refreshed before anything is verified with them.

    Waits for each key ring that this machine knew and has lost. Raises LocalError.
    """
    from prime_node.broadcast.follow.trust import Trust

    made = Trust(run, sources, folder / "trust", clock=clock(), peers=peers)
    await made.start()
    return made


def check_model(model: Path, run: PinnedRun) -> None:
    """Check, before anything is built, that run and model fit together: vocabulary, lengths, size. Raises LocalError."""
    with needing_extra("trainer", "the transformers engine, validators and the trainer"):
        from prime_node.adapters.models.model_config import require_fitting, require_within

    longest = max(map(run.spec.context_tokens_max, run.spec.environments))
    require_fitting(model, vocab_size=run.spec.vocab_size, context_tokens_max=longest)
    if run.spec.adapters is not None:
        return  # policies are small, and the base is not published
    require_within(model, checkpoint_bytes_max=run.spec.limits.checkpoint_bytes_max)


def transformers_engine(
    model: Path, *, dtype: str, threads: int, device: str = "cpu", **options: Any
) -> TransformersEngine:
    """Return the transformers engine with further `options`. Raises LocalError."""
    with needing_extra("trainer", "the transformers engine, validators and the trainer"):
        from prime_node.adapters.engines.transformers_engine import TransformersEngine
    dtype = "fp32" if dtype == "auto" else dtype
    if dtype not in ("fp32", "bf16"):
        raise LocalError(f"the transformers engine computes in fp32 or bf16, not in {dtype}: vLLM does")
    return TransformersEngine(model, dtype=dtype, threads=threads, device=device, **options)


def _vllm() -> type[VllmEngine]:
    with needing_extra(vllm_extra(), "the vLLM engine"):
        from prime_node.adapters.engines.vllm_engine import VllmEngine
    return VllmEngine


def plain_engine(
    kind: str,
    model: Path,
    *,
    threads: int,
    context_tokens_max: int,
    cpu_cache_gib: float = 1.0,
    gpu_memory_share: float | None = None,
) -> Engine:
    """Return an engine outside of any run. Raises LocalError.

    Example: plain_engine("vllm/bf16", folder, ...).
    """
    name, dtype, device = parts_of_kind(kind)
    if name == "transformers":
        return transformers_engine(model, dtype=dtype, threads=threads, device=device)
    return _vllm()(
        model,
        dtype=dtype,
        context_tokens_max=context_tokens_max,
        cpu_cache_gib=cpu_cache_gib,
        gpu_memory_share=gpu_memory_share,
    )


def plain_weights(model: Path, *, random_seed: int | None) -> Weights:
    """Return a model folder's own weights, or random ones for its configuration. Raises LocalError."""
    if random_seed is not None:
        from prime_node.adapters.models.tiny_model import initial_weights

        return initial_weights(model, random_seed)
    from prime_node.adapters.models.pretrained_model import pretrained_weights

    return pretrained_weights(str(model))


def num_parameters(model: Path) -> int:
    """Return the number of a model's parameters, counted without memory for them. Raises LocalError."""
    from prime_node.adapters.models.model_config import model_shape

    return model_shape(model).parameters


def describe_hardware() -> Hardware:
    """Return what this machine computes with."""
    if not has_gpu_driver():
        from prime_node.adapters.machine import machine

        return machine()
    from prime_node.adapters.hardware import hardware as found

    return found()


def engine(settings: WorkerConfig, model: Path, run: PinnedRun, *, cheat: tuple[str, int] | None) -> Engine:
    """Return the worker's engine. `cheat` is (kind, number of honest policies), for demonstrations. Raises LocalError."""
    made: Engine
    check_model(model, run)
    info = engine_info(settings)
    if reason := slow_arithmetic(worker_kind(settings)):
        log.warning("%s", reason)
    if info.name == "vllm":
        vllm = _vllm()
        bounds = max(map(run.spec.context_tokens_max, run.spec.environments))
        chosen = settings.model_dump(
            include={
                *("cpu_cache_gib", "gpu_memory_share", "sequences_max", "tensor_parallel"),
                *("dtype", "model_runner", "seeded"),
            }
        )
        made = vllm(model, context_tokens_max=bounds, checks=run.spec.checks, **chosen)
    else:
        made = transformers_engine(model, dtype=settings.dtype, threads=settings.threads)
    made = wire_adapters.merging_engine(made, run, settings.base_model)
    if cheat is None:
        return made
    from prime_node.worker.cheats import cheating_engine

    return cheating_engine(made, cheat[0], honest_loads=cheat[1])
