"""Docstrings, comments and messages are plain technical English: phrases of their earlier tone do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.source_tree import PACKAGES, modules

ROOT = Path(__file__).resolve().parent.parent
PHRASES = (
    "whoever", "whomever", "nobody", "nobody's", "no-one", "somebody", "everybody", "told", "tells a", "lies", "stands",
    "its like", "for good", "turned away", "beside", "mend", "mended", "goes on", "go on", "going on", "went on", "in vain",
    "by and by", "to be had", "is gone", "are gone", "has gone", "for want of", "of no use", "makes no sense", "for ever",
    "anew", "at its begin", "behind the last", "speaks of", "says nothing", "without a word", "no word",
    "brought nothing", "as it must", "to no question", "come what may", "taken up", "he", "him", "his", "she", "her",
    "under way", "likewise", "anybody", "anybody's", "becomes of", "at one go", "gone on", "hold up", "holds up",
    "held up", "is here whole", "came lately", "thrown away",
)  # fmt: skip
"""Phrases that are not used, as whole words in any case. Programs are "it" and "they"."""

_FOUND = re.compile(
    r"(?<![\w.`'-])(?:"
    + "|".join(re.escape(one).replace(r"\ ", r"\s+(?:#\s*)?") for one in PHRASES)
    + r")(?![\w'=(-])",
    re.IGNORECASE,
)
_CODE = re.compile(r"`[^`\n]*`")
_FIELDS = re.compile(r"\{[^{}]*\}")


def passages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment and string, without code in backticks and without an f-string's fields."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _CODE.sub("", token.string)
        elif token.type == tokenize.STRING:
            is_format = "f" in token.string.partition(token.string.lstrip("rbfuRBFU")[0])[0].lower()
            text = _FIELDS.sub("", token.string) if is_format else token.string
            yield token.start[0], _CODE.sub("", text)


def remarks(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment and docstring, without code in backticks and without other strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _CODE.sub("", token.string)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, _CODE.sub("", text)


def phrases_in(source: str, texts: Callable[[str], Iterator[tuple[int, str]]] = passages) -> Iterator[tuple[int, str]]:
    """Yield the line where a passage begins, and each phrase of the list in it."""
    if not _FOUND.search(source):  # spares most files their tokens
        return
    for line, text in texts(source):
        yield from ((line, found.group()) for found in _FOUND.finditer(text))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Whoever asks is\n    told."""', ["Whoever", "told"]),
        ("# it goes on", ["goes on"]),
        ('log.info(f"{told.status} is gone")', ["is gone"]),
        ('f"{whoever} of `nobody`, besides the amended one"', []),
    ],
)
def test_phrases_are_found_in_texts_and_not_in_code(source: str, found: list[str]) -> None:
    assert [phrase for _, phrase in phrases_in(source)] == found


def test_texts_contain_no_phrase_of_the_list() -> None:
    found = [
        f"{path}:{line}: {phrase}"
        for _, path in modules()
        for line, phrase in phrases_in(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_files_of_the_pages_contain_no_phrase_of_the_list() -> None:
    files = [path for path in PACKAGES["prime_node"].rglob("*") if path.suffix in (".js", ".html", ".css", ".sql")]
    assert len(files) > 10
    found = [
        f"{path.name}:{number}: {phrase.group()}"
        for path in sorted(files)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for phrase in _FOUND.finditer(line)
    ]
    assert found == []


def test_strings_of_tests_and_scripts_are_no_remarks() -> None:
    source = 'def f():\n    """Whoever asks."""\n    return "nobody"  # goes on'
    assert sorted(phrases_in(source, remarks)) == [(2, "Whoever"), (3, "goes on")]


def test_remarks_of_tests_and_scripts_contain_no_phrase_of_the_list() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for folder in ("scripts", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, phrase in phrases_in(path.read_text(encoding="utf-8"), remarks)
    ]
    assert found == []
