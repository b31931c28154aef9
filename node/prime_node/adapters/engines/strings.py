"""The turns of a rollout as one sequence: a prefix that later prompts repeat is forwarded once, not once per turn.

If forwarded one by one, T turns cost about T / 2 times the tokens of the last turn. In one sequence each token still sees
exactly its own prefix, so the results differ only in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_node.ports.engine import ScoreRequest

TokenIds = tuple[int, ...]


@dataclass(slots=True)
class String:
    """Concatenated requests. Example: two turns, String((1, 2), [3, 4, 9, 9, 5], [(0, s, 0), (1, s, 1), (4, t, 0)])."""

    prompt_token_ids: TokenIds
    """Prompt of the first request."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens after that prompt: completions, and the text between them."""
    chosen: list[tuple[int, int | None, int]] = field(default_factory=list)
    """(Place in `token_ids`, seed, position in its completion) of each token that the model chose."""
    hidden: bool = False

    def append(self, request: ScoreRequest) -> None:
        """Append a request, whose prompt begins with all tokens so far."""
        self.token_ids += request.prompt_token_ids[len(self.prompt_token_ids) + len(self.token_ids) :]
        first = len(self.token_ids)
        self.token_ids += request.completion_token_ids
        places = range(len(request.completion_token_ids))
        self.chosen += [(first + place, request.seed, place) for place in places]
        self.hidden |= request.hidden


def strung(requests: Sequence[ScoreRequest]) -> list[String]:
    """Join each request to the one before it if it continues it exactly. The chosen tokens keep the requests' order."""
    strings: list[String] = []
    before: TokenIds | None = None
    for request in requests:
        if before is None or request.prompt_token_ids[: len(before)] != before:
            strings.append(String(request.prompt_token_ids))
        strings[-1].append(request)
        before = request.prompt_token_ids + request.completion_token_ids
    return strings
