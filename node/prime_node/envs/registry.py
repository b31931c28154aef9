"""Environments by name. The caller passes the implementations, so nothing here imports one.

Example: build_environment(spec, {"jsonl": from_source(JsonlSource), "reasoning_gym": from_source(ReasoningGymSource)}).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from prime_node.envs.dialogue import DialogueEnvironment
from prime_node.envs.partners import PARTNERS, Partner
from prime_node.envs.source import ProblemSource
from prime_node.envs.split import Frame, Judge, SplitEnvironment
from prime_node.ports.environment import Environment
from prime_node.ports.renderer import Renderer
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec

Option = str | int | float | bool
EnvironmentFactory = Callable[[EnvironmentSpec], Environment]
Around = Callable[[ProblemSource], ProblemSource]
"""Function that wraps a source, for example to grade elsewhere."""


def build_environment(spec: EnvironmentSpec, factories: Mapping[str, EnvironmentFactory]) -> Environment:
    """Build the environment that a RunSpec describes. Raises LocalError that explains an invalid description."""
    if spec.id not in factories:
        raise LocalError(
            f"environment {spec.name}: no implementation {spec.id!r}; known are {', '.join(sorted(factories))}"
        )
    try:
        return factories[spec.id](spec)
    except (TypeError, ValueError, OSError) as error:
        raise LocalError(f"environment {spec.name} ({spec.id}): {error}") from error


def as_it_is(source: ProblemSource) -> ProblemSource:
    """Return the source."""
    return source


def from_source(
    make: Callable[..., ProblemSource],
    renderer: Callable[[str], Renderer],
    around: Around = as_it_is,
    *,
    exact_share: float = 0.5,
    partner_of: Callable[[Any], Partner | None] = lambda source: None,
) -> EnvironmentFactory:
    """Return a factory of environments over a source.

    It removes the options of split and frame; `make` gets the others. exact_share (with this default), score_cut_off, prefix,
    suffix, answer_tag: see envs/split.py. partner, renderer: for multi-turn environments (envs/dialogue.py). `around` wraps the
    source. `partner_of` returns the source's own partner.
    """

    def build(spec: EnvironmentSpec) -> Environment:
        options = dict(spec.options)
        frame = {field.name: str(options.pop(field.name)) for field in fields(Frame) if field.name in options}
        exact = float(options.pop("exact_share", exact_share))
        partner, renders = str(options.pop("partner", "")), str(options.pop("renderer", "template"))
        score_cut_off = options.pop("score_cut_off", False)
        if not isinstance(score_cut_off, bool):
            raise ValueError(f"score_cut_off must be true or false, got {score_cut_off!r}")
        source = make(**_known(make, options))
        judge = Judge(around(source), Frame(**frame), exact, score_cut_off)
        if partner and partner not in PARTNERS:
            raise ValueError(f"partner must be one of {', '.join(PARTNERS)}, got {partner!r}")
        answering = PARTNERS.get(partner) or partner_of(source)
        if (spec.turns_max > 1) != (answering is not None):
            known = ", ".join(PARTNERS)
            raise ValueError(
                f"turns_max above 1 and a partner (options.partner: {known}; a method reply) need each other"
            )
        if answering is None:
            return SplitEnvironment(judge, seed=spec.seed)
        return DialogueEnvironment(judge, seed=spec.seed, partner=answering, renderer=renderer(renders))

    return build


def _known(make: Callable[..., ProblemSource], options: dict[str, Option]) -> dict[str, Option]:
    """Return the options if `make` accepts them.

    A TypeError from inside `make` would be a bug; this one is the user's error.
    """
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ValueError(f"options: {error}") from None
    return options
