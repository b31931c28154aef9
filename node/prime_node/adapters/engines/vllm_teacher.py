"""A teacher behind vLLM's HTTP server: `vllm serve MODEL`, its completions endpoint with prompt_logprobs.

vLLM returns a prompt's logprobs with any completion, so one token is requested and discarded. Tokens are sent as ids: nothing
is tokenized again. vLLM's default logprobs are those of the model itself, before any temperature, as distillation needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import aiohttp

from prime_node.ports.teacher import TeacherRefusal
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import LocalError

CONNECT_S_MAX = 10.0
ANSWER_S_MAX = 600.0
"""Timeout for a large teacher on a few sequences; after it the teacher counts as unreachable, and the request is repeated."""
SAID_MAX = 300
"""Number of characters of a refusal that are shown."""


class VllmTeacher:
    """Implementation of ports.teacher.Teacher."""

    def __init__(self, url: str, *, model: str) -> None:
        """Create a client. `url` has no /v1; `model` is the name under which the server offers the model."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Request the logprobs of all sequences at once.

        Raises TeacherRefusal for HTTP 400, LocalError for an answer without logprobs.
        """
        if not sequences:
            return []
        answer = await self._ask(
            {
                "model": self._model,
                "prompt": [list(sequence) for sequence in sequences],
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 0,
            }
        )
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            return [
                _chosen(choice["prompt_logprobs"], sequence)
                for choice, sequence in zip(choices, sequences, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise LocalError(
                f"teacher {self._url}: no prompt logprobs in its answer ({error!r}); is it a vLLM server?"
            ) from None

    async def sequence_tokens_max(self) -> int | None:
        """Return max_model_len less the token that every request samples, as the server's list of models states it."""
        answer = await self._ask(None, path="models")
        try:
            (tokens_max,) = (one.get("max_model_len") for one in answer["data"] if one["id"] == self._model)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        return tokens_max - 1 if isinstance(tokens_max, int) else None

    async def close(self) -> None:
        """Close the HTTP session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, body: dict[str, object] | None, *, path: str = "completions") -> Any:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX, sock_connect=CONNECT_S_MAX)
            self._session = aiohttp.ClientSession(timeout=timeout)
        try:
            method = "GET" if body is None else "POST"
            async with self._session.request(method, f"{self._url}/v1/{path}", json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            raise Unreachable(f"teacher {self._url}: {error or type(error).__name__}") from None
        if response.status >= 500 or response.status in (408, 429):
            raise Unreachable(f"teacher {self._url}: HTTP {response.status}: {text[:SAID_MAX]}")
        if response.status == 400:
            raise TeacherRefusal(f"teacher {self._url} refuses: HTTP 400: {text[:SAID_MAX]}")
        if response.status != 200:
            raise LocalError(f"teacher {self._url} refuses: HTTP {response.status}: {text[:SAID_MAX]}")
        try:
            return json.loads(text)
        except ValueError:
            raise LocalError(f"teacher {self._url}: its answer is not JSON; is it a vLLM server?") from None


def _chosen(entries: Sequence[dict[str, dict[str, float]] | None], sequence: tuple[int, ...]) -> tuple[float, ...]:
    """Return the logprob of each token. An entry holds its token, perhaps among others; the first entry is empty."""
    pairs = zip(entries[1:], sequence[1:], strict=True)
    values = tuple(float((entry or {})[str(token)]["logprob"]) for entry, token in pairs)
    if not all(map(math.isfinite, values)):
        raise ValueError("a logprob is not finite")
    return values
