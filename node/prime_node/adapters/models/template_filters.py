"""Filters, tests and string methods of chat templates: each charges the meter before it works, and none works for more.

They are what templates of published models use (Qwen, Llama, Gemma, Mistral, DeepSeek, SmolLM, Phi, GLM, Kimi) and what is
as harmless. Anything else is refused.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Undefined
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context

from prime_node.adapters.models.template_meter import TemplateRefused, meter_of, require_small

KEY, EACH, COMPARED, SHOWN, JOINED, STEP = (
    "a key",
    "each item",
    "a compared value",
    "shown text",
    "joined text",
    "a step",
)
"""Internal filters. Their names contain spaces, so no template can use or replace them."""
_FREE_FILTERS = frozenset({"count", "d", "default", "first", "last", "length"})
"""Filters whose work does not grow with the value."""
_WEIGHED_FILTERS = frozenset().union(
    ("abs", "capitalize", "dictsort", "float", "int", "items", "list", "lower", "map", "max", "min", "reject"),
    ("rejectattr", "reverse", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
)
"""Filters whose result is about as large as the value. `indent`, `join`, `replace`, `safe` and `tojson` are below."""
_BY_ATTRIBUTE = frozenset({"map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "unique"})
_ATTRIBUTE_CHARS_MAX, _ATTRIBUTE_PARTS_MAX = 64, 4
"""Bounds of an attribute's name. Each of its parts, between dots and commas, is looked up again for every item."""
_NAMED_TESTS = frozenset(TESTS) - {"filter", "test", "escaped"}
_FREE_TESTS = frozenset().union(
    ("boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number"),
    ("sequence", "string", "true", "undefined"),
)
"""Tests of a value's type, whose work does not grow with the value."""
_PLAIN_METHODS = frozenset().union(
    ("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower"),
    ("isnumeric", "isspace", "isupper", "join", "lower", "partition", "removeprefix", "removesuffix", "replace"),
    ("split", "splitlines", "startswith", "title", "upper"),
)
_MULTIPLYING_METHODS = frozenset(
    {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"},
)
"""Methods of a text whose work is the text's length times that of their argument."""
_METHOD_CHARS_MAX = 64
METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _PLAIN_METHODS | _MULTIPLYING_METHODS),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
)
_DIVIDING_TESTS = frozenset({"divisibleby", "even", "odd"})
"""Tests that compute `value % number`, which would format a text."""
_INDENT_MAX = 16
_SEPARATOR_CHARS_MAX = 4


def filters() -> dict[str, Callable[..., Any]]:
    """Return all filters by name, with the internal ones."""
    own: dict[str, Callable[..., Any]] = {
        "indent": _indent,
        "join": _join,
        "replace": _replace,
        "safe": _metered("string"),
        "tojson": _tojson,
    }
    internal: dict[str, Callable[..., Any]] = {
        KEY: _key,
        EACH: _each,
        COMPARED: _compared,
        SHOWN: _shown,
        JOINED: _joined,
        STEP: _step,
    }
    return {name: _metered(name) for name in _FREE_FILTERS | _WEIGHED_FILTERS} | own | internal


def tests() -> dict[str, Callable[..., bool]]:
    """Return all tests by name."""
    return {name: _metered_test(name) for name in _NAMED_TESTS}


def call_method(context: Context, method: types.BuiltinMethodType, args: Any, kwargs: Any) -> Any:
    """Charge and call one of METHODS."""
    owner, name = method.__self__, method.__name__
    meter_of(context).weigh((owner, args, kwargs))
    if isinstance(owner, str) and name == "join":
        return _joined_by(context, owner, *args, **kwargs)
    if isinstance(owner, str) and name == "replace":
        return _replace(context, owner, *args, **kwargs)
    if isinstance(owner, str) and name in _MULTIPLYING_METHODS:
        _require_short(name, args, kwargs)
    return method(*args, **kwargs)


def _metered(name: str) -> Callable[..., Any]:
    function: Any = FILTERS[name]
    first = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        meter.charge(1)
        if name not in _FREE_FILTERS:
            value = list(_each(context, value)) if isinstance(value, types.GeneratorType) else value
            meter.weigh((value, args, kwargs))
        if name in _BY_ATTRIBUTE:
            _require_few_parts(name, args[:1] if name.endswith("attr") else (*args, kwargs.get("attribute")))
        if name == "trim":
            _require_short(name, args, kwargs)
        before = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        result = function(*before.get(first or "", ()), value, *args, **kwargs)
        require_small(result)
        return list(_each(context, result)) if isinstance(result, types.GeneratorType) else result

    return run


def _metered_test(name: str) -> Callable[..., bool]:
    function: Any = TESTS[name]

    @pass_context
    def run(context: Context, value: Any, *args: Any) -> bool:
        meter_of(context).charge(1)
        for one in (value, *args) if args or name not in _FREE_TESTS else ():
            _compared(context, one)
        if name in _DIVIDING_TESTS and not all(isinstance(one, int | float) for one in (value, *args)):
            raise TemplateRefused(f"the chat template tests if a value that is no number is {name}")
        return bool(function(value, *args))

    return run


def _require_few_parts(name: str, args: Iterable[object]) -> None:
    for text in args:
        if isinstance(text, str) and (
            len(text) > _ATTRIBUTE_CHARS_MAX or text.count(".") + text.count(",") >= _ATTRIBUTE_PARTS_MAX
        ):
            raise TemplateRefused(f"the chat template gives {name} an attribute of too many characters or parts")


def _require_short(name: str, args: Iterable[object], kwargs: dict[str, object]) -> None:
    if any(isinstance(text, str) and len(text) > _METHOD_CHARS_MAX for text in (*args, *kwargs.values())):
        raise TemplateRefused(f"the chat template gives {name} a text of more than {_METHOD_CHARS_MAX} characters")


def _named(value: object) -> str:
    """Describe a value in an error. Containers are named by type: shared nesting can make their text exponentially long."""
    return str(value) if isinstance(value, float) else f"a {type(value).__name__} out of range"


def _key(value: object) -> object:
    """Check a mapping key or an index. Hashing a nested tuple is exponential work that nothing can interrupt."""
    if not isinstance(value, (str, int, float, types.NoneType, Undefined)):
        raise TemplateRefused(f"the chat template uses a {type(value).__name__} as a key")
    require_small(value)
    return value


@pass_context
def _each(context: Context, values: Iterable[Any], units: int = 1) -> Iterator[Any]:
    """Yield the values, and charge `units` for what is done with each."""
    meter = meter_of(context)
    for value in values:
        meter.charge(units)
        yield value


@pass_context
def _step(context: Context, units: int) -> int:
    meter_of(context).charge(units)
    return units


@pass_context
def _compared(context: Context, value: Any) -> Any:
    if not isinstance(value, (Namespace, LoopContext, Macro)):  # these are compared by identity
        meter_of(context).weigh(value)
    return value


@pass_context
def _shown(context: Context, value: Any) -> Any:
    meter_of(context).weigh(value)
    return value


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    meter_of(context).weigh(values)
    return "".join(map(str, values))


def _joined_by(context: Context, separator: str, values: Iterable[str]) -> str:
    items = list(_each(context, values))
    meter_of(context).charge(len(separator) * len(items))
    return separator.join(items)


@pass_context
def _join(context: Context, values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    items = list(_each(context, values))
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    meter_of(context).weigh(items)
    return _joined_by(context, separator, map(str, items))


@pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int = -1) -> str:
    shown = str(_shown(context, text))
    found = shown.count(old)
    meter_of(context).charge(len(shown) + (min(found, count) if count >= 0 else found) * len(new))
    return shown.replace(old, new, count)


@pass_context
def _indent(context: Context, text: Any, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(width, int) or not 0 <= width <= _INDENT_MAX:
        raise TemplateRefused(f"the chat template indents by {_named(width)}; at most {_INDENT_MAX} are supported")
    text = str(_shown(context, text))
    meter_of(context).charge((len(text.splitlines()) + 1) * width)
    return str(FILTERS["indent"](text, width, first, blank))


@pass_context
def _tojson(
    context: Context,
    value: Any,
    *,
    indent: int | None = None,
    ensure_ascii: bool = False,
    sort_keys: bool = False,
    separators: tuple[str, str] | None = None,
) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _INDENT_MAX):
        raise TemplateRefused(
            f"the chat template indents JSON by {_named(indent)}; at most {_INDENT_MAX} are supported"
        )
    if separators is not None and any(type(one) is not str or len(one) > _SEPARATOR_CHARS_MAX for one in separators):
        raise TemplateRefused(
            f"the chat template separates JSON by something other than texts of at most {_SEPARATOR_CHARS_MAX} characters"
        )
    meter_of(context).weigh(value, indent=indent or 0)
    text: str = json.dumps(
        value, ensure_ascii=bool(ensure_ascii), sort_keys=bool(sort_keys), separators=separators, indent=indent
    )
    return text
