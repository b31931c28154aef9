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
SUMMARIES = {
    up: "Start everything on this machine and train; or go on.",
    join: "Lend this machine to a run.",
    seed: "Serve a run's policies to its workers: no GPU needed.",
    fetch: "Download and verify a policy from the run's peers.",
    verify: "Prove that a published checkpoint is what it claims to be.",
    evaluate: "Evaluate the newest policies on held-out problems.",
    trace: "Show what trainer, broadcast and workers did when.",
    new: "Make a run: keys, model, signed RunSpec, join link.",
    coordinator: "Serve a run.",
    trainer: "Train a run's policies and publish them.",
    validator: "Judge a run's rollouts.",
    calibrate: "Measure how far honest engines differ.",
    doctor: "What can this machine do, and what is missing?",
    config: "Print every setting, its default and its meaning.",
}
"""In one line of a terminal; the commands say more themselves."""
for module, summary in SUMMARIES.items():
    name = module.__name__.rpartition(".")[2]
    app.command(name, short_help=summary)(getattr(module, name))
app.add_typer(operate.operate, name="operate", short_help="Ban, forgive and invite workers; let a run drain.")
app.add_typer(keys.keys, name="keys", short_help="Show, rotate and revoke a run's keys.")
app.add_typer(ledger.ledger, name="ledger", short_help="Export and verify a run's ledger of bundles.")
app.add_typer(evidence.evidence, name="evidence", short_help="Check what a ban rests on.")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: errors that we raise on purpose become one line, everything else is a bug and keeps its traceback."""
    try:
        app()
    except (PrimeError, OSError, BaseExceptionGroup) as error:
        sys.exit(tell(error))
