"""A chat template from a run's model files, which are untrusted: rendered in jinja's sandbox, and metered.

A thread cannot be ended from outside, nor a loop inside a C function, and a process per template costs more than the rendering.
So the template is rewritten before it is compiled: every loop, call, filter, comparison, operator and output charges the size
of its operands to a meter. A template that exceeds CHAT_TEMPLATE_COST_MAX ends with an error. The charge comes before the work,
so it bounds time, memory and output together, and two machines always agree on what is too much.

Second safeguard: node types, filters, tests, functions and methods that are not listed here are refused, even harmless ones.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from prime_protocol import limits

_METER, _EACH, _COMPARED, _SHOWN, _JOINED = "the meter", "each item", "a compared value", "shown text", "joined text"
_KEY = "a key"
"""Internal name. It contains a space, so no template can use or replace it."""
_REFUSED_NODES = (
    nodes.Block,
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.EvalContextModifier,
    nodes.ScopedEvalContextModifier,
)
_FREE_FILTERS = frozenset({"count", "d", "default", "first", "last", "length"})
"""Filters whose work does not grow with the value."""
_FILTERS = _FREE_FILTERS.union(
    ("abs", "capitalize", "dictsort", "e", "escape", "float", "int", "items", "list", "lower", "map", "max", "min"),
    (
        "reject",
        "rejectattr",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "trim",
        "unique",
        "upper",
    ),
)
"""Filters whose result is about as large as the value. `indent`, `join`, `replace` and `tojson` are handled below."""
_TESTS = frozenset(TESTS) - {"filter", "test", "escaped"}
_FREE_TESTS = frozenset().union(
    ("boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number"),
    ("sequence", "string", "true", "undefined"),
)
"""Tests of a value's type, whose work does not grow with the value."""
_STR_METHODS = frozenset().union(
    ("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower"),
    ("isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
    ("replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
    ("title", "upper"),
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
)
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
_INDENT_MAX = 16


class TemplateRefused(ValueError):
    """The template uses more than a chat template needs."""


class _Meter:
    """Remaining budget of one rendering. A unit is a step of a loop, a character or an element."""

    def __init__(self) -> None:
        self.left = limits.CHAT_TEMPLATE_COST_MAX

    def charge(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise TemplateRefused(
                f"the chat template needs more than {limits.CHAT_TEMPLATE_COST_MAX:,} steps and characters "
                "(CHAT_TEMPLATE_COST_MAX)"
            )

    def weigh(self, value: object, depth: int = 0) -> None:
        """Charge a value with all its content, including repetitions: this is the cost of printing it."""
        if depth > limits.JSON_DEPTH_MAX:
            raise TemplateRefused(f"the chat template nests values deeper than {limits.JSON_DEPTH_MAX}")
        if isinstance(value, (str, range)):
            self.charge(1 + len(value))
        elif isinstance(value, Mapping):
            self.charge(1)
            for key, item in value.items():
                self.weigh(key, depth + 1)
                self.weigh(item, depth + 1)
        elif isinstance(value, _SEQUENCES):
            self.charge(1)
            for item in value:
                self.weigh(item, depth + 1)
        elif isinstance(value, int):
            self.charge(1)
            _require_small(value)
        elif isinstance(value, (Namespace, LoopContext, Macro)):
            raise TemplateRefused(f"the chat template uses a {type(value).__name__.lower()} as a value")
        else:
            self.charge(1)


def compile_template(source: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function from the template's variables to its text. Both raise ValueError and jinja2's errors."""
    if len(source) > limits.CHAT_TEMPLATE_CHARS_MAX:
        raise TemplateRefused(
            f"the chat template has {len(source):,} characters, more than {limits.CHAT_TEMPLATE_CHARS_MAX:,} "
            "(CHAT_TEMPLATE_CHARS_MAX)"
        )
    environment = _Environment()
    tree = _Metering(environment).visit(environment.parse(source))
    template = Template.from_code(environment, environment.compile(tree), environment.globals)

    def render(variables: Mapping[str, Any]) -> str:
        context = template.new_context({**variables, _METER: _Meter()})
        return "".join(template.root_render_func(context))

    return render


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], optimized=False)
        own = {"indent": _indent, "join": _join, "replace": _replace, "tojson": _tojson}
        internal = {_KEY: _key, _EACH: _each, _COMPARED: _compared, _SHOWN: _shown, _JOINED: _joined}
        self.filters = {name: _metered(name) for name in _FILTERS} | own | internal
        self.tests = {name: _metered_test(name) for name in _TESTS}
        self.globals.clear()
        self.globals |= {
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _refuse,
            "range": safe_range,
            "strftime_now": _no_clock,
        }
        self._functions = [*self.globals.values()]

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter, owner = _meter_of(context), getattr(called, "__self__", None)
        meter.charge(1)
        if isinstance(called, types.BuiltinMethodType) and any(
            isinstance(owner, kind) and called.__name__ in names for kind, names in _METHODS
        ):
            meter.weigh((owner, args, kwargs))
            if isinstance(owner, str) and called.__name__ in ("join", "replace"):
                method: Callable[..., str] = _joined_by if called.__name__ == "join" else _replace
                return method(context, owner, *args, **kwargs)
        elif any(called is known for known in self._functions) or (
            isinstance(called, types.MethodType) and isinstance(owner, LoopContext)
        ):
            meter.weigh((args, kwargs))
        elif not isinstance(called, (Macro, Undefined)):
            raise SecurityError(f"the chat template calls a {type(called).__name__}, which is not supported")
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter_of(context)
        meter.charge(1)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            _require_small(left)
            _require_small(right)
            if operator == "**" and not (abs(left) <= 2**31 and 0 <= right <= _INTEGER_BITS_MAX):
                raise TemplateRefused(f"the chat template raises a number to the power {right}")
            result = super().call_binop(context, operator, left, right)
            _require_small(result)
            return result
        if operator == "+" and any(isinstance(left, kind) and isinstance(right, kind) for kind in (str, list, tuple)):
            meter.charge(len(left) + len(right))
        elif operator == "*" and isinstance(left, (str, list, tuple)) and isinstance(right, int):
            meter.charge(len(left) * max(right, 0))
        elif not isinstance(left, Undefined) and not isinstance(right, Undefined):  # jinja reports these itself
            raise TemplateRefused(f"the chat template computes {type(left).__name__} {operator} {type(right).__name__}")
        return super().call_binop(context, operator, left, right)


class _Metering(NodeTransformer):
    """Transformer that adds a charge to every node whose work jinja does not let its environment intercept."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED_NODES) or (isinstance(node, nodes.For) and node.recursive):
            raise TemplateRefused(
                f"line {node.lineno} of the chat template: {type(node).__name__.lower()} is not supported"
            )
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = self._through(node.iter, _EACH)
        elif isinstance(node, (nodes.Compare, nodes.Operand)):
            node.expr = self._through(node.expr, _COMPARED)
        elif isinstance(node, nodes.Output):
            node.nodes = [self._through(shown, _SHOWN) for shown in node.nodes]
        elif isinstance(node, nodes.Concat):
            return self._through(nodes.List(node.nodes, lineno=node.lineno), _JOINED)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = self._through(node.node, _COMPARED)
        elif isinstance(node, nodes.Getitem):
            node.arg = self._through(node.arg, _KEY)
        elif isinstance(node, nodes.Pair):
            node.key = self._through(node.key, _KEY)
        return node

    def _through(self, node: Any, name: str) -> nodes.Filter:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made


def _meter_of(context: Context) -> _Meter:
    found: _Meter = context.parent[_METER]
    return found


def _metered(name: str) -> Callable[..., Any]:
    function: Any = FILTERS[name]
    first = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(context)
        meter.charge(1)
        if name not in _FREE_FILTERS:
            value = list(_each(context, value)) if isinstance(value, types.GeneratorType) else value
            meter.weigh((value, args, kwargs))
        before = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        result = function(*before.get(first or "", ()), value, *args, **kwargs)
        _require_small(result)
        return list(_each(context, result)) if isinstance(result, types.GeneratorType) else result

    return run


def _metered_test(name: str) -> Callable[..., bool]:
    function: Any = TESTS[name]

    @pass_context
    def run(context: Context, value: Any, *args: Any) -> bool:
        for one in (value, *args) if args or name not in _FREE_TESTS else ():
            _compared(context, one)
        return bool(function(value, *args))

    return run


def _require_small(value: object) -> None:
    """Check that arithmetic on an integer costs at most one step. Raises TemplateRefused if not."""
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS_MAX:
        raise TemplateRefused("the chat template computes with numbers of more than 64 bits")


def _named(value: object) -> str:
    """Describe a value in an error. Containers are named by type: shared nesting can make their text exponentially long."""
    return str(value) if isinstance(value, float) else f"a {type(value).__name__} out of range"


def _key(value: object) -> object:
    """Check a mapping key or an index. Hashing a nested tuple is exponential work that nothing can interrupt."""
    if not isinstance(value, (str, int, float, types.NoneType, Undefined)):
        raise TemplateRefused(f"the chat template uses a {type(value).__name__} as a key")
    _require_small(value)
    return value


@pass_context
def _each(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    meter = _meter_of(context)
    for value in values:
        meter.charge(1)
        yield value


@pass_context
def _compared(context: Context, value: Any) -> Any:
    if not isinstance(value, (Namespace, LoopContext, Macro)):  # these are compared by identity
        _meter_of(context).weigh(value)
    return value


@pass_context
def _shown(context: Context, value: Any) -> Any:
    _meter_of(context).weigh(value)
    return value


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    _meter_of(context).weigh(values)
    return "".join(map(str, values))


def _joined_by(context: Context, separator: str, values: Iterable[str]) -> str:
    items = list(_each(context, values))
    _meter_of(context).charge(len(separator) * len(items))
    return separator.join(items)


@pass_context
def _join(context: Context, values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    items = list(_each(context, values))
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    _meter_of(context).weigh(items)
    return _joined_by(context, separator, map(str, items))


@pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int = -1) -> str:
    shown = str(_shown(context, text))
    found = shown.count(old)
    _meter_of(context).charge(len(shown) + (min(found, count) if count >= 0 else found) * len(new))
    return shown.replace(old, new, count)


@pass_context
def _indent(context: Context, text: Any, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(width, int) or not 0 <= width <= _INDENT_MAX:
        raise TemplateRefused(f"the chat template indents by {_named(width)}; at most {_INDENT_MAX} are supported")
    text = str(_shown(context, text))
    _meter_of(context).charge((text.count("\n") + 1) * width)
    return str(FILTERS["indent"](text, width, first, blank))


@pass_context
def _tojson(context: Context, value: Any, *, indent: int | None = None, **options: Any) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _INDENT_MAX):
        raise TemplateRefused(
            f"the chat template indents JSON by {_named(indent)}; at most {_INDENT_MAX} are supported"
        )
    _meter_of(context).weigh((value, options))
    text: str = json.dumps(value, **{"ensure_ascii": False, **options}, indent=indent)
    return text


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"the chat template refuses a plain user message: {message:.300}")


def _no_clock(_format: str) -> NoReturn:
    raise ValueError("the chat template shows today's date, so its prompts would change from day to day")
