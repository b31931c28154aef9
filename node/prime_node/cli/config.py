"""`prime-node config`: every setting with its value, meaning and range, taken from the code: as TOML, or a schema for editors."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, StrEnum
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

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


Names = tuple[str, ...]
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_UNSET = object()


def settings_toml(
    shape: type[BaseModel], value: BaseModel | None, names: Names, origin: Callable[[Names], str] = lambda names: ""
) -> Iterator[str]:
    """Yield the lines of a table: above each setting its meaning; then the tables in it.

    A setting without a value (TOML has none) and one that must be set are comments, so that the text is a valid config file.
    Without `value` the defaults are shown. `origin` returns where a value comes from.
    """
    yield f"[{'.'.join(names)}]"
    yield from _rows(shape, value, names, origin)


def _rows(
    shape: type[BaseModel], value: BaseModel | None, names: Names, origin: Callable[[Names], str]
) -> Iterator[str]:
    meanings = _meanings(shape)
    tables: list[tuple[str, type[BaseModel], BaseModel | None]] = []
    unset: list[tuple[Names, str, type[BaseModel]]] = []
    for name, field in shape.model_fields.items():
        item = _value(name, field, value)
        inner = models_of(field)
        if isinstance(item, BaseModel):
            tables.append((f"[{'.'.join((*names, name))}]", type(item), item))
        elif item is _UNSET and inner and get_origin(field.annotation) is not tuple:
            tables.append((f"[{'.'.join((*names, name))}]", inner[0], None))
        elif isinstance(item, tuple) and item and all(isinstance(one, BaseModel) for one in item):
            tables += [(f"[[{'.'.join((*names, name))}]]", type(one), one) for one in item]
        else:
            yield f"# {meanings.get(name, '')}{_range(field)}".replace("\n", " ")
            where = origin((*names, name))
            remark = f"  # from {where}" if where else ""
            if item is _UNSET:
                yield f"# {name} = ...  (must be set)"
                unset += [((*names, name), f"[[{'.'.join((*names, name))}]]", one) for one in inner[:1]]
            elif item is None:
                yield f"# {name} = ...  (not set){remark}"
                unset += [((*names, name), f"[{'.'.join((*names, name))}]", one) for one in inner[:1]]
            else:
                yield f"{name} = {_toml(item)}{remark}"
    for header, inner_shape, item in tables:
        yield ""
        yield header
        inner_names = tuple(header.strip("[]").split("."))
        yield from _rows(inner_shape, item, inner_names, origin)
    for inner_names, header, inner_shape in unset:  # explained as comments
        yield ""
        yield f"# {header}"
        for line in _rows(inner_shape, None, inner_names, lambda names: ""):
            yield line if line.startswith("#") or not line else f"# {line}"


def settings_schema(shapes: list[type[Settings]]) -> dict[str, Any]:
    """Return the JSON schema of a config file."""
    schemas, definitions = models_json_schema(
        [(shape, "validation") for shape in shapes], ref_template="#/$defs/{model}"
    )
    defined = definitions.get("$defs", {})
    for shape in _with_inner(shapes):
        for name, meaning in _meanings(shape).items():
            if name in (properties := defined[shape.__name__]["properties"]):
                properties[name].setdefault("description", meaning)
    tables = {shape.section: schemas[shape, "validation"] for shape in shapes}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "prime-node",
        "type": "object",
        "additionalProperties": False,
        "properties": tables,
        "$defs": defined,
    }


def _with_inner(shapes: Iterable[type[BaseModel]]) -> set[type[BaseModel]]:
    """Return these classes and those of all tables in them."""
    found, left = set[type[BaseModel]](), list(shapes)
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            left += (inner for field in one.model_fields.values() for inner in models_of(field))
    return found


def origin_of(names: Names, sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the first source that has the setting; "default" if none has."""
    return next((name for name, table in sources.items() if _has(table, names)), "default")


def models_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the classes of tables that a setting may hold."""
    found: list[type[BaseModel]] = []
    left: list[Any] = [field.annotation]
    while left:
        one = left.pop(0)
        if isinstance(one, type) and issubclass(one, BaseModel):
            found.append(one)
        left += get_args(one)
    return found


def _has(table: Any, names: Names) -> bool:
    for name in names:
        if not isinstance(table, Mapping):
            return True  # a list of tables is set as a whole
        if name not in table:
            return False
        table = table[name]
    return True


def _value(name: str, field: FieldInfo, value: BaseModel | None) -> Any:
    if value is not None:
        return getattr(value, name)
    return _UNSET if field.is_required() else field.get_default(call_default_factory=True)


def _range(field: FieldInfo) -> str:
    """Return the values that a setting may have, in parentheses; empty if its type says it."""
    choices = [repr(choice) for choice in _choices(field.annotation)]
    found = [f"one of {', '.join(choices)}"] if choices else []
    for bound, words in _BOUNDS.items():
        limit = next((getattr(one, bound) for one in field.metadata if hasattr(one, bound)), None)
        if isinstance(limit, int | float) and math.isfinite(limit):
            found.append(f"{words} {limit:,}" if isinstance(limit, int) else f"{words} {limit:g}")
    return f" ({'; '.join(found)})" if found else ""


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(one) for one in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return [str(one.value) for one in annotation]
    return [choice for one in get_args(annotation) for choice in _choices(one)]


def _meanings(shape: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field, of the class and its bases.

    pydantic would read it from the source at each start.
    """
    found: dict[str, str] = {}
    for one in reversed(shape.__mro__):
        if one is BaseModel or not issubclass(one, BaseModel) or one.__module__.startswith("pydantic"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float() if not math.isfinite(value):
            return str(value)
        case Enum():
            return _toml(value.value)
        case int() | float():
            return repr(value)
        case PurePath():
            return _toml(str(value))
        case BaseModel():
            return _toml(value.model_dump(exclude_none=True))
        case Mapping():
            return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
        case list() | tuple() | frozenset() | set():
            return f"[{', '.join(map(_toml, value))}]"
    # A JSON string would write a character beyond U+FFFF as two surrogates, which TOML refuses.
    plain = (
        json.dumps(each)[1:-1] if each.isascii() and each != "\x7f" else f"\\U{ord(each):08x}" for each in str(value)
    )
    return f'"{"".join(plain)}"'


def _key(name: object) -> str:
    return str(name) if _BARE.fullmatch(str(name)) else _toml(str(name))
