"""`prime-node config`: every setting with its value, meaning and range, taken from the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from prime_node.cli.options import ConfigFile, Options, Section, Set
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.config import Settings
from prime_protocol.errors import LocalError


def config(
    section: Annotated[Section | None, typer.Argument(help="All if left out.")] = None,
    file: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    run: Annotated[Path | None, typer.Option("--run", help="Run directory whose settings are shown.")] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema of config files, for editors.")] = False,
) -> None:
    """Print every setting with its value, meaning and range, as a config file. Without a file the values are the defaults."""
    from prime_node.cli.config_text import settings_schema

    if schema:
        say(*json.dumps(settings_schema(all_settings()), indent=2).splitlines())
        return
    options = Options(file, assignments) if run is None else Options.of_run(str(run), file, assignments)
    named = file or (run and RunDir(run).config)
    for settings in all_settings():
        if section in (None, settings.section):
            say(*_described(settings, options, str(named), with_origin=origin), "")


def _described(settings: type[Settings], options: Options, file: str, *, with_origin: bool) -> Iterator[str]:
    """Yield the lines of one table. The run's own settings have no defaults for all: without any they are explained only."""
    from prime_node.cli.config_text import origin_of, settings_toml

    section = settings.section
    variables = settings.from_environment()
    sources = {
        "--set": options.overrides.get(section, {}),
        "the environment": variables,
        file: options.tables.get(section, {}),
    }
    is_given = any(sources.values())
    value = None if section == "run" and not is_given else options.load(settings)
    shown = (lambda names: origin_of(names[1:], sources)) if with_origin else (lambda names: "")
    return settings_toml(settings, value, (section,), shown)


def all_settings() -> list[type[Settings]]:
    """Return one settings class per table, in the order of the data flow."""
    from prime_node.cli.up_config import UpConfig
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.coordinator.gateway.config import GatewayConfig
    from prime_node.coordinator.new_run import RunConfig
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.trainer.config import TrainerConfig
    from prime_node.validator.config import ValidatorConfig
    from prime_node.worker.config import WorkerConfig

    return [
        RunConfig,
        UpConfig,
        CoordinatorConfig,
        GatewayConfig,
        TrainerConfig,
        ValidatorConfig,
        WorkerConfig,
        EnvironmentSettings,
    ]


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
