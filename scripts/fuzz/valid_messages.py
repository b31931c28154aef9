"""Valid messages to begin with: those of the golden vectors, every message inside them, and an example of each other one."""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

import prime_protocol
from prime_protocol import (
    delegation,
    dossier,
    invite,
    ledger,
    manifest,
    peers,
    replies,
    requests,
    rollout,
    run_spec,
    timestamp,
    verdict,
)
from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.assignment import Lease
from prime_protocol.envelope import PayloadType, WireModel, open_envelope, parse_json
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyRing
from prime_protocol.parcel import open_parcel

VECTORS = Path(__file__).parents[2] / "tests" / "vectors"
MODEL_OF: dict[str, type[BaseModel]] = {
    PayloadType.RUN_SPEC: run_spec.RunSpec,
    PayloadType.MANIFEST: manifest.Manifest,
    PayloadType.REQUEST: requests.Stamped,
    PayloadType.LEASE: Lease,
    PayloadType.ROLLOUT: rollout.RolloutHeader,
    PayloadType.BLOB: requests.BlobHeader,
    PayloadType.RECEIPT: verdict.Receipt,
    PayloadType.BATCH: replies.TrainBatch,
    PayloadType.KEY_RING: KeyRing,
    PayloadType.CALIBRATION: CalibrationAmendment,
    PayloadType.TIMESTAMP: timestamp.Timestamp,
    PayloadType.INVITE: invite.Invite,
    PayloadType.DELEGATION: delegation.Delegation,
    PayloadType.LEDGER_HEAD: ledger.LedgerHead,
    PayloadType.BAN: dossier.BanStatement,
    PayloadType.PEER_LIST: peers.PeerList,
    PayloadType.PEER_TICKET: peers.PeerTicket,
    PayloadType.PEER_TOKEN: peers.PeerToken,
    PayloadType.PEER_ANSWER: peers.PeerAnswer,
}
_STEPS_MAX = 200
_EACH_MAX = 12
_KEY = SigningKey(bytes(32)).key_id


@cache
def wire_models() -> dict[str, type[WireModel]]:
    """Every message of the protocol and every part of one, by name."""
    for found in pkgutil.walk_packages(prime_protocol.__path__, "prime_protocol."):
        if ".kernels" not in found.name:
            importlib.import_module(found.name)

    def below(model: type[WireModel]) -> Iterator[type[WireModel]]:
        for child in model.__subclasses__():
            yield child
            yield from below(child)

    models = {model.__name__: model for model in below(WireModel) if model.__module__.startswith("prime_protocol")}
    return dict(sorted(models.items()))


@cache
def examples() -> dict[str, list[bytes]]:
    """Valid JSON of every message, at least one of each, by its name."""
    found: dict[str, dict[bytes, None]] = {name: {} for name in wire_models()}

    def keep(value: object) -> None:
        if isinstance(value, BaseModel):
            kept = found.setdefault(type(value).__name__, {})
            if len(kept) < _EACH_MAX:
                kept[value.model_dump_json().encode()] = None
            for name in type(value).model_fields:
                keep(getattr(value, name))
        elif isinstance(value, dict):
            for item in value.values():
                keep(item)
        elif isinstance(value, (list, tuple)):
            for item in value[:8]:
                keep(item)

    for envelope in _envelopes():
        model = MODEL_OF.get(envelope.payload_type)
        if model is not None:
            try:
                keep(parse_json(envelope.payload, model))
            except RemoteError:
                continue
    for name, model in wire_models().items():
        if not found[name]:
            found[name][json.dumps(example(model)).encode()] = None
    return {name: list(kept) for name, kept in found.items()}


def _envelopes() -> Iterator[Any]:
    for path in sorted(VECTORS.glob("v*/*")):
        texts = [path.read_bytes()]
        if path.suffix == ".json":
            texts = [
                item["text"].encode() for item in json.loads(texts[0]) if "payloadType" in str(item.get("text", ""))
            ]
        for text in texts:
            try:
                yield open_parcel(text, body_bytes_max=2**30).envelope if text[:4] == b"PRP1" else open_envelope(text)
            except RemoteError:
                continue


def example(model: type[BaseModel]) -> dict[str, Any]:
    """The smallest valid instance as JSON, found by repairing what the model finds wrong. Raises LookupError."""
    value: dict[str, Any] = {}
    for _ in range(_STEPS_MAX):
        try:
            model.model_validate_json(json.dumps(value))
        except ValidationError as error:
            fault = error.errors()[0]
            if not fault["loc"]:
                value |= _TOGETHER[model.__name__]
                continue
            _repair(value, list(fault["loc"]), fault["type"], fault.get("ctx", {}))
        else:
            return value
    raise LookupError(f"no example of {model.__name__} was found: {value}")


_TOGETHER: dict[str, dict[str, Any]] = {
    "Delegation": {"machine": SigningKey(bytes(31) + b"1").key_id, "issued_at_ms": 1, "expires_at_ms": 2}
}
"""Fields that a model's own validator compares with each other."""
_FRESH: dict[str, Any] = {
    "missing": None,
    "string_type": "x",
    "int_type": 1,
    "float_type": 1.0,
    "bool_type": False,
    "string_pattern_mismatch": "0" * 64,
    "value_error": _KEY,
    "list_type": [],
    "tuple_type": [],
    "dict_type": {},
    "mapping_type": {},
    "model_type": {},
    "model_attributes_type": {},
}


def _repair(value: Any, place: list[int | str], kind: str, context: dict[str, Any]) -> None:
    while len(place) > 1:  # unions put names into the place that are not in the value
        step = place[0]
        inside = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if inside or (isinstance(value, dict) and step in value):
            value = value[step]
        place = place[1:]
    last = place[0]
    if isinstance(value, list) and last == len(value):
        value.append(None)  # a tuple of a fixed length
    if kind == "too_short" and isinstance(value[last], dict):
        value[last] = {"x": None}
    elif kind in ("too_short", "too_long"):
        value[last] = [None] * (context.get("min_length") or context.get("max_length") or 0)
    elif kind in ("greater_than_equal", "greater_than"):
        value[last] = context.get("ge", context.get("gt", 0) + 1)
    elif kind in ("enum", "literal_error"):
        value[last] = context["expected"].split(" or ")[0].split(", ")[0].strip("'")
    elif kind == "string_pattern_mismatch" and value[last] == "0" * 64:
        pattern = context["pattern"]
        value[last] = "http://h/x" if "http" in pattern else "0" * 32 if "32" in pattern else "config.json"
    else:
        value[last] = copy.deepcopy(_FRESH.get(kind))
