"""What the commands of the trusted roles have in common: their options, and how they become a process that lives and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import typer

from prime_node.cli.options import ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import Folder, Key, Place, Run, find_place

Main = Callable[["Place", Options, asyncio.Event], Awaitable[int]]
"""Runs a role until the event tells it to stop; returns its exit code."""


def run_place(main: Main, place: Place, options: Options, *, stop_with_parent: bool, grace_s: float) -> int:
    """A role's process from here to its end. Returns the exit code."""
    from prime_node.cli.lifetime import run_role

    return run_role(lambda stop: main(place, options, stop), stop_with_parent=stop_with_parent, grace_s=grace_s)


def role_command(
    role: str, main: Main, *, grace_s: float, about: str, prepare: Callable[[], None] = lambda: None
) -> Callable[..., None]:
    """The command of a role that runs until `main` returns; `about` is its help. `prepare` comes before the event loop."""

    def command(
        run: Run,
        key: Key = None,
        folder: Folder = None,
        config: ConfigFile = None,
        assignments: Set = [],  # noqa: B006 - typer reads it, nobody changes it
        log_level: LogLevel = "INFO",
        stop_with_parent: StopWithParent = False,
    ) -> None:
        from prime_node.observe import setup_logging

        setup_logging(role, level=log_level)
        options = Options.of_run(run, config, assignments)
        place = find_place(run, role, key=key, folder=folder)
        prepare()
        raise typer.Exit(run_place(main, place, options, stop_with_parent=stop_with_parent, grace_s=grace_s))

    command.__doc__ = about
    return command
