"""Check that pydantic applies every constraint that a model declares, when the class is created.

pydantic applies one constraint of a kind to a value. `X = Annotated[str, Field(pattern=A)]` and then `x: X =
Field(pattern=B)` keeps A and silently drops B (2.14); `x: Annotated[X, Field(pattern=B)]` drops A. Both spellings are
errors here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

KINDS = ("pattern", "min_length", "max_length", "ge", "gt", "le", "lt", "multiple_of")
"""Names of constraints, in annotations and in the validator's schema."""
_OTHERS = frozenset({"model", "definition-ref", "literal", "enum"})
"""Schemas outside the field: their constraints are checked where they are declared."""


def refuse_dropped(model: type[BaseModel]) -> None:
    """Raise TypeError if the validator of a complete model omits a constraint that a field declares."""
    applied = {name: Counter(_applied(schema)) for name, schema in _fields(model.__pydantic_core_schema__).items()}
    for name, field in model.model_fields.items():
        if missing := Counter(declared(field)) - applied[name]:
            kind, value = next(iter(missing))
            raise TypeError(
                f"{model.__name__}.{name}: pydantic drops {kind}={value!r}, for its type has another {kind}; "
                "declare each kind of constraint once"
            )


def declared(field: FieldInfo) -> Iterator[tuple[str, Any]]:
    """Yield (kind, value) of each constraint in a field's annotation, including items of containers, and in its `Field`."""
    yield from _of_metadata(field.metadata)
    yield from _of_annotation(field.annotation)


def _of_annotation(annotation: Any) -> Iterator[tuple[str, Any]]:
    if get_origin(annotation) is Annotated:
        yield from _of_metadata(annotation.__metadata__)
        yield from _of_annotation(annotation.__origin__)
    else:
        for part in get_args(annotation):
            yield from _of_annotation(part)


def _of_metadata(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for item in items:
        if isinstance(item, FieldInfo):
            yield from _of_metadata(item.metadata)
        else:
            yield from ((kind, value) for kind in KINDS if (value := getattr(item, kind, None)) is not None)


def _fields(schema: Any) -> dict[str, Any]:
    """Map field names to their part of a model's schema, below any validators that wrap the model."""
    while schema["type"] != "model-fields":
        schema = schema["schema"]
    fields: dict[str, Any] = schema["fields"]
    return fields


def _applied(schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") not in _OTHERS:
            for key, value in schema.items():
                if key in KINDS:
                    yield key, value
                elif key not in ("metadata", "serialization"):
                    yield from _applied(value)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _applied(part)
