"""Environments by name. The wire says which implementations there are, so nothing here imports one.

Example: build_environment(spec, {"jsonl": from_source(JsonlSource), "reasoning_gym": from_source(ReasoningGymSource)}).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields

from prime_node.envs.source import ProblemSource
from prime_node.envs.split import Frame, Judge, SplitEnvironment
from prime_node.ports.environment import Environment
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec

Option = str | int | float | bool
EnvironmentFactory = Callable[[EnvironmentSpec], Environment]


def build_environment(spec: EnvironmentSpec, factories: Mapping[str, EnvironmentFactory]) -> Environment:
    """The environment that a RunSpec describes. Raises LocalError with what is wrong with its description."""
    if spec.id not in factories:
        raise LocalError(
            f"environment {spec.name}: no implementation {spec.id!r}; there are {', '.join(sorted(factories))}"
        )
    try:
        return factories[spec.id](spec)
    except (TypeError, ValueError, OSError) as error:
        raise LocalError(f"environment {spec.name} ({spec.id}): {error}") from error


def from_source(make: Callable[..., ProblemSource]) -> EnvironmentFactory:
    """A factory of environments over a source. Options of the split and the frame are taken out; `make` gets the others.

    exact_share, prefix, suffix, answer_tag: see envs/split.py.
    """

    def build(spec: EnvironmentSpec) -> Environment:
        options = dict(spec.options)
        frame = {field.name: str(options.pop(field.name)) for field in fields(Frame) if field.name in options}
        exact_share = float(options.pop("exact_share", 0.5))
        source = make(**_known(make, options))
        return SplitEnvironment(Judge(source, Frame(**frame), exact_share), seed=spec.seed)

    return build


def _known(make: Callable[..., ProblemSource], options: dict[str, Option]) -> dict[str, Option]:
    """The options, if `make` takes them. A TypeError from inside `make` would be a bug; this one is the user's."""
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ValueError(f"options: {error}") from None
    return options
