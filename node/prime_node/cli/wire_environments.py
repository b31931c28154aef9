"""Where environments are chosen, by the ids that a RunSpec may name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from prime_node.cli.wire import missing_extra
from prime_node.envs.dataset import COMPARISONS, DatasetSource, Row, read_json_lines
from prime_node.envs.registry import EnvironmentFactory, build_environment, from_source
from prime_node.ports.environment import Environment
from prime_node.ports.renderer import Renderer
from prime_protocol.run_spec import EnvironmentSpec

Renderers = Callable[[str], Renderer]
"""By name: "template", or what the package renderers knows."""


def build_environments(specs: Sequence[EnvironmentSpec], model: Path) -> dict[str, Environment]:
    """By name. `model`: the folder of the run's tokenizer, for environments that answer. Raises LocalError."""
    renderer = partial(_renderer, model)
    factories: dict[str, EnvironmentFactory] = {
        "reasoning_gym": partial(_reasoning_gym, renderer),
        "jsonl": partial(_dataset, renderer, read_json_lines),
        "parquet": partial(_parquet, renderer),
    }
    return {spec.name: build_environment(spec, factories) for spec in specs}


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
    from prime_node.adapters.environments.hub_files import find_file

    comparisons = dict(COMPARISONS)
    if spec.options.get("compare") == "math":
        try:
            from prime_node.adapters.environments.math_answers import is_same_math
        except ImportError as error:
            raise missing_extra("envs", 'environments that compare = "math"', error) from None
        comparisons["math"] = is_same_math
    return from_source(partial(DatasetSource, read, find_file, comparisons), renderer)(spec)


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
