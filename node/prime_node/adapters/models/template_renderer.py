"""The Renderer port over any model's own chat template: light, and for formats without a hand-written renderer.

Special tokens are recognised only in the template: each message's text is plain text, as in hf_tokenizer.py. A bridge is the
text that the template puts after the last answer. If the template does not show that answer, or closes it differently, there is
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prime_node.adapters.models.hf_tokenizer import BoundedTokenizer, HfTokenizer, chat_template, tokenizer_at_fault
from prime_node.ports.renderer import Message, Parsed

_MARK = "\N{LEFT WHITE SQUARE BRACKET}%d\N{RIGHT WHITE SQUARE BRACKET}"


class TemplateRenderer:
    """Renderer of a model folder. Example: TemplateRenderer(folder).render_ids([{"role": "user", "content": "sun"}])."""

    def __init__(self, folder: Path) -> None:
        """Read the template. Raises LocalError if the folder's files make no tokenizer."""
        self._plain = HfTokenizer(folder)
        with tokenizer_at_fault(folder):
            self._template = BoundedTokenizer(folder)
            self._render = chat_template(folder)

    def render_ids(self, messages: Sequence[Message]) -> list[int]:
        """Render messages as token ids. Raises ValueError if the template does not show each message exactly once."""
        ids: list[int] = []
        for is_text, part in self._parts(messages):
            ids += self._plain.encode(part) if is_text else self._template.encode(part)
        return ids

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        """Decode an answer as plain text."""
        return Parsed(self._plain.decode(list(token_ids)))

    def bridge_to_next_turn(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
    ) -> list[int] | None:
        example = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            parts = self._parts([*example, *new_messages])
        except ValueError:
            return None
        answer = [place for place, (is_text, part) in enumerate(parts) if is_text and part == "!"]
        after: list[int] = []
        for is_text, part in parts[answer[0] + 1 :]:
            after += self._plain.encode(part) if is_text else self._template.encode(part)
        stop = self._plain.stop_token_id
        if not after or after[0] != stop:
            return None  # the template closes an answer with another token than the model
        closed = bool(completion_token_ids) and completion_token_ids[-1] == stop
        return [*prompt_token_ids, *completion_token_ids, *after[closed:]]

    def _parts(self, messages: Sequence[Message]) -> list[tuple[bool, str]]:
        """Return pairs (is it a message's text, text), in order. Raises ValueError."""
        marked = [{**message, "content": _MARK % number} for number, message in enumerate(messages)]
        rest, parts = self._render(marked), []
        for number, message in enumerate(messages):
            before, found, rest = rest.partition(_MARK % number)
            if not found or _MARK % number in rest:
                raise ValueError("the chat template does not show each message exactly once and in order")
            parts += [(False, before), (True, str(message["content"]))]
        return [*parts, (False, rest)]
