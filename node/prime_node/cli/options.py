"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import typer

from prime_node.cli.run_dir import RunDir
from prime_node.config import Settings, check_sections, parse_overrides, read_toml
from prime_protocol.errors import LocalError

Section = Literal["run", "up", "coordinator", "trainer", "validator", "worker", "environments"]
SECTIONS = set(get_args(Section))
"""Tables that a config file may contain."""

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="TOML file; it holds only what differs from the defaults.", show_default=False),
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        "-s",
        metavar="SECTION.NAME=VALUE",
        help="Override one setting; repeatable.",
        show_default=False,
    ),
]
StopWithParent = Annotated[bool, typer.Option("--stop-with-parent", hidden=True, help="Stop when standard input ends.")]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"], typer.Option("--log-level", case_sensitive=False, help="Log level.")
]
EngineName = Literal["auto", "transformers", "vllm"]

S = TypeVar("S", bound=Settings)


class Options:
    """Parsed config file with the overrides of the command line."""

    def __init__(self, file: Path | None, assignments: list[str]) -> None:
        self.tables: dict[str, Any] = {} if file is None else read_toml(file)
        if file is not None:
            check_sections(self.tables, SECTIONS, path=file)
        self.assignments = assignments
        self.overrides = parse_overrides(assignments)
        check_sections(self.overrides, SECTIONS, path=Path("--set"))

    @classmethod
    def of_run(cls, run: str, file: Path | None, assignments: list[str]) -> Self:
        """Return a role's options: from the run's folder if no file is given, overridden by the command line.

        Raises LocalError for a setting of the run itself.
        """
        run_dir = RunDir(Path(run))
        if file is not None or not run_dir.exists:
            return cls(file, assignments)
        if any(one.startswith("run.") and one not in run_dir.overrides() for one in assignments):
            raise LocalError(f"the run in {run} is signed and fixed: --set run.* is for a new folder")
        return cls(run_dir.config if run_dir.config.exists() else None, [*run_dir.overrides(), *assignments])

    def load(self, settings: type[S]) -> S:
        """Load the settings of one role. Raises LocalError."""
        return settings.load(self.tables, self.overrides.get(settings.section))
