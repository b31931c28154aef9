"""How much longer the steps of a tokenizer.json make a text: a hostile normalizer doubles it forty times. Pure."""

from __future__ import annotations

import base64
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prime_protocol import limits

CHARACTERS = "precompiled_charsmap"
_AFTER = ("post_processor", "decoder")
_BY_TYPE = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "ByteLevel": 2, "Metaspace": 3}
"""Factor by which a step lengthens a text, by its type."""
_KEY_BYTES_MAX = 5
"""A longer group of characters is looked up character by character."""
_REPLACEMENT_BYTES_MAX = _KEY_BYTES_MAX * limits.TOKENIZER_GROWTH_MAX + 1
"""A longer replacement is refused as one of this length."""
_UNITS_MAX = 2**18
"""Those of published tables are a quarter of it."""


def growth_of_step(step: Mapping[str, Any], part: str) -> float:
    """Return the maximum factor by which a step of a part of tokenizer.json lengthens a text.

    Its entries count whatever its type: the library ignores further ones, and reads a step of an unknown type by its entries.
    Raises ValueError.
    """
    growth = 1.0 if part in _AFTER else _BY_TYPE.get(str(step.get("type")), 1.0)
    if CHARACTERS in step:
        growth *= _growth_of_table(step[CHARACTERS])
    if isinstance(step.get("single"), list):  # a template that may show the text often
        growth *= max(1.0, sum(isinstance(piece, dict) and "Sequence" in piece for piece in step["single"]))
    if isinstance(text := step.get("prepend"), str):  # to each part between added tokens, perhaps of one character
        growth *= 1 + len(text.encode()) / 2
    if "" in (step.get("suffix"), step.get("word_delimiter_token")):  # replaced by a blank between all characters
        growth *= 2
    if "handle_chinese_chars" in step:  # a blank on both sides of each
        growth *= 2
    pattern, content = step.get("pattern"), step.get("content")
    if pattern is None or not isinstance(content, str):
        return growth
    given, length = pattern.get("String") if isinstance(pattern, dict) else None, len(content.encode())
    if isinstance(given, str) and given:
        return growth * max(1.0, length / len(given.encode()))
    if pattern == {"Regex": " {2,}"}:
        return growth * max(1.0, length / 2)
    return growth * (1 + length)  # an expression may match the empty text between any two characters


def _growth_of_table(given: object) -> float:
    """Return how much longer a table in sentencepiece's format makes a text: a replacement's bytes by those of its key.

    Raises ValueError for no such table.
    """
    try:
        raw = base64.b64decode(given, validate=True) if isinstance(given, str) else b""
    except ValueError:
        raw = b""
    size = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 + size or size % 4 or size // 4 > _UNITS_MAX:
        raise ValueError(f"its {CHARACTERS} is not a table of replacements, or a large one")
    units, texts, growth = struct.unpack_from(f"<{size // 4}I", raw, 4), raw[4 + size :], 1.0
    for num_bytes, start in _keys(units):
        text, _, _ = texts[start : start + _REPLACEMENT_BYTES_MAX].partition(b"\0")
        growth = max(growth, len(text) / num_bytes)
    return growth


def _keys(units: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the length of each key of a double array, in bytes, and where its replacement begins; the shortest keys first.

    A hostile array may have circles, so each of its nodes is visited once.
    """
    children = defaultdict[int, list[int]](list)
    for place, unit in enumerate(units):
        if not unit >> 31 and unit & 0xFF:
            children[place ^ unit & 0xFF].append(place)
    bases = [_offset(units[0])] if units else []
    for num_bytes in range(1, _KEY_BYTES_MAX + 1):
        places = [place for base in bases for place in children.pop(base, ())]
        bases = [place ^ _offset(units[place]) for place in places]
        for place, base in zip(places, bases, strict=True):
            if units[place] >> 8 & 1 and base < len(units):
                yield num_bytes, units[base] & 0x7FFFFFFF


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)
