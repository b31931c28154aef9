"""Definition of a fuzzed parser, and the run whose messages are mutated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.builder import build_spec, pinned, role_keys

from prime_protocol.assignment import Sampling
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.limits import Limits
from prime_protocol.run_spec import EnvironmentSpec

ROOT, COORDINATOR, TRAINER, VALIDATOR, WORKER = (SigningKey(bytes([number]) * 32) for number in range(1, 6))
BOUNDS = Limits(rollout_decompressed_bytes_max=2**20)
NOW_MS = 1_000_000


@dataclass(frozen=True)
class Parser:
    """Example: Parser("load_json", load_json, [b"{}"], covers=("envelope.load_json",))."""

    name: str
    parse: Callable[[bytes], Any]
    seeds: list[bytes]
    covers: tuple[str, ...] = ()
    """Functions of prime_protocol that it drives: module and name."""
    refusals: tuple[type[Exception], ...] = (RemoteError,)
    again: Callable[[Any], bytes] | None = None
    """Function that encodes the parsed value: other bytes than the input are a finding."""


SAMPLING = Sampling(completion_tokens_max=8, stop_token_ids=(3,))
CONFIG = b'{"model_type": "toy"}'
SPEC = build_spec(
    role_keys(ROOT, COORDINATOR, TRAINER, VALIDATOR),
    {"config.json": CONFIG},
    vocab_size=256,
    environments=(EnvironmentSpec(name="letters", id="letters"),),
    sampling=SAMPLING,
)
RUN = pinned(SPEC, ROOT)


def json_of(value: object) -> bytes:
    import json

    return json.dumps(value, separators=(",", ":")).encode()
