"""The meter of a chat template: a budget of steps and characters that every part of a rendering charges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jinja2.runtime import Context, LoopContext, Macro
from jinja2.utils import Namespace

from prime_protocol import limits

METER = "the meter"
"""Internal name. It contains a space, so no template can use or replace it."""
_SEQUENCES: tuple[type[Iterable[Any]], ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_INTEGER_BITS_MAX = 64


class TemplateRefused(ValueError):
    """The template uses more than a chat template needs."""


class TemplateMeter:
    """Remaining budget of one rendering. A unit is a step of a loop, a character or an element."""

    def __init__(self) -> None:
        self.left = limits.CHAT_TEMPLATE_COST_MAX

    def charge(self, units: int) -> None:
        """Take from the budget, before the work. Raises TemplateRefused if too little is left."""
        self.left -= units
        if self.left < 0:
            raise TemplateRefused(
                f"the chat template needs more than {limits.CHAT_TEMPLATE_COST_MAX:,} steps and characters "
                "(CHAT_TEMPLATE_COST_MAX)"
            )

    def weigh(self, value: object, depth: int = 0, indent: int = 0) -> None:
        """Charge a value with all its content, including repetitions: this is the cost of printing it.

        `indent`: characters that each level of nesting puts before every item.
        """
        if depth > limits.JSON_DEPTH_MAX:
            raise TemplateRefused(f"the chat template nests values deeper than {limits.JSON_DEPTH_MAX}")
        self.charge(1 + depth * indent)
        if isinstance(value, (str, range)):
            self.charge(len(value))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.weigh(key, depth + 1, indent)
                self.weigh(item, depth + 1, indent)
        elif isinstance(value, _SEQUENCES):
            for item in value:
                self.weigh(item, depth + 1, indent)
        elif isinstance(value, int):
            require_small(value)
        elif isinstance(value, (Namespace, LoopContext, Macro)):
            raise TemplateRefused(f"the chat template uses a {type(value).__name__.lower()} as a value")


def meter_of(context: Context) -> TemplateMeter:
    """Return the meter of the rendering that this context belongs to."""
    found: TemplateMeter = context.parent[METER]
    return found


def require_small(value: object) -> None:
    """Check that arithmetic on an integer costs at most one step. Raises TemplateRefused if not."""
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS_MAX:
        raise TemplateRefused(f"the chat template computes with numbers of more than {_INTEGER_BITS_MAX} bits")
