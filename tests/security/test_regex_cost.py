"""Expressions of a stranger's tokenizer: those of published ones pass, those that could take exponential time are refused."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from prime_node.adapters.models.hf_tokenizer import panics_raised
from prime_node.adapters.models.regex_cost import regex_fault

LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "pattern",
    [
        QWEN,
        LLAMA,
        CL100K,
        GPT2,
        O200K,
        DEEPSEEK,
        *(r"\d", " {2,}", r"\p{N}{1,3}", "a*a*(?:bc)?"),
        "(?i)a|b",
        "a(?:(?i)b|c)",
        "a|(?i)b",
        "(?:a|(?i)b|c)d",
        "[\u4e00-\u9fa5\u3040-\u309f]+",
    ],
)
def test_published_expressions_pass(pattern: str) -> None:
    assert regex_fault(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+",
        "(a*)*b",
        "((a|b)+)*",
        "(a+){2,}",
        "(?:a+|b)*c",
        "(x(a*))*",
        r"(\w+\s?)+$",
        "(a{1,999})*",
        "a*a*a*a*b",
        "a*a*a*b",
        "a*a*b+",
        "(?:a*a*|x)b",
        "a*(?:a*(?i:b))",
        "a*a*(?!c)",
        r"(?<q>a)\k<q>",
        r"(a*)\g<1>\g<1>\g<1>z",
        r"(?<x>a\g<x>?\g<x>?)z",
        "(?~a)z",
        "(a)(?(1)b|c)",
        "(?x)(?:a # )\n|a){99}",
        "(?:a{0,99}){0,99}z",
        "(?:a{1,9}){1,9}z",
        "(?:a?){40}a{40}z",
        "a?" * 40 + "z",
        "(?:.|.|.){14}(?!.)",
        "(?:.|.)*z",
        "(?:(?:(?:a|a)(?:a|a)){3}b?){9}",
        "(?:a+){4}z",
        "a{0,50}a{0,50}z",
        "a|" * 200,
        "(?:a*(?i)|a*(?i)|a*(?i)|a*(?i))[b-y]",  # the library makes a*(a*(a*(a*))) of it
        "a*(?i)|b",
        "a*?(?m)|b",
        r"\c[?a*a*a*]",  # ESC, and no class
        r"\C-[?a*a*a*]",
    ],
)
def test_expressions_that_try_all_ways_are_refused(pattern: str) -> None:
    assert regex_fault(pattern) is not None


def test_a_panic_of_the_tokenizers_library_is_a_value_error() -> None:
    """It panics in Rust for too complex an expression. A panic is not an Exception: it would end a whole role."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(ValueError, match="tokenizer library failed"), panics_raised():
        tokenizer.encode("a" * 5000 + "!")
