"""Conversations as token ids, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
"""As in OpenAI's chat format. Example: {"role": "user", "content": "Spell this word backward: sun"}."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What an answer says."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[Message, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """As a part of the conversation that follows."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = list(self.tool_calls)
        return found


class Renderer(Protocol):
    """One model family's chat format. Pure: the same on every machine with the same release and the same model files."""

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> list[int]:
        """The whole conversation, with the opening of the answer that comes next."""
        ...

    def parse_response(self, token_ids: Sequence[int], *, tools: Sequence[Message] = ()) -> Parsed:
        """A sampled answer, its stop token included if it has one."""
        ...

    def bridge_to_next_turn(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
    ) -> list[int] | None:
        """The next prompt: prompt and answer exactly as they were, and what is new behind them.

        None where the format cannot promise that it means the same as the whole conversation rendered anew: then `render_ids` is
        to be asked, and what was sampled before is not a prefix of it.
        """
        ...
