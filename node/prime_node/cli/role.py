"""What the commands of the trusted roles have in common: their options, and how they become a process that lives and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import typer

from prime_node.cli.options import ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import Folder, Key, Place, Run, find_place


def role_command(
    role: str, main: Callable[[Place, Options, asyncio.Event], Awaitable[int]], *, grace_s: float, about: str
) -> Callable[..., None]:
    """The command of a role that runs until `main`, told to stop by the event, returns its exit code; `about` is its help."""

    def command(
        run: Run,
        key: Key = None,
        folder: Folder = None,
        config: ConfigFile = None,
        assignments: Set = [],  # noqa: B006 - typer reads it, nobody changes it
        log_level: LogLevel = "INFO",
        stop_with_parent: StopWithParent = False,
    ) -> None:
        from prime_node.cli.lifetime import run_role
        from prime_node.observe import setup_logging

        setup_logging(role, level=log_level)
        options = Options(config, assignments)
        place = find_place(run, role, key=key, folder=folder)
        raise typer.Exit(
            run_role(lambda stop: main(place, options, stop), stop_with_parent=stop_with_parent, grace_s=grace_s)
        )

    command.__doc__ = about
    return command
