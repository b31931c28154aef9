"""A chat template from a run's model files, which are untrusted: rendered in jinja's sandbox, and metered.

A thread cannot be ended from outside, nor a loop inside a C function, and a process per template costs more than the rendering.
So the template is rewritten before it is compiled: every loop, call, filter, comparison, operator and output charges the size
of its operands to a meter, and every step of a loop and call of a macro charges the size of its body. A template that exceeds
CHAT_TEMPLATE_COST_MAX ends with an error. The charge comes before the work, so it bounds time, memory and output together, and
two machines always agree on what is too much.

Second safeguard: syntax, filters, tests, functions and methods that are not listed, here and in template_filters.py, are
refused, even harmless ones.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from prime_node.adapters.models import template_filters
from prime_node.adapters.models.template_filters import COMPARED, EACH, JOINED, KEY, METHODS, SHOWN, STEP
from prime_node.adapters.models.template_meter import METER, TemplateMeter, TemplateRefused, meter_of, require_small
from prime_protocol import limits

_STATEMENTS = (
    *(nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Macro, nodes.ExprStmt, nodes.Assign, nodes.AssignBlock),
    *(nodes.Break, nodes.Continue),
)
_EXPRESSIONS = (
    *(
        nodes.BinExpr,
        nodes.UnaryExpr,
        nodes.Name,
        nodes.NSRef,
        nodes.Const,
        nodes.TemplateData,
        nodes.Tuple,
        nodes.List,
    ),
    *(nodes.Dict, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
    *(nodes.Concat, nodes.Compare, nodes.Pair, nodes.Keyword, nodes.Operand),
)
_CHEAP = (
    nodes.Const,
    nodes.Name,
    nodes.List,
    nodes.Tuple,
    nodes.TemplateData,
    nodes.NSRef,
    nodes.Operand,
    nodes.Keyword,
)
_CHEAP_PER_UNIT = 8
"""Cheap nodes, such as names and constants, whose work is that of one step."""
_POWER_MAX = 64
_NAMES_MAX = 512
"""Names of variables. The compiler copies all of them at every branch."""
_OF_JINJA = ("_loop_vars", "_block_vars")
"""Arguments that jinja adds to calls in loops, for functions that get the context."""


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
        context = template.new_context({**variables, METER: TemplateMeter()})
        return "".join(template.root_render_func(context))

    return render


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], optimized=False)
        self.filters = template_filters.filters()
        self.tests.clear()
        self.tests.update(template_filters.tests())
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
        meter, owner = meter_of(context), getattr(called, "__self__", None)
        meter.charge(1)
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_JINJA}
        if isinstance(called, types.BuiltinMethodType) and any(
            isinstance(owner, kind) and called.__name__ in names for kind, names in METHODS
        ):
            return template_filters.call_method(context, called, args, kwargs)
        if any(called is known for known in self._functions) or (
            isinstance(called, types.MethodType) and isinstance(owner, LoopContext)
        ):
            meter.weigh((args, kwargs))
        elif not isinstance(called, (Macro, Undefined)):
            raise SecurityError(f"the chat template calls a {type(called).__name__}, which is not supported")
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = meter_of(context)
        meter.charge(1)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            require_small(left)
            require_small(right)
            if operator == "**" and not (abs(left) <= 2**31 and 0 <= right <= _POWER_MAX):
                raise TemplateRefused(f"the chat template raises a number to the power {right}")
            result = super().call_binop(context, operator, left, right)
            require_small(result)
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
        self._names: set[str] = set()

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS)) or (isinstance(node, nodes.For) and node.recursive):
            raise TemplateRefused(
                f"line {node.lineno} of the chat template: {type(node).__name__.lower()} is not supported"
            )
        if isinstance(node, (nodes.Call, nodes.Filter, nodes.Test)) and (node.dyn_args or node.dyn_kwargs):
            raise TemplateRefused(f"line {node.lineno} of the chat template: arguments by * are not supported")
        if isinstance(node, nodes.Name):
            self._names.add(node.name)
            if len(self._names) > _NAMES_MAX:
                raise TemplateRefused(f"the chat template has more than {_NAMES_MAX} names")
        units = _units(node) if isinstance(node, (nodes.For, nodes.Macro)) else 0  # before charges add nodes
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = self._through(node.iter, EACH, units)
        elif isinstance(node, nodes.Macro):
            step = self._through(nodes.Const(units, lineno=node.lineno), STEP)
            node.body = [nodes.ExprStmt(step, lineno=node.lineno), *node.body]
        elif isinstance(node, (nodes.Compare, nodes.Operand)):
            node.expr = self._through(node.expr, COMPARED)
        elif isinstance(node, nodes.Output):
            node.nodes = [self._through(shown, SHOWN) for shown in node.nodes]
        elif isinstance(node, nodes.Concat):
            return self._through(nodes.List(node.nodes, lineno=node.lineno), JOINED)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = self._through(node.node, COMPARED)
        elif isinstance(node, nodes.Getitem):
            node.arg = self._through(node.arg, KEY)
        elif isinstance(node, nodes.Pair):
            node.key = self._through(node.key, KEY)
        return node

    def _through(self, node: Any, name: str, *args: int) -> nodes.Filter:
        given = [nodes.Const(value, lineno=node.lineno) for value in args]
        made = nodes.Filter(node, name, given, [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made


def _units(node: nodes.For | nodes.Macro) -> int:
    """Return what one step of a loop or one call of a macro costs, without the bodies of loops and macros inside."""
    cheap, units, left = 0, 1, list(node.iter_child_nodes())
    while left:
        one = left.pop()
        cheap += isinstance(one, _CHEAP)
        units += 0 if isinstance(one, _CHEAP) else 2 if isinstance(one, nodes.Getattr) else 1
        if isinstance(one, nodes.For):
            left.append(one.iter)
        elif not isinstance(one, nodes.Macro):
            left += one.iter_child_nodes()
    return units + cheap // _CHEAP_PER_UNIT


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"the chat template refuses a plain user message: {message:.300}")


def _no_clock(_format: str) -> NoReturn:
    raise ValueError("the chat template shows today's date, so its prompts would change from day to day")
