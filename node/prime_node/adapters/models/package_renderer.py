"""The Renderer port over the `renderers` package: hand-written formats for each model family, as verifiers uses them."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import renderers
from renderers.base import MODEL_RENDERER_MAP, ParsedResponse, load_tokenizer
from renderers.configs import BaseRendererConfig, CustomRendererConfig, RendererConfig

from prime_node.adapters.models.model_folder import require_plain
from prime_node.ports.renderer import Message, Parsed


class TooCostly(Exception):
    """The code took more processor time than it may."""


@contextlib.contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Raise TooCostly once this process has computed for `seconds` within the context.

    Only the main thread can be interrupted, which also holds within a search by `re`. In others there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TooCostly(f"it took more than {seconds:g} s of the processor's time")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


AUTO = "auto"
_UNMETERED = "default"
_FAMILIES = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "llama": "llama-3", "gpt_oss": "gpt-oss"}
"""model_type of config.json -> renderer, for folders whose name does not identify the model."""

PARSE_S_MAX = 2.0
"""Processor time of parsing one answer, many times what the longest honest one takes."""


class PackageRenderer:
    """Renderer of a model folder. Example: PackageRenderer(folder, name="auto")."""

    def __init__(self, folder: Path, *, name: str = AUTO) -> None:
        """Choose a renderer of the package by `name`.

        For auto the package chooses by model name, then by config.json's model_type. Raises ValueError if there is none,
        LocalError if the folder's files are not usable.
        """
        require_plain(folder)
        self._tokenizer = tokenizer = load_tokenizer(str(folder))
        self._renderer = renderers.create_renderer(tokenizer, renderer_config(folder, name, of=tokenizer.name_or_path))

    @property
    def name(self) -> str:
        """Name of the chosen renderer."""
        return str(self._renderer.config.name)

    def render_ids(self, messages: Sequence[Message]) -> list[int]:
        return list(self._renderer.render_ids(_list(messages), add_generation_prompt=True))

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        """Parse an answer into text, reasoning and tool calls. Raises TooCostly."""
        found = parsed_within(self._renderer.parse_response, self._tokenizer, list(token_ids))
        calls = tuple(map(_tool_call, found.tool_calls))
        return Parsed(found.content, found.reasoning_content or "", calls)

    def bridge_to_next_turn(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
    ) -> list[int] | None:
        bridged = self._renderer.bridge_to_next_turn(
            list(prompt_token_ids), list(completion_token_ids), _list(new_messages)
        )
        return None if bridged is None else list(bridged.token_ids)


def parsed_within(parse: Callable[..., Any], tokenizer: Any, token_ids: list[int], **further: Any) -> Any:
    """Return what the package's `parse` finds in an answer; text alone where it fails, because no answer may end its episode.

    A call whose name is no text is none. Raises TooCostly: for a few families, its searches take time that grows with the third
    power of a call's length.
    """
    try:
        with processor_limit(PARSE_S_MAX):
            found = parse(token_ids, **further)
    except (ValueError, TypeError, RecursionError):
        return ParsedResponse(tokenizer.decode(token_ids, skip_special_tokens=True))
    found.tool_calls = [call for call in found.tool_calls or () if isinstance(call.name, str)]
    return found


class BoundedRendererConfig(BaseRendererConfig):  # type: ignore[misc]  # the package has no types
    """Configuration of BoundedRenderer."""

    name: Literal["custom"] = "custom"
    _internal_fields = frozenset({"bounded"})
    bounded: RendererConfig | None = None
    """Configuration of the renderer to bound; None: the model's."""


class BoundedRenderer:
    """Renderer of the package that parses within PARSE_S_MAX, made from a configuration."""

    config_class = BoundedRendererConfig

    def __new__(cls, tokenizer: Any, config: BoundedRendererConfig) -> Any:
        """Return the bounded renderer."""
        renderer = renderers.create_renderer(tokenizer, config.bounded)
        renderer.parse_response = partial(parsed_within, renderer.parse_response, tokenizer)
        return renderer


def bounded_config(folder: Path, name: str | None) -> Any:
    """Return the configuration of a BoundedRenderer. `name`: as for PackageRenderer, or None."""
    bounded = None if name is None else renderer_config(folder, name)
    return CustomRendererConfig(import_path=f"{__name__}:BoundedRenderer", bounded=bounded)


def renderer_config(folder: Path, name: str, *, of: str = "") -> Any:
    """Return the package's own description of a renderer. `of`: the model's name on a hub. Raises ValueError."""
    if name == AUTO:
        known = MODEL_RENDERER_MAP
        model_type = json.loads((folder / "config.json").read_bytes()).get("model_type")
        name = known.get(of) or _FAMILIES.get(model_type, "")
        if not name:
            raise ValueError(f"no renderer is known for models of type {model_type!r}: set one by name")
    if name == _UNMETERED:
        raise ValueError(f"renderer {name!r} renders the model's own template without a limit: use `template`")
    try:
        return renderers.config_from_name(name)
    except (KeyError, ValueError) as error:
        raise ValueError(f"no renderer {name!r}: {error}") from None


def _list(messages: Sequence[Message]) -> list[Any]:
    return [dict(message) for message in messages]


def _tool_call(call: Any) -> Message:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})
    return {"type": "function", "id": call.id or "", "function": {"name": call.name, "arguments": arguments}}
