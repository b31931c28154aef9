"""Builds environments over a run's own code, and compares the code with the digest that the run names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prime_node.adapters.environments.own_code import (
    OwnEnvironment,
    OwnReward,
    RewardedSource,
    digest_of_code,
    load_object,
    own_paths,
)
from prime_node.envs.registry import Around, Option, from_source
from prime_node.envs.source import ProblemSource
from prime_node.ports.environment import Environment
from prime_node.ports.renderer import Renderer
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.run_spec import EnvironmentSpec

Renderers = Callable[[str], Renderer]
"""Function from a name, "template" or one known to the package renderers, to a renderer."""


def pin_code(spec: EnvironmentSpec, folder: Path | None) -> EnvironmentSpec:
    """Add the digest of the code that the spec names. Raises LocalError if the folder does not contain the code."""
    if "code_digest" in spec.options or not own_paths(spec.options):
        return spec
    return spec.model_copy(update={"options": {**spec.options, "code_digest": _digest_here(spec, folder)}})


def require_same_code(spec: EnvironmentSpec, folder: Path | None) -> None:
    """Raise LocalError unless the folder contains the code that the run was made with."""
    if not own_paths(spec.options):
        return
    digest, wanted = _digest_here(spec, folder), spec.options.get("code_digest")
    if digest != wanted:
        raise LocalError(
            f"environment {spec.name}: the code of {', '.join(own_paths(spec.options))} in {folder} has digest {digest}, "
            f"the run wants {wanted}: put back the code that the run was made with, or make a new run"
        )


def _digest_here(spec: EnvironmentSpec, folder: Path | None) -> str:
    try:
        return digest_of_code(own_paths(spec.options), folder)
    except (OSError, ValueError, RemoteError) as error:  # RemoteError: a name that is no file's
        raise LocalError(f"environment {spec.name} ({spec.id}): {error}") from None


def with_own_reward(
    make: Callable[..., ProblemSource],
    renderer: Renderers,
    around: Around,
    code: Path | None,
    spec: EnvironmentSpec,
) -> Environment:
    """Return an environment with the reward function that the spec names. Raises ValueError."""
    if "compare" in spec.options:
        raise ValueError("options.reward and options.compare exclude each other")
    path = str(spec.options["reward"])
    reward = OwnReward(path, load_object(path, code))
    return from_source(make, renderer, lambda source: around(RewardedSource(source, reward)), exact_share=0.0)(
        _without(spec, "reward", "code_digest")
    )


def build_own_environment(renderer: Renderers, around: Around, code: Path | None, spec: EnvironmentSpec) -> Environment:
    """Return the environment of the class that the spec names. Raises ValueError."""
    path = str(spec.options.get("environment", ""))
    its_class = load_object(path, code)

    def make(**options: Option) -> OwnEnvironment:
        return OwnEnvironment(path, its_class, options)

    build = from_source(make, renderer, around, exact_share=0.0, partner_of=lambda source: source.partner)
    return build(_without(spec, "environment", "code_digest"))


def _without(spec: EnvironmentSpec, *names: str) -> EnvironmentSpec:
    return spec.model_copy(update={"options": {name: one for name, one in spec.options.items() if name not in names}})
