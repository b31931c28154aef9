"""Conversion of conversations to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
"""Message in OpenAI's chat format. Example: {"role": "user", "content": "Spell this word backward: sun"}."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed answer of the model."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[Message, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as a message for the conversation that follows."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = list(self.tool_calls)
        return found


class Renderer(Protocol):
    """One model family's chat format. Pure: the same on every machine with the same release and the same model files."""

    def render_ids(self, messages: Sequence[Message]) -> list[int]:
        """Render the whole conversation, with the opening of the next answer."""

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        """Parse a sampled answer, its stop token included if it has one."""

    def bridge_to_next_turn(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
    ) -> list[int] | None:
        """Return the next prompt: prompt and answer exactly as they were, then the new messages.

        Returns None if the format cannot guarantee that this equals the whole conversation rendered again. The caller
        then calls `render_ids`, and the earlier samples are not a prefix of the result.
        """
