"""`prime-node`: the commands, and what every one of them does with an error.

Exit codes: 0 done; 1 a check did not hold (verify); 2 wrong usage; 3 this machine or its settings are at fault; 4 the other
side refused (banned, wrong run, ...); 130 interrupted.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from prime_node import __version__
from prime_node.cli import config, coordinator, doctor, fetch, join, keys, new, seed, trainer, up, validator, verify
from prime_node.patience import causes_of
from prime_protocol.errors import LocalError, PrimeError

app = typer.Typer(
    name="prime-node",
    help="Train one model with workers that nobody has to trust.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (up, join, seed, fetch, verify, new, coordinator, trainer, validator, doctor, config):
    name = module.__name__.rpartition(".")[2]
    app.command(name)(getattr(module, name))
app.add_typer(keys.keys, name="keys")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: errors that we raise on purpose become one line, everything else is a bug and keeps its traceback."""
    try:
        app()
    except (PrimeError, BaseExceptionGroup) as error:
        sys.exit(tell(error))


def tell(error: BaseException) -> int:
    """Say an error that was raised on purpose in one line; returns the exit code. Any other is raised again."""
    told = outcome_of(error)
    if told is None:
        raise error
    code, line = told
    Console(stderr=True).print(f"prime-node: {line}", markup=False, highlight=False, soft_wrap=True)
    return code


def outcome_of(error: BaseException) -> tuple[int, str] | None:
    """Exit code and line for an error that was raised on purpose; None where a bug is in it.

    The tasks of a role run in groups, so what one of them raises arrives in a group.
    """
    causes = causes_of(error)
    if not all(isinstance(cause, PrimeError) for cause in causes):
        return None
    local = next((cause for cause in causes if isinstance(cause, LocalError)), None)
    return (4, f"refused by the other side: {causes[0]}") if local is None else (3, str(local))
