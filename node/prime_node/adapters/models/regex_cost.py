"""Bounds on the time of a hostile regular expression: the tokenizers' library backtracks, in Rust, and cannot be interrupted.

The number of ways in which one match can be tried is bounded by multiplying the choices of a sequence and adding those of
alternatives. Unbounded repeats are counted apart, since their ways grow with the text. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prime_protocol import limits

_TOKEN = re.compile(
    r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*+\]|\{\d*,?\d*\}"
    r"|\(\?(?:[ims-]*[:)]|<?[=!]|>|<[A-Za-z_]\w*>)|\(\?|.",
    re.DOTALL,
)
_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_OPTION, _OPENING = re.compile(r"\(\?[ims-]*\)"), re.compile(r"\((?!.*\)$)")
REPEATS_BEFORE_ITEM = 2
"""Unbounded repeats after which published expressions need nothing more."""
_UNBOUNDED_FROM = 100
"""Repeats up to this number or more count as unbounded."""


@dataclass(slots=True)
class _Group:
    """An open group: its finished alternatives, then the current one, whose last item a repeat may still change."""

    repeats_before: int = 0
    """Unbounded repeats before it, in the alternatives that it is in."""
    all_ways: float = 0
    """Ways of the finished alternatives together."""
    most_repeats: int = 0
    """Largest number of unbounded repeats in a finished alternative."""
    ways: float = 1
    repeats: int = 0
    last_ways: float = 1
    last_repeats: int = 0
    can_fail: bool = False
    """Whether an item after two unbounded repeats is required: where it is missing, all their lengths are tried."""
    last_can_fail: bool = False

    def add(self, ways: float = 1, repeats: int = 0, *, can_fail: bool = False) -> None:
        """Begin another item of the current alternative."""
        self.can_fail |= self.last_can_fail
        self.ways *= self.last_ways
        self.repeats += self.last_repeats
        self.last_ways, self.last_repeats = ways, repeats
        self.last_can_fail = can_fail or self.repeats_before + self.repeats >= REPEATS_BEFORE_ITEM

    def end_alternative(self) -> None:
        """End the current alternative, and begin another one."""
        self.add()
        self.all_ways += self.ways
        self.most_repeats = max(self.most_repeats, self.repeats)
        self.ways, self.repeats, self.last_can_fail = 1, 0, False

    def repeat(self, least: int, most: int) -> None:
        """Repeat the last item a bounded number of times."""
        one = self.last_ways
        self.last_can_fail &= least > 0
        if one == 1:
            self.last_ways = most - least + 1
        else:
            self.last_ways = min(sum(min(one, 1e9) ** count for count in range(least, most + 1)), 1e9)
        self.last_repeats *= most


def regex_fault(pattern: str) -> str | None:
    """Return what could make a search for this expression slow; None if published tokenizers have such expressions.

    Those have up to 16 ways in an alternative, and two unbounded repeats that are not nested.
    """
    if len(pattern) > limits.TOKENIZER_REGEX_CHARS_MAX:
        return f"has {len(pattern):,} characters, above {limits.TOKENIZER_REGEX_CHARS_MAX:,}"
    groups, before = [_Group()], ""
    for found in _TOKEN.finditer(pattern):
        token, group = found[0], groups[-1]
        if fault := _unknown(token):
            return fault
        bounds = _bounds(token)
        if _OPTION.fullmatch(token) and found.start() > 0 and before != "|" and not _OPENING.match(before):
            return "has an option within an alternative: all alternatives after it become a group behind what is before"
        if token[0] == "(" and not token.endswith(")"):
            groups.append(_Group(group.repeats_before + group.repeats + group.last_repeats))
        elif token == ")" and len(groups) > 1:
            group.end_alternative()
            groups.pop()
            groups[-1].add(group.all_ways, group.most_repeats, can_fail=group.can_fail)
        elif token == "|":
            group.end_alternative()
        elif (token in ("?", "+") and before in ("*", "+", "?")) or (
            token == "?" and "," in before and _bounds(before)
        ):
            token = ""  # it makes the repeat lazy or possessive
        elif bounds is None:
            group.add()
        elif bounds[1] >= _UNBOUNDED_FROM:
            if group.last_repeats:
                return "has nested repeats, which can take exponential time"
            if group.last_ways > 1:
                return "repeats a choice without bound, which can take exponential time"
            group.last_repeats = 1
            group.last_can_fail &= bounds[0] > 0
        else:
            group.repeat(*bounds)
        before = token
        if fault := _excess(groups[-1]):
            return fault
    for group in reversed(groups):
        group.end_alternative()
    if any(group.can_fail for group in groups):
        return "needs an item after two unbounded repeats, so its time can grow with the third power of a text's length"
    return _excess(groups[0])


def _unknown(token: str) -> str | None:
    """Return why an expression with this token is refused whatever its ways."""
    if token == "[":
        return "has an unterminated character class"
    if re.fullmatch(r"\\[1-9gk]", token):
        return "has a back-reference or a call of a group"
    if re.fullmatch(r"\\[cCM]", token):
        return "has a control character, of which a bracket may be a part"
    return "has a group of an unknown kind" if token == "(?" else None


def _bounds(token: str) -> tuple[int, int] | None:
    """Return the least and the largest number of a repeat; None if the token is none."""
    if token in ("*", "+", "?"):
        return int(token == "+"), 1 if token == "?" else _UNBOUNDED_FROM
    found = _REPEAT.fullmatch(token)
    if found is None or token in ("{}", "{,}"):
        return None
    least = min(int(found[1] or 0), _UNBOUNDED_FROM)
    most = min(int(found[3]), _UNBOUNDED_FROM) if found[3] else _UNBOUNDED_FROM if found[2] else least
    return min(least, most), max(least, most)


def _excess(group: _Group) -> str | None:
    if group.repeats + group.last_repeats > limits.TOKENIZER_REGEX_REPEATS_MAX:
        return f"has more than {limits.TOKENIZER_REGEX_REPEATS_MAX} unbounded repeats in one alternative"
    if group.all_ways + group.ways * group.last_ways > limits.TOKENIZER_REGEX_WAYS_MAX:
        return f"can match in more than {limits.TOKENIZER_REGEX_WAYS_MAX} ways at one place, which can take exponential time"
    return None
