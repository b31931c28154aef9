"""The Renderer port over any model's own chat template: light, and for formats that nobody has written a renderer for.

Special tokens are recognised in the template alone: each message's text stands for itself, as in hf_tokenizer.py. A bridge is
what the template puts behind the last answer; where it does not show that answer, or closes it otherwise, there is none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from prime_node.adapters.models.hf_tokenizer import HfTokenizer, chat_template, panics_raised, tokenizer_at_fault
from prime_node.ports.renderer import Message, Parsed

_MARK = "\N{LEFT WHITE SQUARE BRACKET}%d\N{RIGHT WHITE SQUARE BRACKET}"


class TemplateRenderer:
    """Example: TemplateRenderer(folder).render_ids([{"role": "user", "content": "sun"}])."""

    def __init__(self, folder: Path) -> None:
        """Raises LocalError where the folder's files make no tokenizer."""
        self._plain = HfTokenizer(folder)
        with tokenizer_at_fault(folder):
            self._template = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._render = chat_template(folder)

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> list[int]:
        """Raises ValueError where the template does not show each message exactly once."""
        _refuse_tools(tools)
        ids: list[int] = []
        for is_text, part in self._parts(messages):
            ids += self._plain.encode(part) if is_text else self._special(part)
        return ids

    def parse_response(self, token_ids: Sequence[int], *, tools: Sequence[Message] = ()) -> Parsed:
        _refuse_tools(tools)
        return Parsed(self._plain.decode(list(token_ids)))

    def bridge_to_next_turn(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
    ) -> list[int] | None:
        _refuse_tools(tools)
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            parts = self._parts([*said, *new_messages])
        except ValueError:
            return None
        answer = [place for place, (is_text, part) in enumerate(parts) if is_text and part == "!"]
        after: list[int] = []
        for is_text, part in parts[answer[0] + 1 :]:
            after += self._plain.encode(part) if is_text else self._special(part)
        stop = self._plain.stop_token_id
        if not after or after[0] != stop:
            return None  # the template closes an answer otherwise than the model does
        closed = bool(completion_token_ids) and completion_token_ids[-1] == stop
        return [*prompt_token_ids, *completion_token_ids, *after[closed:]]

    def _special(self, text: str) -> list[int]:
        with panics_raised():
            ids: list[int] = self._template.encode(text, add_special_tokens=False).ids
        return ids

    def _parts(self, messages: Sequence[Message]) -> list[tuple[bool, str]]:
        """(is it a message's text, text), in order. Raises ValueError."""
        marked = [{**message, "content": _MARK % number} for number, message in enumerate(messages)]
        rest, parts = self._render(marked), []
        for number, message in enumerate(messages):
            before, found, rest = rest.partition(_MARK % number)
            if not found or _MARK % number in rest:
                raise ValueError("the chat template does not show each message exactly once and in order")
            parts += [(False, before), (True, str(message["content"]))]
        return [*parts, (False, rest)]


def _refuse_tools(tools: Sequence[Message]) -> None:
    if tools:
        raise ValueError(
            f"a plain chat template takes no tools: choose a renderer of the model ({json.dumps(tools)[:80]})"
        )
