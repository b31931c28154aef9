"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import typer
from typer.core import TyperGroup

from prime_node.cli.run_dir import RunDir
from prime_node.config import Settings, check_sections, parse_overrides, read_toml
from prime_protocol.errors import LocalError

log = logging.getLogger(__name__)

Section = Literal["run", "up", "coordinator", "gateway", "trainer", "validator", "worker", "environments"]
SECTIONS = set(get_args(Section))
"""Tables that a config file may contain."""
READ_BY_ROLE: dict[str, tuple[Section, ...]] = {
    "coordinator": ("coordinator", "environments"),
    "gateway": ("gateway", "coordinator"),
    "trainer": ("trainer", "environments"),
    "validator": ("validator", "environments"),
    "join": ("worker", "environments"),
    "seed": ("worker",),
}
"""Tables that the command of each role reads. `up` passes on only these."""

SECRET_SETTINGS = ("worker.invite",)
"""Settings that no argument holds."""

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; it holds only what differs from the defaults.")
]
Set = Annotated[
    list[str], typer.Option("--set", "-s", metavar="SECTION.NAME=VALUE", help="Override one setting; repeatable.")
]
StopWithParent = Annotated[bool, typer.Option("--stop-with-parent", hidden=True, help="Stop when standard input ends.")]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"], typer.Option("--log-level", case_sensitive=False, help="Log level.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]
ExpectedRun = Annotated[
    str | None, typer.Option("--run", help="Expected digest of the run; the join link contains it.")
]
EvidenceFolder = Annotated[
    Path | None,
    typer.Option(
        "--evidence", help="Folder for evidence: signed statements that contradict each other are written to it."
    ),
]
TrustedCode = Annotated[
    list[str],
    typer.Option(
        "--code",
        metavar="MODULE:NAME",
        help="Run this code of the recipe's creator, which you have read; repeatable. Other code is refused.",
    ),
]
EngineName = Literal["auto", "transformers", "vllm"]

S = TypeVar("S", bound=Settings)


def command_group(text: str, *, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """Return a command that is a group of commands. `text` is its help."""
    return typer.Typer(help=text, cls=cls, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


class Options:
    """Parsed config file with the overrides of the command line."""

    def __init__(self, file: Path | None, assignments: list[str], *, reads: Sequence[Section] | None = None) -> None:
        """Parse the options. Raises LocalError.

        `reads` names the tables that the command reads: a `--set` of another one would be ignored, and is refused. A file may
        hold all tables.
        """
        self.tables: dict[str, Any] = {} if file is None else read_toml(file)
        if file is not None:
            check_sections(self.tables, SECTIONS, path=file)
        self.assignments = assignments
        self.overrides = parse_overrides(assignments)
        check_sections(self.overrides, SECTIONS, path=Path("--set"))
        _refuse_ignored(assignments, reads)
        if any(one.partition("=")[0].strip() in SECRET_SETTINGS for one in assignments):
            raise LocalError(
                "other users of this machine see what --set holds: give the link with its invitation as - (standard input) or in "
                "a file, or write [worker] invite into the file of --config, which you alone may read"
            )

    @classmethod
    def of_run(
        cls, run: str, file: Path | None, assignments: list[str], *, reads: Sequence[Section] | None = None
    ) -> Self:
        """Return a role's options: from the run's folder if no file is given, overridden by the command line.

        Raises LocalError for a setting of the run itself.
        """
        run_dir = RunDir(Path(run))
        if not run_dir.exists:
            return cls(file, assignments, reads=reads)
        if any(one.startswith("run.") and one not in run_dir.overrides() for one in assignments):
            raise LocalError(f"the run in {run} is signed and fixed: --set run.* is for a new folder")
        _refuse_ignored([one for one in assignments if one not in run_dir.overrides()], reads)
        if file is not None:
            return cls(file, assignments)
        is_there = run_dir.config.exists()
        if not is_there:
            log.warning("%s is missing: put back a copy; without it, settings have their defaults", run_dir.config)
        return cls(run_dir.config if is_there else None, [*run_dir.overrides(), *assignments])

    def load(self, settings: type[S]) -> S:
        """Load the settings of one role. Raises LocalError."""
        return settings.load(self.tables, self.overrides.get(settings.section))


def section_of(assignment: str) -> str:
    """Return the table of an assignment, such as "worker" of "worker.threads=2"."""
    return assignment.partition(".")[0].strip()


def _refuse_ignored(assignments: list[str], reads: Sequence[Section] | None) -> None:
    for assignment in assignments if reads is not None else []:
        if section_of(assignment) not in (reads or ()):
            tables = ", ".join(f"[{section}]" for section in reads or ())
            raise LocalError(f"--set {assignment} would be ignored: this command reads only {tables}")
