"""Where environments are chosen, by the ids that a RunSpec may name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prime_node.cli.wire import missing_extra
from prime_node.envs.dataset import COMPARISONS, DatasetSource, Row, read_json_lines
from prime_node.envs.registry import EnvironmentFactory, build_environment, from_source
from prime_node.ports.environment import Environment
from prime_protocol.run_spec import EnvironmentSpec


def build_environments(specs: Sequence[EnvironmentSpec]) -> dict[str, Environment]:
    """By name. Raises LocalError."""
    factories: dict[str, EnvironmentFactory] = {
        "reasoning_gym": _reasoning_gym,
        "jsonl": lambda spec: _dataset(spec, read_json_lines),
        "parquet": _parquet,
    }
    return {spec.name: build_environment(spec, factories) for spec in specs}


def _reasoning_gym(spec: EnvironmentSpec) -> Environment:
    try:
        from prime_node.adapters.environments.reasoning_gym import ReasoningGymSource
    except ImportError as error:
        raise missing_extra("envs", "reasoning-gym environments", error) from None
    return from_source(ReasoningGymSource)(spec)


def _parquet(spec: EnvironmentSpec) -> Environment:
    try:
        from prime_node.adapters.environments.parquet_rows import read_parquet
    except ImportError as error:
        raise missing_extra("parquet", "environments over Parquet files", error) from None
    return _dataset(spec, read_parquet)


def _dataset(spec: EnvironmentSpec, read: Callable[[bytes], Iterator[Row]]) -> Environment:
    from prime_node.adapters.environments.hub_files import find_file

    comparisons = dict(COMPARISONS)
    if spec.options.get("compare") == "math":
        try:
            from prime_node.adapters.environments.math_answers import is_same_math
        except ImportError as error:
            raise missing_extra("envs", 'environments that compare = "math"', error) from None
        comparisons["math"] = is_same_math
    return from_source(partial(DatasetSource, read, find_file, comparisons))(spec)
