"""The Tokenizer port over the `tokenizers` library.

Light, for the coordinator: neither torch nor transformers is imported. The template is the model's own (`chat_template` of
tokenizer_config.json, or chat_template.jinja), with one user message and the start of the answer. It is rendered once around a
marker and cut there. Special tokens are recognised only in the template, never in a problem's text, so no problem can end its
own message or imitate another speaker. The token ids of a prompt are head + text + tail. Head and tail are the same for every
problem, so engines can share the head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from prime_node.adapters.models.chat_template import compile_template
from prime_node.adapters.models.model_folder import TOKENIZER_FILE, read_config, read_json, read_text, read_tokenizer
from prime_protocol import limits
from prime_protocol.errors import LocalError

_DECODED_CHARS_MAX = 8 * limits.TOKENIZER_TEXT_BYTES_MAX
_MARKER = "\N{LEFT WHITE SQUARE BRACKET}text\N{RIGHT WHITE SQUARE BRACKET}"


class HfTokenizer:
    """Tokenizer of a folder.

    Example: HfTokenizer(folder).encode_prompt("sun") == [258, 115, 117, 110, 259] for the tiny model.
    """

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer. Raises LocalError if the folder's files make no tokenizer."""
        with tokenizer_at_fault(folder):
            self._read(folder)

    def _read(self, folder: Path) -> None:
        self._bounded = BoundedTokenizer(folder)
        self._tokenizer = self._bounded.library
        config = read_json(folder / "tokenizer_config.json")
        self._vocab_size = int(read_config(folder).get("vocab_size", self._tokenizer.get_vocab_size()))
        end = _token_text(config.get("eos_token"))
        stop_token_id = self._tokenizer.token_to_id(end) if end else None
        if stop_token_id is None:
            raise ValueError(f"{folder}/tokenizer_config.json: its eos_token is not in tokenizer.json")
        self._stop_token_id: int = stop_token_id
        head, tail = _template_parts(folder)
        self._head, self._tail = self.encode(head), self.encode(tail)
        # From here on text is only text: a special token in it is encoded as the characters of its name.
        self._tokenizer.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the model's, or else the tokenizer's."""
        return self._vocab_size

    @property
    def stop_token_id(self) -> int:
        return self._stop_token_id

    def encode_prompt(self, text: str) -> list[int]:
        return [*self._head, *self.encode(text), *self._tail]

    def encode(self, text: str) -> list[int]:
        """Encode a text. Raises ValueError if the library fails on it, or would take too much memory."""
        return self._bounded.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens. Raises ValueError if the library fails on them, or would take too much memory."""
        return self._bounded.decode(token_ids)


class BoundedTokenizer:
    """The library's tokenizer of a folder, which encodes no text that its steps make too long."""

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json. Raises LocalError, and whatever the library raises."""
        self._path, self._growth = folder / TOKENIZER_FILE, read_tokenizer(folder)
        self.library = Tokenizer.from_file(str(self._path))
        self.library.no_truncation()  # it would cut prompts, or repeat parts of them
        self.library.post_processor = None  # it adds special tokens, which nothing asks for, or repeats the text

    def encode(self, text: str) -> list[int]:
        """Encode a text. Raises ValueError if it is too long, or if the library fails on it."""
        if (size := len(text.encode())) * self._growth > limits.TOKENIZER_TEXT_BYTES_MAX:
            raise ValueError(
                f"a text of {size:,} bytes, which the steps of {self._path} may make {self._growth:,.0f} times as long, is above "
                f"{limits.TOKENIZER_TEXT_BYTES_MAX:,}"
            )
        with panics_raised():
            ids: list[int] = self.library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens, without special ones. Raises ValueError if their text is too long, or if the library fails on them."""
        if len(token_ids) * limits.TOKENIZER_WORD_CHARS_MAX * self._growth > _DECODED_CHARS_MAX:
            chars = sum(len(self.library.id_to_token(one) or "") for one in token_ids)
            if chars * self._growth > _DECODED_CHARS_MAX:
                raise ValueError(
                    f"the text of {len(token_ids):,} tokens may be above {_DECODED_CHARS_MAX:,} characters"
                )
        with panics_raised():
            text: str = self.library.decode(token_ids, skip_special_tokens=True)
        return text


@contextlib.contextmanager
def tokenizer_at_fault(folder: Path) -> Iterator[None]:
    """Report any error inside as an error in the tokenizer's files: the libraries raise anything for unexpected content."""
    try:
        with panics_raised():
            yield
    except LocalError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or "no reason given"
        raise LocalError(
            f"{folder}: the tokenizer's files (tokenizer.json, tokenizer_config.json, chat template) are not usable "
            f"({type(error).__name__}: {reason}); ask the run's operator to fix them if they are the run's"
        ) from error


@contextlib.contextmanager
def panics_raised() -> Iterator[None]:
    """Convert a panic of a library in Rust to a ValueError. A panic is no Exception and would end the whole process."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer library failed: {' '.join(str(error).split())[:200]}") from None


def _template_parts(folder: Path) -> tuple[str, str]:
    """Return the text before and after a problem's text; both are empty without a template."""
    rendered = chat_template(folder)([{"role": "user", "content": _MARKER}])
    if rendered.count(_MARKER) != 1:
        raise ValueError(f"{folder}: the chat template does not show a user's message exactly once and unchanged")
    head, _, tail = rendered.partition(_MARKER)
    return head, tail


def chat_template(folder: Path) -> Callable[[Sequence[Mapping[str, Any]]], str]:
    """Return a renderer of messages that adds the start of the next answer. Without a template it concatenates their texts."""
    config = read_json(folder / "tokenizer_config.json")
    begin, end = (_token_text(config.get(name)) or "" for name in ("bos_token", "eos_token"))
    template = _chat_template(folder, config)
    if template is None:
        return lambda messages: (
            begin
            + "".join(f"{message['content']}{end if message['role'] == 'assistant' else ''}" for message in messages)
        )
    render = compile_template(template)
    return lambda messages: render(
        {"messages": messages, "add_generation_prompt": True, "bos_token": begin, "eos_token": end}
    )


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str | None:
    """Return the text of a special token, which the configuration gives as a text or as an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
