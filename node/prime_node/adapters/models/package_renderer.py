"""The Renderer port over the `renderers` package: formats written by hand for each model family, the same that verifiers uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import renderers
from renderers.base import MODEL_RENDERER_MAP, load_tokenizer

from prime_node.adapters.models.model_folder import require_plain
from prime_node.ports.renderer import Message, Parsed

AUTO = "auto"
_UNMETERED = "default"
_FAMILIES = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "llama": "llama-3", "gpt_oss": "gpt-oss"}
"""model_type of config.json -> renderer, for folders whose name says nothing."""


class PackageRenderer:
    """Example: PackageRenderer(folder, name="auto")."""

    def __init__(self, folder: Path, *, name: str = AUTO) -> None:
        """`name` of a renderer of the package; auto asks the package by the model's name, then config.json's model_type.

        Raises ValueError where there is none, LocalError where the folder's files are not usable.
        """
        require_plain(folder)
        tokenizer = load_tokenizer(str(folder))
        self._renderer = renderers.create_renderer(tokenizer, renderer_config(folder, name, of=tokenizer.name_or_path))

    @property
    def name(self) -> str:
        """Of the renderer that was chosen."""
        return str(self._renderer.config.name)

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> list[int]:
        return list(self._renderer.render_ids(_list(messages), tools=_list(tools) or None, add_generation_prompt=True))

    def parse_response(self, token_ids: Sequence[int], *, tools: Sequence[Message] = ()) -> Parsed:
        found = self._renderer.parse_response(list(token_ids), tools=_list(tools) or None)
        return Parsed(found.content, found.reasoning_content or "", tuple(map(_tool_call, found.tool_calls or ())))

    def bridge_to_next_turn(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
    ) -> list[int] | None:
        bridged = self._renderer.bridge_to_next_turn(
            list(prompt_token_ids), list(completion_token_ids), _list(new_messages), tools=_list(tools) or None
        )
        return None if bridged is None else list(bridged.token_ids)


def renderer_config(folder: Path, name: str, *, of: str = "") -> Any:
    """The package's own description of a renderer. `of`: the model's name on a hub. Raises ValueError."""
    if name == AUTO:
        known = MODEL_RENDERER_MAP
        model_type = json.loads((folder / "config.json").read_bytes()).get("model_type")
        name = known.get(of) or _FAMILIES.get(model_type, "")
        if not name:
            raise ValueError(f"no renderer is known for models of type {model_type!r}: name one")
    if name == _UNMETERED:
        raise ValueError(f"renderer {name!r} renders the model's own template without a limit: name `template`")
    try:
        return renderers.config_from_name(name)
    except (KeyError, ValueError) as error:
        raise ValueError(f"no renderer {name!r}: {error}") from None


def _list(messages: Sequence[Message]) -> list[Any]:
    return [dict(message) for message in messages]


def _tool_call(call: Any) -> Message:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})
    return {"type": "function", "id": call.id or "", "function": {"name": call.name, "arguments": arguments}}
