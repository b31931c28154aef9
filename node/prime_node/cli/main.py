"""`prime-node`: the commands."""

from __future__ import annotations

import sys

import typer

from prime_node import __version__
from prime_node.cli import (
    calibrate,
    config,
    coordinator,
    doctor,
    evaluate,
    evidence,
    fetch,
    join,
    keys,
    ledger,
    new,
    operate,
    seed,
    trace,
    trainer,
    up,
    validator,
    verify,
)
from prime_node.cli.outcome import tell
from prime_protocol.errors import PrimeError

app = typer.Typer(
    name="prime-node",
    help="Train one model with workers that nobody has to trust.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    up,
    join,
    seed,
    fetch,
    verify,
    evaluate,
    trace,
    new,
    coordinator,
    trainer,
    validator,
    calibrate,
    doctor,
    config,
):
    name = module.__name__.rpartition(".")[2]
    app.command(name)(getattr(module, name))
app.add_typer(keys.keys, name="keys")
app.add_typer(ledger.ledger, name="ledger")
app.add_typer(evidence.evidence, name="evidence")
app.add_typer(operate.operate, name="operate")


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
