"""Everything that a peer may send has a bound: this test searches all wire models for fields without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from prime_protocol import (
    assigned,
    assignment,
    limits,
    manifest,
    parcel,
    peers,
    replies,
    requests,
    rollout,
    run_spec,
    seed_chain,
    verdict,
)
from prime_protocol.envelope import WireModel
from prime_protocol.limits import Limits

MODULES = (assigned, seed_chain, assignment, manifest, parcel, peers, replies, requests, rollout, run_spec, verdict)


def wire_models() -> dict[str, type[BaseModel]]:
    found: dict[str, type[BaseModel]] = {"Limits": Limits}
    waiting = [WireModel]
    while waiting:
        for model in waiting.pop().__subclasses__():
            if model.__module__.startswith("prime_protocol."):
                found[model.__name__] = model
                waiting.append(model)
    return found


def unbounded(schema: Any, place: str) -> Iterator[str]:
    """Yield places in a pydantic core schema where a peer could send something of any size."""
    if isinstance(schema, list | tuple):
        for item in schema:
            yield from unbounded(item, place)
        return
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if (
        kind == "str"
        and "max_length" not in schema
        and "64" not in str(schema.get("pattern"))
        and "32" not in str(schema.get("pattern"))
    ):
        yield f"{place}: str"
    if kind == "int" and not {"ge", "le"} <= schema.keys():
        yield f"{place}: int"
    is_of_fixed_length = kind == "tuple" and "variadic_item_index" not in schema
    if kind in ("tuple", "list", "dict", "set") and "max_length" not in schema and not is_of_fixed_length:
        yield f"{place}: {kind}"
    if kind in ("any", "bytes", "json"):
        yield f"{place}: {kind}"
    if (
        kind == "function-after"
        and schema["schema"].get("type") == "str"
        and "_valid_key_id" in repr(schema["function"])
    ):
        return  # a key id: exactly the base58 of 38 bytes
    if kind == "model-fields":
        for name, field in schema["fields"].items():
            yield from unbounded(field["schema"], f"{place}.{name}")
        return
    if kind in ("literal", "enum", "definition-ref"):
        return
    for key in ("schema", "items_schema", "keys_schema", "values_schema", "choices", "definitions"):
        value = schema.get(key)
        yield from unbounded(list(value.values()) if isinstance(value, dict) and key == "choices" else value, place)


def test_the_walk_sees_every_message() -> None:
    models = wire_models()
    assert len(models) >= 40
    for module in MODULES:
        named = {
            name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, WireModel)
        }
        assert named - {"WireModel"} <= models.keys()


def test_every_field_that_a_peer_fills_is_bounded() -> None:
    found = [
        place for name, model in wire_models().items() for place in unbounded(model.__pydantic_core_schema__, name)
    ]
    assert found == []


def test_the_walk_finds_what_is_unbounded() -> None:
    class Loose(BaseModel):
        text: str
        number: int
        items: tuple[int, ...]
        either: dict[str, str | None] | None

    assert {place.split(".")[1] for place in unbounded(Loose.__pydantic_core_schema__, "Loose")} == {
        "text: str",
        "number: int",
        "items: tuple",
        "items: int",
        "either: dict",
        "either: str",
    }


def test_every_model_is_strict_immutable_and_closed() -> None:
    for name, model in wire_models().items():
        config = model.model_config
        assert (config.get("extra"), config.get("frozen"), config.get("strict")) == ("forbid", True, True), name


def test_every_limit_ends_in_what_it_bounds_and_is_explained() -> None:
    text = Path(limits.__file__).read_text(encoding="utf-8")
    names = [name for name in vars(limits) if name.isupper()]
    assert len(names) > 15
    for name in names:
        assert name.endswith(("_MAX", "_MIN"))
        assert f"\n{name} = " in text
        assert text.split(f"\n{name} = ")[1].split("\n")[1].startswith('"""')
    assert all(field.endswith("_max") for field in Limits.model_fields)


@pytest.mark.parametrize("field", sorted(Limits.model_fields))
def test_a_runs_limit_has_a_default_and_bounds(field: str) -> None:
    default = getattr(Limits(), field)
    assert TypeAdapter(Limits).validate_json(json.dumps({field: default}))
    for value in (0, -1, 2**60, "1", 1.0, True, None):
        with pytest.raises(ValueError, match=field):
            TypeAdapter(Limits).validate_json(json.dumps({field: value}))
