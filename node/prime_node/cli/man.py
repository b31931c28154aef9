"""`prime-node man`: manual pages, generated from the commands' own help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_node import __version__
from prime_node.cli.main import GROUPS, SUMMARIES, Commands
from prime_node.cli.say import say
from prime_node.files import write_durably

if TYPE_CHECKING:
    from typer._click import Command as ClickCommand

EXIT_CODES = (
    ("0", "done"),
    ("1", "a check did not hold (verify), or a fault of the software"),
    ("2", "wrong usage"),
    ("3", "this machine or its settings are at fault"),
    ("4", "the other side refused: banned, wrong run"),
    ("5", "a trainer was asked to stop before the run was over"),
    ("6", "a fault that may pass, of a database or a bucket; a service starts again"),
    ("7 to 13", "what `prime-node replay` finds; its help names each"),
    ("14", "what `prime-node coordinator replay` cannot check: batches chosen by another release's rules"),
    ("130", "interrupted"),
)


def man(
    to: Annotated[Path, typer.Option("--to", help="Folder; the pages go into its folder man1.")] = Path(
        "~/.local/share/man"
    ),
) -> None:
    """Write a manual page for each command. `man prime-node` finds them in ~/.local/share/man or /usr/local/share/man."""
    folder = to.expanduser() / "man1"
    folder.mkdir(parents=True, exist_ok=True)
    pages = dict(man_pages())
    for name, text in pages.items():
        write_durably(folder / f"{name}.1", text.encode())
    say(f"wrote {len(pages)} pages to {folder}")


def man_pages() -> Iterator[tuple[str, str]]:
    """Yield name and text of each page: one for the program, one for each command and for each command of a group."""
    yield "prime-node", _overview()
    for name, command in Commands().items():
        yield from _pages(f"prime-node {name}", SUMMARIES[name], command)


def _pages(path: str, summary: str, command: ClickCommand) -> Iterator[tuple[str, str]]:
    inner: dict[str, ClickCommand] = getattr(command, "commands", {})
    yield path.replace(" ", "-"), "\n".join(_page(path, summary, command, inner))
    for name, one in inner.items():
        yield from _pages(f"{path} {name}", one.get_short_help_str(80), one)


def _overview() -> str:
    lines = [
        *_head("prime-node", "train one model with untrusted workers"),
        ".SH SYNOPSIS",
        _text("prime-node COMMAND ..."),
    ]
    for title, names in GROUPS.items():
        lines += [f".SH {_text(title.upper())}"]
        for name in names:
            lines += [".TP", rf"\fB{_text(f'prime-node-{name}')}\fR(1)", _text(SUMMARIES[name])]
    lines += [".SH EXIT STATUS"]
    for code, meaning in EXIT_CODES:
        lines += [".TP", rf"\fB{code}\fR", _text(meaning)]
    return "\n".join([*lines, ""])


def _page(path: str, summary: str, command: ClickCommand, inner: dict[str, ClickCommand]) -> Iterator[str]:
    yield from _head(path.replace(" ", "-"), summary)
    visible = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in visible if one.param_type_name == "argument"]
    options = [one for one in visible if one.param_type_name == "option"]
    words = [
        *(["[OPTIONS]"] if options else []),
        *(_metavar(one) for one in arguments),
        *(["COMMAND"] if inner else []),
    ]
    yield ".SH SYNOPSIS"
    yield _text(" ".join([path, *words]))
    yield ".SH DESCRIPTION"
    yield from _paragraphs(command.help or "")
    for title, found in (("ARGUMENTS", arguments), ("OPTIONS", options)):
        if found:
            yield f".SH {title}"
        for one in found:
            yield ".TP"
            yield rf"\fB{_text(_metavar(one) if title == 'ARGUMENTS' else ', '.join(one.opts))}\fR"
            yield _text(" ".join((getattr(one, "help", "") or "").split()))
    if inner:
        yield ".SH COMMANDS"
    for name, further in inner.items():
        yield ".TP"
        yield rf"\fB{_text(path.replace(' ', '-') + '-' + name)}\fR(1)"
        yield _text(further.get_short_help_str(80))
    yield ".SH SEE ALSO"
    yield r"\fBprime\-node\fR(1)"
    yield ""


def _head(name: str, summary: str) -> list[str]:
    title = f'.TH "{_text(name.upper())}" 1 "" "{_text(f"prime-node {__version__}")}" "prime-node"'
    return [title, ".SH NAME", rf"{_text(name)} \- {_text(summary.rstrip('.'))}"]


def _metavar(argument: Any) -> str:
    return str(argument.name).upper()


def _paragraphs(text: str) -> Iterator[str]:
    r"""Yield a help text. A paragraph that begins with \b keeps its lines."""
    for paragraph in text.split("\n\n"):
        yield ".PP"
        lines = paragraph.split("\n")
        if lines[0].strip() == "\b":
            yield ".nf"
            yield from map(_text, lines[1:])
            yield ".fi"
        else:
            yield _text(" ".join(paragraph.split()))


def _text(text: str) -> str:
    """Escape a line for roff: backslashes, hyphens, and a dot or an apostrophe that would begin it."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
