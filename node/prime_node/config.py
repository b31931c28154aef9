"""Settings: defaults < TOML file < environment < command line. Only this module and observe.py read the environment.

One TOML file may configure every role; each reads its own table. `[worker] spool_bytes_max = 1000` in the file,
`PRIME_WORKER_SPOOL_BYTES_MAX=1000` in the environment and `--set worker.spool_bytes_max=1000` on the command line are
the same setting. Nested names are joined by `__` in the environment and by `.` on the command line. A variable that resembles a
setting is refused, also if its table is misspelt; any other variable named PRIME_* is ignored.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from prime_node.inside import read_regular
from prime_protocol.errors import LocalError

SHIPPED_FOLDERS = (Path(__file__).parent / "_configs", Path(__file__).parents[2] / "configs")
"""Where the shipped configurations are: in an installed wheel, and in a checkout."""

__all__ = [
    "SHIPPED_FOLDERS",
    "SandboxSettings",
    "Settings",
    "SettingsConfigDict",
    "calling_user",
    "check_sections",
    "our_variables",
    "parse_overrides",
    "read_toml",
    "user_cache",
]


log = logging.getLogger(__name__)

_VARIABLE = re.compile(r"PRIME_(?P<table>[A-Z]+)_(?P<name>[A-Z0-9_]+?)(?:__.*)?")
"""Environment variable of a setting: its table, its name, and names within it."""
CONFIG_BYTES_MAX = 2**20
_TABLE_NEAR = 0.75
"""Similarity at which a table's name counts as misspelt. The tables' names differ by more."""


class SandboxSettings(BaseModel):
    """Sandbox of a role that processes untrusted data: docs/sandbox.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    also_read: tuple[Path, ...] = ()
    """Further files and folders that this process may read, for example a model in your home."""
    also_write: tuple[Path, ...] = ()
    """Further folders that this process may write in. A hostile run could then change their content."""
    keep_environment: tuple[str, ...] = ()
    """Environment variables to keep although their names look like secrets, for example HF_TOKEN."""
    unsafe_no_namespaces: bool = False
    """Share the system's own /tmp, /dev/shm and sockets, if an engine or a driver does not work in a private file
    system. Landlock and the system call filter stay."""
    unsafe_off: bool = False
    """Run this process without any sandbox. A hostile run that finds one vulnerability in it can then read and change
    all files of this user."""


class Settings(BaseSettings):
    """Base of every role's settings. A subclass sets `section` and `env_prefix`, and documents each field under it."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    section: ClassVar[str]
    """Name of the TOML table."""

    @classmethod
    def load(cls, file: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None) -> Self:
        """Merge the sources. Raises LocalError. `file` is a whole parsed TOML file; `overrides` come from the command line."""
        cls._check_variables()
        table = dict((file or {}).get(cls.section, {}))
        merged = _merge(_merge(table, cls.from_environment()), overrides or {})
        try:
            return cls.of_fields(merged)
        except ValidationError as error:
            raise LocalError(_explain(error, cls)) from None

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return settings of a stranger's fields, none of which is an argument of the library: it begins with _, and reads files.

        Raises LocalError and ValidationError.
        """
        if own := [name for name in fields if name.startswith("_")]:
            raise LocalError(f"bad setting: [{cls.section}] {own[0][:99]!a}: no such setting")
        return cls(**fields)

    @classmethod
    def from_environment(cls) -> dict[str, Any]:
        """Return the settings that the environment has. Raises LocalError for a list or a table that is no JSON."""
        try:
            return EnvSettingsSource(cls)()
        except SettingsError as error:
            detail = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            raise LocalError(f"environment variables of [{cls.section}]: {detail}") from None

    @classmethod
    def _check_variables(cls) -> None:
        """Refuse variables that look like a misspelt setting. Others are not ours: they are named in the log and ignored."""
        own = cls.model_config.get("env_prefix", "")
        table = own.removeprefix("PRIME_").removesuffix("_")
        for variable in sorted(os.environ):
            found = _VARIABLE.fullmatch(variable.upper())
            if found is None or not get_close_matches(found["table"], [table], cutoff=_TABLE_NEAR):
                continue
            name = found["name"].lower()
            is_ours = variable.upper().startswith(own)
            if is_ours and name in cls.model_fields:
                continue
            if near := get_close_matches(name, cls.model_fields, n=1):
                raise LocalError(
                    f"environment variable {variable}: no such setting; did you mean {own}{near[0].upper()}? "
                    "If it is not meant for prime-node, unset it here"
                )
            if is_ours:
                log.warning("environment variable %s sets nothing: [%s] has no such setting", variable, cls.section)


def user_cache() -> Path:
    """Return the folder of what this user's commands keep and can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prime-node"


def calling_user() -> str | None:
    """Return the name of the user who called sudo; None without sudo."""
    return os.environ.get("SUDO_USER")


def our_variables() -> list[str]:
    """Return the names of all environment variables with our prefix."""
    return sorted(name for name in os.environ if name.upper().startswith("PRIME_"))


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file, which may be in a folder of others. Raises LocalError with the place of the error."""
    try:
        return tomllib.loads(read_regular(path.resolve(), bytes_max=CONFIG_BYTES_MAX).decode("utf-8"))
    except FileNotFoundError:
        examples = next((folder for folder in SHIPPED_FOLDERS if folder.is_dir()), "configs/ of the project")
        raise LocalError(f"config {path}: no such file; {examples} holds examples") from None
    except OSError as error:
        raise LocalError(f"config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LocalError(f"config {path}: {error}") from None


def check_sections(file: Mapping[str, Any], known: set[str], *, path: Path) -> None:
    """Refuse unknown tables: a misspelt one would otherwise be ignored. Raises LocalError."""
    unknown = sorted(file.keys() - known)
    if unknown:
        raise LocalError(f"config {path}: unknown table [{unknown[0]}]; known are {', '.join(sorted(known))}")


def parse_overrides(assignments: list[str]) -> dict[str, dict[str, Any]]:
    """Parse `["worker.name=anna", "trainer.loss.type=aipo"]` into nested tables. Values are TOML if they parse, else text."""
    tables: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        names = path.strip().split(".")
        if not equals or len(names) < 2 or not all(names):
            raise LocalError(f"--set {assignment}: expected section.name=value")
        table: dict[str, Any] = tables
        for name in names[:-1]:
            table = table.setdefault(name, {})
        table[names[-1]] = _toml_value(value.strip())
    return tables


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables recursively; replace everything else."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _explain(error: ValidationError, settings: type[Settings]) -> str:
    faults = error.errors(include_url=False, include_input=False)
    lines = [f"[{settings.section}] {'.'.join(map(str, fault['loc']))}: {_said(fault, settings)}" for fault in faults]
    return f"bad setting: {'; '.join(lines)} (`prime-node config {settings.section}` explains each)"


def _said(fault: ErrorDetails, settings: type[Settings]) -> str:
    if fault["type"] == "missing":
        return "must be set"
    if fault["type"] != "extra_forbidden":
        return fault["msg"]
    *tables, name = map(str, fault["loc"])
    near = get_close_matches(name, _names(settings, tables), n=1)
    return f"no such setting; did you mean {near[0]}?" if near else "no such setting"


def _names(model: type[BaseModel], tables: list[str]) -> list[str]:
    """Return the names of the settings in a nested table; none if its type is ambiguous."""
    for table in tables:
        inner = model.model_fields[table].annotation if table in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
