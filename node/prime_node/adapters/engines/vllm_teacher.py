"""A teacher behind vLLM's HTTP server: `vllm serve MODEL`, its completions endpoint with prompt_logprobs.

vLLM returns a prompt's logprobs with any completion, so one token is requested and discarded. Tokens are sent as ids: nothing
is tokenized again. vLLM's default logprobs are those of the model itself, before any temperature, as distillation needs.

Concurrency: answers are read by the event loop up to a bound, and parsed in a thread. `json.loads` holds the interpreter's lock,
for long answers longer than a second. So callers bound the logprobs of a request (trainer/teaching.py).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import numpy as np

from prime_node.adapters.name_lookups import PatientResolver
from prime_node.ports.teacher import TeacherRefusal
from prime_node.ports.train_samples import TopLogprobs
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import LocalError

CONNECT_S_MAX = 10.0
ANSWER_S_MAX = 600.0
"""Timeout for a large teacher on a few sequences; after it the teacher counts as unreachable, and the request is repeated."""
ANSWER_BYTES_MAX = 2**28
"""Size of the largest answer: a million logprobs have about 80 MB."""
WIDTH_MAX = 1_024
"""Factor by which one place of a sequence may have more tokens than another: a teacher that lists all of them lists few less."""
SAID_MAX = 300
"""Number of characters of a refusal that are shown."""


_Entries = Sequence[dict[str, dict[str, float]] | None]
T = TypeVar("T")


class VllmTeacher:
    """Implementation of ports.teacher.Teacher."""

    def __init__(self, url: str, *, model: str, answer_bytes_max: int = ANSWER_BYTES_MAX) -> None:
        """Create a client. `url` has no /v1; `model` is the name under which the server offers the model."""
        self._answer_bytes_max = answer_bytes_max
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Request the logprobs of all sequences at once.

        Raises TeacherRefusal for HTTP 400, LocalError for an answer without logprobs.
        """
        return await self._scored(sequences, 0, _chosen)

    async def top_logprobs(self, sequences: Sequence[tuple[int, ...]], count: int) -> list[TopLogprobs]:
        """Request the likeliest tokens of all sequences at once. The server's --max-logprobs bounds `count`."""
        return await self._scored(sequences, count, lambda entries, sequence: _likeliest(entries, count, len(sequence)))

    async def _scored(
        self, sequences: Sequence[tuple[int, ...]], count: int, read: Callable[[_Entries, tuple[int, ...]], T]
    ) -> list[T]:
        if not sequences:
            return []
        data = await self._ask(
            {
                "model": self._model,
                "prompt": [list(sequence) for sequence in sequences],
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": count,
            }
        )
        return await asyncio.to_thread(self._parsed, data, sequences, read)

    def _parsed(
        self, data: bytes, sequences: Sequence[tuple[int, ...]], read: Callable[[_Entries, tuple[int, ...]], T]
    ) -> list[T]:
        answer = self._loaded(data)
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            pairs = zip(choices, sequences, strict=True)
            return [read(choice["prompt_logprobs"], sequence) for choice, sequence in pairs]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise LocalError(
                f"teacher {self._url}: no prompt logprobs in its answer ({error!r}); is it a vLLM server?"
            ) from None

    async def sequence_tokens_max(self) -> int | None:
        """Return max_model_len less the token that every request samples, as the server's list of models states it."""
        answer = self._loaded(await self._ask(None, path="models"))
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

    async def _ask(self, body: dict[str, object] | None, *, path: str = "completions") -> bytes:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX, sock_connect=CONNECT_S_MAX)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=PatientResolver()), timeout=timeout
            )
        try:
            method = "GET" if body is None else "POST"
            async with self._session.request(method, f"{self._url}/v1/{path}", json=body) as response:
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > self._answer_bytes_max:
                        raise LocalError(
                            f"teacher {self._url}: its answer has more than {self._answer_bytes_max:,} bytes; "
                            "lower trainer.distillation.topk"
                        )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"teacher {self._url}: {error or type(error).__name__}") from None
        text = data[: 4 * SAID_MAX].decode(errors="replace")
        if response.status >= 500 or response.status in (408, 429):
            raise Unreachable(f"teacher {self._url}: HTTP {response.status}: {text[:SAID_MAX]}")
        if response.status == 400:
            raise TeacherRefusal(f"teacher {self._url} refuses: HTTP 400: {text[:SAID_MAX]}")
        if response.status != 200:
            raise LocalError(f"teacher {self._url} refuses: HTTP {response.status}: {text[:SAID_MAX]}")
        return bytes(data)

    def _loaded(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise LocalError(f"teacher {self._url}: its answer is not JSON; is it a vLLM server?") from None


def _likeliest(entries: _Entries, count: int, length: int) -> TopLogprobs:
    """Return the tokens up to rank `count` of a sequence of `length` tokens.

    An entry may hold the sequence's own token besides them; the first one is empty. Raises ValueError for anything else: a
    row that is longer than the others would cost its length at each of them.
    """
    rows = [
        sorted((int(entry["rank"]), int(token), float(entry["logprob"])) for token, entry in (found or {}).items())
        for found in entries[1:]
    ]
    kept = [[row for row in its if count < 0 or row[0] <= count] for its in rows]
    width, narrowest = max(map(len, kept), default=0), min(map(len, kept), default=0)
    width_max = WIDTH_MAX * narrowest if count < 0 else count + 1
    if len(kept) != length - 1 or not all(kept) or width > width_max:
        raise ValueError("a place has no logprobs, or too many")
    token_ids = np.zeros((len(kept), width), np.int64)
    logprobs = np.full((len(kept), width), -np.inf, np.float32)
    for place, its in enumerate(kept):
        token_ids[place, : len(its)] = [token for _, token, _ in its]
        logprobs[place, : len(its)] = [logprob for _, _, logprob in its]
    if not (logprobs < np.inf).all():
        raise ValueError("a logprob is no number")
    return TopLogprobs(token_ids, logprobs)


def _chosen(entries: _Entries, sequence: tuple[int, ...]) -> tuple[float, ...]:
    """Return the logprob of each token. An entry holds its token, perhaps among others; the first entry is empty."""
    pairs = zip(entries[1:], sequence[1:], strict=True)
    values = tuple(float((entry or {})[str(token)]["logprob"]) for entry, token in pairs)
    if not all(map(math.isfinite, values)):
        raise ValueError("a logprob is not finite")
    return values
