"""`prime-node`: the commands. Each is imported when it is called, so no command waits for another's imports."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.main import get_command

from prime_node import __version__

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter
    from typer._click.shell_completion import CompletionItem

SUMMARIES = {
    "up": "Start or resume a whole run on this machine.",
    "join": "Lend this machine to a run.",
    "pause": "Stop this machine's work at once, until resume.",
    "resume": "Let this machine work again.",
    "finish": "Finish the work in progress, then leave the run.",
    "limit": "Show or change when and how much a worker computes.",
    "open": "Open this machine's page: what its worker does.",
    "status": "Show the state of a run or of this machine's workers.",
    "seed": "Serve a run's policies to its workers: no GPU needed.",
    "fetch": "Download and verify a policy from the run's peers.",
    "verify": "Prove that a published checkpoint is what it claims to be.",
    "replay": "Train published steps again: do the policies follow?",
    "evaluate": "Evaluate the newest policies on held-out problems.",
    "trace": "Show the timeline of trainer, broadcast and workers.",
    "new": "Make a run: keys, model, signed RunSpec, join link.",
    "coordinator": "Serve a run.",
    "gateway": "Take connections in front of a run's coordinator.",
    "trainer": "Train a run's policies and publish them.",
    "validator": "Judge a run's rollouts.",
    "calibrate": "Measure how far honest engines differ.",
    "service": "Run a role as a service that starts with the machine.",
    "identity": "Keep this machine's key; join several machines as one person.",
    "doctor": "Check what this machine can do and what is missing.",
    "config": "Print every setting, its default and its meaning.",
    "operate": "Ban and invite workers; pause or limit a run.",
    "keys": "Show, rotate and revoke a run's keys.",
    "ledger": "Export and verify a run's ledger of bundles.",
    "evidence": "Check the evidence for a ban.",
    "support-bundle": "Collect logs and settings for a report, and remove secrets.",
    "completion": "Print a script that completes commands in your shell.",
    "man": "Write manual pages.",
    "version": "Print the version.",
    "upgrade": "Install a newer release, and keep this one if that fails.",
}
"""Summary of each command for one terminal line; the commands' own help says more. Each key is the name of a module in this
package and of the function or Typer group that it defines, except those in CONTROLS."""
GROUPS = {
    "Contribute": ("join", "open", "pause", "resume", "finish", "limit", "seed", "identity", "doctor"),
    "Operate": (
        *("up", "new", "coordinator", "gateway", "trainer", "validator"),
        *("operate", "keys", "calibrate", "evaluate", "trace"),
    ),
    "Verify": ("verify", "replay", "fetch", "ledger", "evidence"),
    "Everyone": ("status", "service", "config", "support-bundle", "completion", "man", "version", "upgrade"),
}
"""Headings of the overview, and the commands under each."""
MODULES = {"support-bundle": "support_bundle"}
"""Module and function of a command whose name is none in Python."""
CONTROLS = frozenset({"pause", "resume", "finish", "limit", "open"})
"""Commands that are functions of the module control, each with a name like `pause_worker`."""


COMPLETION = "_PRIME_NODE_COMPLETE"
"""Environment variable with which a shell asks for completions."""
FINAL_AS_0 = "_PRIME_NODE_FINAL_AS_0"
"""Environment variable for launchd, which starts a role again after each exit code but 0: final codes become 0."""
CONFINED = frozenset({"join", "seed", "validator"})
"""Commands that confine themselves, which restricts only threads started later. Importing numpy would start some."""


class Commands(Mapping[str, "Command"]):
    """Commands by name, in the form that typer expects."""

    def __getitem__(self, name: str) -> Command:
        if name not in SUMMARIES:
            raise KeyError(name)
        plain = MODULES.get(name, name)
        module, function = ("control", f"{name}_worker") if name in CONTROLS else (plain, plain)
        found: Any = {"version": version, "completion": completion}.get(name)
        found = found or getattr(import_module(f"prime_node.cli.{module}"), function)
        if not isinstance(found, typer.Typer):
            alone = _typer()
            alone.command(name)(found)
            found = alone
        command = get_command(found)
        command.short_help = SUMMARIES[name]
        command.epilog = None if name == "version" else _needs(name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


def _needs(name: str) -> str | None:
    """Return the line of a command's help on the extras that it needs."""
    from prime_node.cli.missing_extra import COMMAND_EXTRAS, how_to_install

    extras = COMMAND_EXTRAS.get(name)
    return None if extras is None else f"Needs the extra {' and '.join(extras)}: {how_to_install(*extras)}"


class Overview(TyperGroup):
    """Group that lists and finds commands without importing the others."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()  # type: ignore[assignment]  # nothing adds one

    def list_commands(self, ctx: Context) -> list[str]:
        """Return the commands in the order of the overview."""
        return list(SUMMARIES)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the summaries under their headings, without importing the commands."""
        width = max(map(len, SUMMARIES))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), SUMMARIES[name]) for name in names])

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin so, without importing them; else what an option begins with."""
        from typer._click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=text) for name, text in SUMMARIES.items() if name.startswith(incomplete)]


def _typer(**settings: Any) -> typer.Typer:
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


app = _typer(name="prime-node", cls=Overview)


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def overview(
    wanted: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model with untrusted workers."""


def version() -> None:
    """Print the version."""
    print(__version__)


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Your shell.")]) -> None:
    """Print a script for your shell that completes commands and options with Tab.

    \b
    bash: prime-node completion bash > ~/.local/share/bash-completion/completions/prime-node
    zsh:  prime-node completion zsh > FOLDER/_prime-node, with FOLDER in $fpath
    fish: prime-node completion fish > ~/.config/fish/completions/prime-node.fish
    """
    from typer._completion_shared import get_completion_script

    from prime_node.cli.say import say

    say(*get_completion_script(prog_name="prime-node", complete_var=COMPLETION, shell=shell).splitlines())


def main() -> None:
    """Run the command line. Print expected errors as one line; anything else is a bug and keeps its traceback."""
    no_final = os.environ.pop(FINAL_AS_0, None) is not None  # ranks of a trainer keep their codes: torchrun reads them
    if sys.argv[1:2] and sys.argv[1] in CONFINED:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Freeze all objects at exit: the interpreter's last collection would scan all that torch and transformers made, for
    # seconds.
    atexit.register(gc.freeze)
    if COMPLETION in os.environ:  # a shell asks what could follow (completion.py)
        from typer._completion_classes import completion_init

        completion_init()
    try:
        try:
            app(prog_name="prime-node")
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 (a bug is raised again)
            from prime_node.cli.outcome import tell

            sys.exit(tell(error, next(iter(sys.argv[1:]), "")))
    except SystemExit as ended:
        if no_final:
            from prime_node.cli.lifetime import FINAL_CODES

            sys.exit(0 if ended.code in FINAL_CODES else ended.code)
        raise
