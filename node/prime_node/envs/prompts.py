"""From a problem to the prompt of a lease. The coordinator that leases it and the validators that check it call this alone."""

from __future__ import annotations

from prime_node.ports.environment import Environment, Tokenizer
from prime_protocol.limits import Limits


def prompt_of(environment: Environment, index: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return a problem's prompt: its environment's text, in the template of the run's model. It is never cut.

    Raises whatever the environment or the tokenizer raises.
    """
    return tuple(tokenizer.encode_prompt(environment.prompt(index)))


def is_leasable(prompt_token_ids: tuple[int, ...], limits: Limits) -> bool:
    """Return whether a prompt has a length that the run leases. The coordinator draws another problem if it has not."""
    return 1 <= len(prompt_token_ids) <= limits.prompt_tokens_max
