"""`prime-node completion`: completion of commands and options in a shell."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Your shell.")]) -> None:
    """Print a script for your shell that completes commands and options with Tab.

    \b
    bash: prime-node completion bash > ~/.local/share/bash-completion/completions/prime-node
    zsh:  prime-node completion zsh > FOLDER/_prime-node, with FOLDER in $fpath
    fish: prime-node completion fish > ~/.config/fish/completions/prime-node.fish
    """
    from typer._completion_shared import get_completion_script

    from prime_node.cli.main import COMPLETION
    from prime_node.cli.say import say

    say(*get_completion_script(prog_name="prime-node", complete_var=COMPLETION, shell=shell).splitlines())
