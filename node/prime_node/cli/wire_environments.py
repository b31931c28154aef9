"""Where environments are chosen, by the ids that a RunSpec may name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli.missing_extra import missing_extra
from prime_node.envs.dataset import COMPARISONS, DatasetSource, Row, read_json_lines
from prime_node.envs.registry import EnvironmentFactory, build_environment, from_source
from prime_node.envs.settings import EnvironmentSettings
from prime_node.ports.environment import Environment
from prime_node.ports.renderer import Renderer
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec

if TYPE_CHECKING:
    from prime_node.adapters.environments.process import ProcessEnvironment

log = logging.getLogger(__name__)

READERS = ("jsonl", "parquet")
"""Implementations that read one local file, `options.path`."""
Renderers = Callable[[str], Renderer]
"""By name: "template", or what the package renderers knows."""


def build_environments(specs: Sequence[EnvironmentSpec], model: Path) -> dict[str, Environment]:
    """By name, in this process. `model`: the folder of the run's tokenizer, for environments that answer. Raises LocalError."""
    renderer = partial(_renderer, model)
    factories: dict[str, EnvironmentFactory] = {
        "reasoning_gym": partial(_reasoning_gym, renderer),
        "jsonl": partial(_dataset, renderer, read_json_lines),
        "parquet": partial(_parquet, renderer),
        "verifiers": partial(_verifiers, model),
    }
    return {spec.name: build_environment(spec, factories) for spec in specs}


def start_environments(
    specs: Sequence[EnvironmentSpec], model: Path, *, hidden: Sequence[Path], settings: EnvironmentSettings
) -> dict[str, ProcessEnvironment]:
    """By name, in a process of their own, which cannot open what is in `hidden`. Raises LocalError.

    Blocks until it is ready.
    """
    from prime_node.adapters.environments.process import EnvironmentProcess, ProcessEnvironment, ProcessTurnEnvironment

    found = [with_file_at_hand(spec, settings, hidden=hidden) for spec in specs]
    files = [str(spec.options["path"]) for spec in found if spec.id in READERS]
    described = {
        "environments": [spec.model_dump() for spec in found],
        "model": str(model.resolve()),
        "readable": [*files, *map(str, settings.readable)],
        "hidden": [str(path.resolve()) for path in hidden],
    }
    # The role's folder stands in the command for whoever looks at the list of processes.
    command = [sys.executable, "-m", "prime_node.cli.environment_process", *map(str, hidden[:1])]
    process = EnvironmentProcess(command, described)
    log.info("environments run in process %d", process.pid)
    if not process.ready["confined"]:
        log.warning(
            "this system cannot confine the environments' process (Linux 5.13 with Landlock can): it holds no key, "
            "but their code could open the files of yours"
        )
    return {
        spec.name: (ProcessTurnEnvironment if spec.name in process.ready["turns"] else ProcessEnvironment)(
            process, spec.name
        )
        for spec in specs
    }


def end_environments(made: Mapping[str, Environment]) -> None:
    """The process that holds them. Idempotent."""
    from prime_node.adapters.environments.process import ProcessEnvironment

    for environment in made.values():
        if isinstance(environment, ProcessEnvironment):
            environment.process.close()


def confined(
    specs: Sequence[EnvironmentSpec], readable: Sequence[Path], folder: Path, *, hidden: Sequence[Path]
) -> bool:
    """Leave this process the files that its host has named; False where the system cannot."""
    from prime_node.adapters.environments.confine import confine

    shared: list[Path] = []
    if any(spec.id == "verifiers" for spec in specs):
        # verifiers' tool servers say their port in a file there, whatever TMPDIR is.
        shared = [path for path in [Path("/tmp")] if not any(path in one.parents for one in hidden)]
    return confine(readable, [folder, *shared], hidden=hidden)


def with_file_at_hand(
    spec: EnvironmentSpec, settings: EnvironmentSettings, *, hidden: Sequence[Path] = ()
) -> EnvironmentSpec:
    """The same with the absolute path of its dataset's file, which has the digest that the RunSpec names. Raises LocalError.

    Files of the hub are fetched here: their cache is other programs' too, and environments' code must not change it.
    """
    from prime_node.adapters.environments.data_files import digest_of_file, find_file

    if spec.id not in READERS:
        return spec
    path = str(spec.options.get("path", ""))
    try:
        found = find_file(path, settings.data_folder, hidden=hidden, hub_bytes_max=settings.hub_file_bytes_max)
        digest, wanted = digest_of_file(found), spec.options.get("digest")
        if digest != wanted:
            raise ValueError(f"{found} has digest {digest}, the run wants {wanted}")
    except (OSError, ValueError) as error:
        raise LocalError(f"environment {spec.name} ({spec.id}): {error}") from None
    return spec.model_copy(update={"options": {**spec.options, "path": str(found)}})


def _verifiers(model: Path, spec: EnvironmentSpec) -> Environment:
    try:
        from prime_node.adapters.environments.verifiers_v1 import VerifiersEnvironment
        from prime_node.adapters.web.aiohttp_server import AiohttpServer
    except ImportError as error:
        raise missing_extra("verifiers", "environments of verifiers", error) from None
    if spec.turns_max < 2:
        raise ValueError("set turns_max above 1: verifiers renders the prompts of its rollouts itself")
    options = dict(spec.options)
    taskset, renderer = str(options.pop("taskset", "")), options.pop("renderer", None)
    return VerifiersEnvironment(
        model,
        AiohttpServer(),
        seed=spec.seed,
        taskset=taskset,
        env=str(options.pop("env", "")),
        renderer=None if renderer is None else str(renderer),
        **options,
    )


def _reasoning_gym(renderer: Renderers, spec: EnvironmentSpec) -> Environment:
    try:
        from prime_node.adapters.environments.reasoning_gym import ReasoningGymSource
    except ImportError as error:
        raise missing_extra("envs", "reasoning-gym environments", error) from None
    return from_source(ReasoningGymSource, renderer)(spec)


def _parquet(renderer: Renderers, spec: EnvironmentSpec) -> Environment:
    try:
        from prime_node.adapters.environments.parquet_rows import read_parquet
    except ImportError as error:
        raise missing_extra("parquet", "environments over Parquet files", error) from None
    return _dataset(renderer, read_parquet, spec)


def _dataset(renderer: Renderers, read: Callable[[bytes], Iterator[Row]], spec: EnvironmentSpec) -> Environment:
    comparisons = dict(COMPARISONS)
    if spec.options.get("compare") == "math":
        try:
            from prime_node.adapters.environments.math_answers import is_same_math
        except ImportError as error:
            raise missing_extra("envs", 'environments that compare = "math"', error) from None
        comparisons["math"] = is_same_math
    return from_source(partial(DatasetSource, read, comparisons), renderer)(spec)


def _renderer(model: Path, name: str) -> Renderer:
    """Raises ValueError and LocalError."""
    if name == "template":
        from prime_node.adapters.models.template_renderer import TemplateRenderer

        return TemplateRenderer(model)
    try:
        from prime_node.adapters.models.package_renderer import PackageRenderer
    except ImportError as error:
        raise missing_extra("verifiers", "renderers of model families", error) from None
    return PackageRenderer(model, name=name)
