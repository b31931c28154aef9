"""Broken inputs made of valid ones: bytes changed at random, and JSON changed field by field."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

INPUT_BYTES_MAX = 20_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63, -(2**63), 10**400, 0.1, -0.0, 1e308, 5e-324),
    *(
        "",
        "a",
        "a" * 5_000,
        "\u202e",
        "\x00",
        "\x1b[2J",
        "\ud83d\ude00",
        "0" * 64,
        "f" * 64,
        "0" * 32,
        "../x",
        "/etc/x",
        "1e5",
    ),
    *([], {}, [[]], [0] * 300, {"a": 1}, [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]], {"__proto__": {}}),
)
_TEXTS = (b"NaN", b"Infinity", b"-0", b"1e999", b'"\\ud800"', b"\xef\xbb\xbf", b"\xff", b"\x00", b"[" * 64, b"]" * 64)


def mutated(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """One of the seeds, changed. JSON is changed by its structure most of the time."""
    data = rng.choice(seeds)
    if data[:1] in (b"{", b"[") and rng.random() < 0.7:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            pass
        else:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                value = _changed(value, rng)
            return json.dumps(value, separators=(",", ":"), ensure_ascii=rng.random() < 0.9).encode("utf-8", "replace")
    return _bytes_changed(data, rng.choice(seeds), rng)[:INPUT_BYTES_MAX]


def _bytes_changed(data: bytes, other: bytes, rng: random.Random) -> bytes:
    octets = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        if octets:
            place = rng.randrange(min(len(octets), 64) if rng.random() < 0.5 else len(octets))
            octets[place] = rng.choice((octets[place] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 255))
    start, end = sorted((rng.randint(0, len(octets)), rng.randint(0, len(octets))))
    change = rng.randrange(10)
    if change == 0:
        del octets[start:]
    elif change == 1:
        del octets[start:end]
    elif change == 2:
        octets[start:start] = rng.choice(_TEXTS)
    elif change == 3:
        octets[start:end] = octets[start:end] * rng.randrange(2, 8)
    elif change == 4:
        cut = rng.randint(0, len(other))
        octets[start:] = other[cut:]
    elif change == 5:
        octets += rng.randbytes(rng.randrange(1, 64))
    return bytes(octets)


def _changed(value: Any, rng: random.Random) -> Any:
    """A copy with one place changed, at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        change = rng.randrange(12)
        if change == 0:
            return {key: item for key, item in value.items() if key != name}
        if change == 1:
            return {**value, rng.choice((name + "x", "unknown", "")): rng.choice(VALUES)}
        if change == 2:
            return {**value, name: value[rng.choice(list(value))]}
        return {**value, name: _changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        change = rng.randrange(8)
        if change == 0:
            return value[:place] + value[place + 1 :]
        if change == 1:
            return value[:place] + value[place : place + 1] * rng.choice((2, 3, 50)) + value[place + 1 :]
        if change == 2:
            return value[::-1]
        return [*value[:place], _changed(value[place], rng), *value[place + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return (
            value[:place]
            + rng.choice(("", "\n", "\u202e", "0", "/", value[place].swapcase(), "é"))
            + value[place + 1 :]
        )
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2**32,
                value + 0.5 if abs(value) < 2**64 else 0.5,
                str(value)[:99],
                [value],
            )
        )
    return rng.choice(VALUES)
