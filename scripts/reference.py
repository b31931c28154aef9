"""Pages of the reference, made from the code: settings, commands, metrics, endpoints, error codes, reasons."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer

from prime_node.cli.config import all_settings, settings_toml
from prime_node.cli.main import GROUPS, SUMMARIES, Commands
from prime_node.cli.man import EXIT_CODES
from prime_node.cli.missing_extra import COMMAND_EXTRAS
from prime_node.coordinator.api.routes import ENDPOINTS, PAGE_ENDPOINTS
from prime_node.coordinator.metrics import HOST_METRICS, METRICS
from prime_protocol.errors import ErrorCode
from prime_protocol.verdict import RejectReason

WIDTH = 100
"""Columns of a command's help."""


def pages() -> Iterator[tuple[str, str]]:
    """Yield file name and Markdown of each page."""
    yield "settings.md", "\n".join(_settings())
    yield "commands.md", "\n".join(_commands())
    yield "metrics.md", "\n".join(_metrics())
    yield "endpoints.md", "\n".join(_endpoints())
    yield "errors.md", "\n".join(_errors())


def _settings() -> Iterator[str]:
    yield "# Settings\n"
    yield "Each with its default, meaning and range, as `prime-node config` prints them. `[worker] threads = 2` in a file,"
    yield "`PRIME_WORKER_THREADS=2` and `--set worker.threads=2` mean the same.\n"
    for shape in all_settings():
        yield f"## [{shape.section}]\n"
        table, meaning = shape.section, ""
        for line in settings_toml(shape, None, (shape.section,)):
            text = line.removeprefix("# ") if re.match(r"# (# |\[|[\w-]+ = )", line) else line
            if (header := re.fullmatch(r"\[+([\w.-]+)\]+", text)) is not None:
                if header[1] != table:
                    yield f"### [{header[1]}]\n"
                table = header[1]
            elif text.startswith("# "):
                meaning = text.removeprefix("# ")
            elif (found := re.match(r"([\w-]+) = (.*)", text)) is not None:
                default = found[2].replace("...  ", "")
                yield f"`{table}.{found[1]}` = `{default}`\n: {_escaped(meaning)}\n"
                meaning = ""


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    commands = dict(Commands())
    for title, names in GROUPS.items():
        yield f"## {title}\n"
        for name in names:
            yield f"### prime-node {name}\n\n{SUMMARIES[name]}"
            if (extras := COMMAND_EXTRAS.get(name)) is not None:
                yield f" Needs the extra {' and '.join(f'`{extra}`' for extra in extras)}."
            yield ""
            yield from _help(f"prime-node {name}", commands[name])
    yield "## Exit codes\n\n| code | meaning |\n|---|---|"
    yield from (f"| {code} | {meaning} |" for code, meaning in EXIT_CODES)


def _help(path: str, command: Any) -> Iterator[str]:
    command.epilog = None
    context = typer.Context(command, info_name=path, max_content_width=WIDTH, terminal_width=WIDTH)
    yield f"```text\n{command.get_help(context).rstrip()}\n```\n"
    for name, one in getattr(command, "commands", {}).items():
        yield f"#### {path} {name}\n"
        yield from _help(f"{path} {name}", one)


def _metrics() -> Iterator[str]:
    yield "# Metrics\n\nOf the coordinator's `/metrics`. [Scheduling](../scheduler.md) has the gauges of each step's row.\n"
    for one in (*METRICS, *HOST_METRICS):
        labels = f", by {', '.join(f'`{label}`' for label in one.labels)}" if one.labels else ""
        yield f"`{one.name}` ({one.kind.value}{labels})\n: {_escaped(one.help)}\n"


def _endpoints() -> Iterator[str]:
    yield "# Endpoints\n\nOf the coordinator. [The protocol](../../protocol/SPEC.md) has the messages.\n"
    yield "| method | path | caller | message |\n|---|---|---|---|"
    for one in (*ENDPOINTS, *PAGE_ENDPOINTS):
        caller = one.caller.name.lower() if one.caller is not None else "anyone"
        message = f"`{one.message.__name__}`" if one.message is not None else ""
        yield f"| {'GET' if one.caller is None else 'POST'} | `{one.path}` | {caller} | {message} |"


def _errors() -> Iterator[str]:
    yield "# Error codes and reasons\n\n## Error codes\n\nOf an answer that is no success, in its field `code`.\n"
    yield from _members(ErrorCode)
    yield "## Reasons of a rejection\n\nIn the signed receipt of a rejected bundle. A dishonest one counts as a strike.\n"
    yield from _members(RejectReason, lambda reason: " (dishonest)" if reason.is_dishonest else "")


def _members(kind: type[Enum], remark: Any = lambda member: "") -> Iterator[str]:
    """Yield each member with the text below it in the source."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    for line, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            (name,) = (target.id for target in line.targets if isinstance(target, ast.Name))
            member = kind[name]
            yield f"`{member.value}`{remark(member)}\n: {_escaped(inspect.cleandoc(str(after.value.value)))}\n"


def _escaped(text: str) -> str:
    """Return text as Markdown on one line, without markup of its own besides code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return (
        "".join(part if part.startswith("`") else re.sub(r"([*_<>\[\]|\\$])", r"\\\1", part) for part in parts) or "-"
    )
