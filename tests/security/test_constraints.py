"""Every constraint that a model declares is applied: one value for each is generated that breaks it, and refused for it.

What is declared is read twice: from the annotations and from the source text of each class. pydantic's own idea of a field is not
asked, for that is what dropped the pattern of `ModelFile.name`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from tests.cases_world import check_each

import prime_node
import prime_protocol
from prime_protocol.assignment import Count, Name
from prime_protocol.constraints import KINDS, declared, refuse_dropped
from prime_protocol.envelope import WireModel
from prime_protocol.identity import KeyId, SigningKey

ERRORS = {
    "pattern": "string_pattern_mismatch",
    "ge": "greater_than_equal",
    "gt": "greater_than",
    "le": "less_than_equal",
    "lt": "less_than",
}
LENGTHS = {"min_length": {"too_short", "string_too_short"}, "max_length": {"too_long", "string_too_long"}}
STRICTER = {("Schedule", "preset", "max_length")}
"""Fields whose model refuses the value first: a preset must be a known one."""
PROBES = ("\x00", "../x.json", "-x.json", "~", "Z" * 52, "Z" * 24, "\u202e", "!", "x.py")
"""Texts; each declared pattern refuses at least one of them."""


def models() -> list[type[BaseModel]]:
    """Yield every model of both packages. Modules that define none are not imported: some would load an engine."""
    for package in (prime_protocol, prime_node):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            if re.search(
                r"^class \w+\((\w*Model|\w*Settings|BaseSettings|\w*Header|UntrustedRow)\)",
                path.read_text(),
                re.MULTILINE,
            ):
                parts = path.relative_to(root.parent).with_suffix("").parts
                importlib.import_module(".".join(parts).removesuffix(".__init__"))
    return sorted(set(_below(BaseModel)), key=lambda model: (model.__module__, model.__qualname__))


def _below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for sub in model.__subclasses__():
        if sub.__module__.partition(".")[0] in ("prime_protocol", "prime_node"):
            yield sub
        yield from _below(sub)


MODELS = models()


class Constraint(NamedTuple):
    """One declared constraint, and the path from the field to the constrained value."""

    path: tuple[str, ...]
    """Place of the value: `item0`, `key` and `value` of containers; `item1` if items of one have several types."""
    of: Any
    """Type that the constraint applies to, without its own constraints."""
    kind: str
    bound: Any
    siblings: dict[str, Any]
    """Other constraints of the same value, by kind."""


def constraints_of(annotation: Any, own: list[Any], path: tuple[str, ...] = ()) -> Iterator[Constraint]:
    """`own`: constraints from outside of the annotation, of the field itself."""
    found = [*own]
    while typing.get_origin(annotation) is Annotated:
        found += [bound for item in annotation.__metadata__ for bound in _bounds(item)]
        annotation = annotation.__origin__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            if part is not type(None):
                yield from constraints_of(part, found, path)
        return
    for kind, bound in found:
        yield Constraint(path, annotation, kind, bound, {k: b for k, b in found if k != kind})
    arguments = [part for part in typing.get_args(annotation) if part is not Ellipsis]
    origin = typing.get_origin(annotation)
    if origin is dict:
        yield from constraints_of(arguments[0], [], (*path, "key"))
        yield from constraints_of(arguments[1], [], (*path, "value"))
    elif origin is not Literal:
        for place, part in enumerate(arguments):
            yield from constraints_of(part, [], (*path, f"item{place}"))


def _bounds(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, FieldInfo):
        for one in item.metadata:
            yield from _bounds(one)
    else:
        yield from ((kind, getattr(item, kind)) for kind in KINDS if getattr(item, kind, None) is not None)


Case = tuple[type[BaseModel], str, Constraint]


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name. `inspect.getsource` would parse the module again for each of them."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@functools.cache
def in_source(model: type[BaseModel]) -> dict[str, list[tuple[str, Any]]]:
    """Return field -> constraints in the `Field(...)` after its `=`, from the source text."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for node in ast.walk(_classes(model.__module__)[model.__qualname__]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            scope = vars(sys.modules[model.__module__])
            found[node.target.id] = [
                (str(one.arg), eval(compile(ast.Expression(one.value), "", "eval"), scope))
                for one in node.value.keywords
                if one.arg in KINDS
            ]
    return found


def cases() -> Iterator[tuple[str, Case]]:
    """Yield every constraint of every model, with a name."""
    for model in MODELS:
        hints = typing.get_type_hints(model, include_extras=True)
        for name in model.model_fields:
            owner = next(base for base in model.__mro__ if name in vars(base).get("__annotations__", {}))
            for one in constraints_of(hints[name], in_source(owner).get(name, [])):
                where = ".".join((model.__name__, name, *one.path))
                yield f"{where}-{one.kind}-{_short(one.bound)}", (model, name, one)


def _short(bound: Any) -> str:
    return str(bound) if isinstance(bound, int | float) else "text"


CASES = list(cases())


def good(annotation: Any) -> Any:
    """Return a value of the type with no relevant fault: models are made without validation."""
    siblings: dict[str, Any] = {}
    if annotation == KeyId:
        return SigningKey(b"\1" * 32).key_id
    while typing.get_origin(annotation) is Annotated:
        siblings |= dict(bound for item in annotation.__metadata__ for bound in _bounds(item))
        annotation = annotation.__origin__
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return good(next(part for part in arguments if part is not type(None)))
    if origin is Literal:
        return arguments[0]
    if origin is tuple:
        return tuple(good(part) for part in arguments if part is not Ellipsis) * max(1, siblings.get("min_length", 1))
    if origin in (dict, list):
        return origin()
    if annotation is float or annotation is int:
        low = siblings.get("ge", siblings.get("gt", 0))
        return annotation(low + 1)
    if annotation is str:
        return _text(siblings)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next(iter(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return annotation.model_construct(**{name: good(hints[name]) for name in annotation.model_fields})
    return annotation() if isinstance(annotation, type) else None


def _text(siblings: dict[str, Any]) -> str:
    low, pattern = siblings.get("min_length", 1), siblings.get("pattern", "")
    samples = ("a" * low, "0" * 64, "0" * 32, "0" * 24, "http://1.2.3.4:5", "/ip4", "x.json", "1" * 52)
    return next((one for one in samples if not pattern or re.search(pattern, one)), "a")


def bad(one: Constraint) -> Any:
    """Return a value of the right type that violates this constraint and, if possible, no other."""
    low = one.siblings.get("min_length", 0)
    high = one.siblings.get("max_length", 10**6)
    match one.kind:
        case "pattern":
            return next(text for text in PROBES if low <= len(text) <= high and not re.search(one.bound, text))
        case "min_length" | "max_length":
            length = one.bound + (1 if one.kind == "max_length" else -1)
            if one.of is str:
                return "a" * length
            arguments = [part for part in typing.get_args(one.of) if part is not Ellipsis]
            if typing.get_origin(one.of) is dict:
                keys = [f"{n:064x}" for n in range(length)]
                return dict.fromkeys(keys, good(arguments[1]))
            assert typing.get_origin(one.of) in (tuple, list), one.of
            return typing.get_origin(one.of)([good(arguments[0])]) * length
        case "ge":
            return one.bound - 1 if one.of is int else one.bound - max(1.0, abs(one.bound))
        case "gt":
            return one.of(one.bound)
        case "le":
            return one.bound + 1 if one.of is int else one.bound * 2.0 + 1.0
        case "lt":
            return one.of(one.bound)
    raise AssertionError(f"no value is known that breaks {one.kind}: teach this test")


def placed(model: type[BaseModel], name: str, one: Constraint) -> Any:
    """Put the bad value into the containers that lead to it."""
    value, annotation = bad(one), typing.get_type_hints(model, include_extras=True)[name]
    containers = []
    for step in one.path:
        annotation = _container(annotation)
        containers.append(annotation)
        annotation = _parts(annotation)[int(step[4:]) if step.startswith("item") else step == "value"]
    for step, container in reversed(list(zip(one.path, containers, strict=True))):
        parts = _parts(container)
        if step == "key":
            value = {value: good(parts[1])}
        elif step == "value":
            value = {good(parts[0]): value}
        else:
            items = [good(part) for part in parts]
            items[int(step[4:])] = value
            value = typing.get_origin(container)(items)
    return value


def _parts(annotation: Any) -> list[Any]:
    return [part for part in typing.get_args(annotation) if part is not Ellipsis]


def _container(annotation: Any) -> Any:
    while typing.get_origin(annotation) not in (tuple, list, dict):
        if typing.get_origin(annotation) is Annotated:
            annotation = annotation.__origin__
        else:
            annotation = next(
                part for part in typing.get_args(annotation) if part is not type(None) and typing.get_args(part)
            )
    return annotation


def faults(model: type[BaseModel], fields: dict[str, Any]) -> list[Any]:
    """Return the class's own validator's errors for these fields."""
    try:
        model.__pydantic_validator__.validate_python(fields)
    except ValidationError as error:
        return list(error.errors(include_url=False))
    return []


def test_many_constraints_are_found() -> None:
    assert len([model for _, (model, _, _) in CASES if issubclass(model, WireModel)]) > 400
    assert len([one for _, (_, name, one) in CASES if name == "name" and one.kind == "pattern"]) > 3


def test_a_value_that_breaks_a_declared_constraint_is_refused_for_it() -> None:
    check_each(CASES, refused)


def refused(case: Case) -> None:
    model, name, one = case
    if (model.__name__, name, one.kind) in STRICTER:
        assert faults(model, {name: placed(model, name, one)})
        return
    found = [fault for fault in faults(model, {name: placed(model, name, one)}) if fault["loc"][:1] == (name,)]
    kinds = LENGTHS.get(one.kind, {ERRORS.get(one.kind, "")})
    assert any(
        fault["type"] in kinds and fault["ctx"].get(one.kind, fault["ctx"].get("pattern")) == one.bound
        for fault in found
    ), found[:3]


def test_the_validator_of_a_model_has_all_that_its_fields_declare() -> None:
    check_each(((model.__name__, model) for model in MODELS), refuse_dropped)


def test_the_annotations_and_the_source_declare_the_same() -> None:
    """So neither reading misses a constraint."""
    check_each(((model.__name__, model) for model in MODELS), declares_the_same)


def declares_the_same(model: type[BaseModel]) -> None:
    hints = typing.get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        owner = next(base for base in model.__mro__ if name in vars(base).get("__annotations__", {}))
        own = in_source(owner).get(name, [])
        read = Counter((one.kind, one.bound) for one in constraints_of(hints[name], own))
        assert not Counter(declared(field)) - read, name


def test_the_spelling_that_dropped_the_pattern_of_model_files_is_an_error_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="pydantic drops pattern="):

        class Dropped(WireModel):
            name: Name = Field(pattern=r"^[a-z]+\.json$")

    with pytest.raises(TypeError, match="pydantic drops pattern="):

        class Nested(WireModel):
            name: Annotated[Name, Field(pattern=r"^[a-z]+\.json$")]

    with pytest.raises(TypeError, match="pydantic drops ge="):

        class Raised(WireModel):
            size: Count = Field(ge=1_024)

    with pytest.raises(TypeError, match="pydantic drops pattern="):

        class Optional(WireModel):
            name: Name | None = Field(default=None, pattern=r"^[a-z]+\.json$")

    class Sound(WireModel):
        names: tuple[Name, ...] = Field(max_length=3)
        sizes: dict[Name, Count] = Field(default_factory=dict, max_length=2)

    assert faults(Sound, {"names": ("a",) * 4})
