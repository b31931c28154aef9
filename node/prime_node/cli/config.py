"""`prime-node config`: every setting with its default and its meaning, taken from the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from prime_node.cli.options import Options, Section
from prime_node.cli.say import say
from prime_node.config import Settings
from prime_protocol.errors import LocalError


def config(
    section: Annotated[Section | None, typer.Argument(help="All if left out.")] = None,
) -> None:
    """Print every setting with its default and its meaning."""
    for settings in all_settings():
        if section in (None, settings.section):
            say(*describe_settings(settings, settings.section), "")


def all_settings() -> list[type[Settings]]:
    """Return one settings class per table, in the order of the data flow."""
    from prime_node.cli.up_config import UpConfig
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.coordinator.new_run import RunConfig
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.trainer.config import TrainerConfig
    from prime_node.validator.config import ValidatorConfig
    from prime_node.worker.config import WorkerConfig

    return [RunConfig, UpConfig, CoordinatorConfig, TrainerConfig, ValidatorConfig, WorkerConfig, EnvironmentSettings]


def check_settings(options: Options, *, with_run: bool) -> None:
    """Check the settings of every role before any role starts. Raises LocalError."""
    for settings in all_settings():
        if with_run or settings.section != "run":
            options.load(settings)
    if with_run:
        _check_weights(options)


def _check_weights(options: Options) -> None:
    """Check that the trainer of a pretrained model does not start from random weights. Raises LocalError."""
    from prime_node.coordinator.new_run import PretrainedModel, RunConfig
    from prime_node.trainer.config import TrainerConfig

    run = options.load(RunConfig)
    if not isinstance(run.model, PretrainedModel) or run.adapters is not None:
        return
    if options.load(TrainerConfig).initial_weights is None:
        raise LocalError(
            "[trainer] initial_weights: the run's model is pretrained, so the trainer needs its weights; "
            f'set it to a folder or a model name, for example initial_weights = "{run.model.name_or_path}"'
        )


def describe_settings(model: type[BaseModel], table: str) -> Iterator[str]:
    """Yield TOML lines with a comment above each setting; nested tables follow the plain settings."""
    yield f"[{table}]"
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        inner = [item for item in (field.annotation, *get_args(field.annotation)) if _is_model(item)]
        if inner and (field.is_required() or isinstance(field.get_default(call_default_factory=True), BaseModel)):
            nested.append((name, inner[0]))
            continue
        yield f"# {' '.join((field.description or '').split())}"
        yield f"{name} = {_toml(field.get_default(call_default_factory=True))}"
    for name, inner_model in nested:
        yield ""
        yield from describe_settings(inner_model, f"{table}.{name}")


def _is_model(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, BaseModel)


def _toml(value: Any) -> str:
    if value is PydanticUndefined:
        return "...  # needed"
    if value is None:
        return '""  # none'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return f'"{value}"'
