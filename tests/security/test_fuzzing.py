"""Every parser of the protocol has a fuzzer, every finding stays fixed, and five minutes of fuzzing find nothing more."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import prime_protocol
from prime_node.coordinator.api.routes import ENDPOINTS
from prime_protocol.envelope import WireModel

ROOT = Path(__file__).parents[2]
FUZZ = ROOT / "scripts" / "fuzz"
CORPUS_BYTES_MAX = 2 * 2**20
_PARSES = re.compile(r"(open|parse|check|unpack|read|decode|load)(_|$)")
_FOREIGN = re.compile(r"\b(bytes|memoryview|Envelope)\b")
NOT_PARSERS = {
    "replies.upload_headers": "takes a digest of our own",
    "amendment.CalibrationChain.__init__": "holds what `check` has read",
    "adapters": "works on weights that were verified",
    "assigned": "hashes secrets and numbers",
    "codec.": "scripts/fuzz/chunks.py and frames.py drive each decoder and compare them; decode_chunk is their one caller",
    "body_claim.claim_of": "writes",
    "body_claim.parse_claim": "what read_claim calls, which is fuzzed",
    "checkpoint.EncodedCheckpoint": "what was encoded here",
    "checkpoint.assemble": "the same",
    "chunk_index.ChunkIndex": "rows that open_index has checked",
    "digest": "hashes",
    "envelope.Envelope.__init__": "holds what open_envelope has read",
    "envelope.Signature": "the same",
    "envelope.pre_authentication_encoding": "writes",
    "envelope.seal": "writes",
    "identity.SigningKey": "holds or uses a key of our own",
    "identity.PublicKey.verify": "driven by `signature`",
    "key_ring.KeyChain.__init__": "holds what `check` has read",
    "key_ring.KeyChain.verify": "driven by the signed statements",
    "key_ring.KeyChain.verify_kept": "the same",
    "key_ring.KeyChain.replaced_by": "looks up the signers of a verified statement",
    "key_ring.KeyChain.verify_manifest": "the same",
    "ledger.LedgerChain.add": "writes",
    "manifest.SignedManifest": "holds what open_manifest has read",
    "parcel.Parcel.__init__": "holds what open_parcel has read",
    "parcel.pack_parcel": "writes",
    "peer_frames.pack_": "writes",
    "pieces.check_piece": "compares digests",
    "rollout.Completion": "holds values",
    "run_spec.PinnedRun": "holds what open_run_spec has read",
    "seed_chain.chain_from": "hashes",
    "seed_chain.committed": "hashes",
    "seed_chain.link": "hashes",
}
"""Prefixes of names of functions that take bytes, but no stranger's bytes, or only after a parser that is fuzzed."""


def functions() -> Iterator[tuple[str, object]]:
    """Yield every public function and method of the protocol, with its module and name."""
    for found in pkgutil.walk_packages(prime_protocol.__path__, "prime_protocol."):
        if ".kernels" in found.name:
            continue
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            place = f"{found.name.removeprefix('prime_protocol.')}.{name}"
            if name.startswith("_") or getattr(value, "__module__", None) != found.name:
                continue
            if inspect.isfunction(value):
                yield place, value
            elif inspect.isclass(value) and not issubclass(value, WireModel):
                for inner, method in vars(value).items():
                    method = getattr(method, "__func__", method)
                    if inspect.isfunction(method) and (inner == "__init__" or not inner.startswith("_")):
                        yield f"{place}.{inner}", method


def parses(place: str, function: object) -> bool:
    """Return whether it is a parser, by its arguments, or by its name if it takes text."""
    name = place.rpartition(".")[2]
    types = [str(parameter.annotation) for parameter in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]
    return any(map(_FOREIGN.search, types)) or (_PARSES.match(name) is not None and "str" in types)


@pytest.fixture(scope="module")
def registry() -> tuple[set[str], set[str]]:
    """Return (names of all parsers, functions that they drive)."""
    sys.path[:0] = [str(FUZZ), str(ROOT)]
    try:
        parsers = importlib.import_module("registry").protocol_parsers()
        others = importlib.import_module("node_registry").node_parsers()
    finally:
        del sys.path[:2]
    return {one.name for one in [*parsers, *others]}, {place for one in parsers for place in one.covers}


def test_every_function_of_the_protocol_that_parses_is_fuzzed(registry: tuple[set[str], set[str]]) -> None:
    _, covered = registry
    known = dict(functions())
    assert covered <= known.keys()
    missing = [
        place
        for place, function in known.items()
        if parses(place, function) and place not in covered and not place.startswith(tuple(NOT_PARSERS))
    ]
    assert not missing, "give each a Parser in scripts/fuzz/registry.py, or say in NOT_PARSERS why it is none"


def test_every_message_of_the_protocol_is_fuzzed(registry: tuple[set[str], set[str]]) -> None:
    names, _ = registry
    list(functions())  # imports all modules
    models = {model.__name__ for model in below(WireModel) if model.__module__.startswith("prime_protocol")}
    assert len(models) > 50
    assert {f"model.{name}" for name in models} <= names


def below(model: type[WireModel]) -> Iterator[type[WireModel]]:
    """Return all models that inherit from it."""
    for child in model.__subclasses__():
        yield child
        yield from below(child)


def test_the_parsers_of_the_node_that_hear_strangers_are_fuzzed(registry: tuple[set[str], set[str]]) -> None:
    names, _ = registry
    asked = {
        "http_request",
        "http_head",
        "http_answer",
        "http_error",
        "http_range",
        "http_prefer",
        "mdns_record",
        "peer_address",
    }
    files = {"config_json", "tokenizer_json", "chat_template", "safetensors", "json_lines", "settings"}
    assert asked | files <= names


@pytest.mark.timeout(300)
def test_no_input_of_the_corpus_is_a_finding() -> None:
    done = subprocess.run([FUZZ / "all", "--corpus"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]


def test_the_corpus_is_small_and_has_no_input_twice() -> None:
    texts = [path.read_text() for path in sorted((FUZZ / "corpus").iterdir())]
    assert len(texts) > 50
    assert sum(map(len, texts)) < CORPUS_BYTES_MAX
    assert all(len(set(text.split())) == len(text.split()) for text in texts)


@pytest.mark.slow
def test_a_finding_is_kept_and_replayed_by_its_name(tmp_path: Path) -> None:
    """An input of the corpus has the name of its parser and its digest."""
    program = (
        f"import sys; sys.path[:0] = [{str(FUZZ)!r}, {str(ROOT)!r}]; import run; data = run.kept('envelope')[0]; "
        "print(run.name_of('envelope', data))"
    )
    name = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run([FUZZ / "all", "--replay", name], capture_output=True, text=True)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, name)
    assert subprocess.run([FUZZ / "all", "--replay", "envelope-none"], capture_output=True).returncode == 2


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_five_minutes_of_fuzzing_find_nothing() -> None:
    """Processor time, on two processors, with a real daemon among it. The seed is in the output. Each night it is an hour."""
    done = subprocess.run([FUZZ / "all", "--minutes", "5", "--jobs", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]


def test_the_driver_of_the_http_interface_knows_every_route() -> None:
    """The server's own table of endpoints is the reference: an added route must be driven."""
    driver = _driver()
    gets = {re.sub(r"\{\w+\}", "{}", one.path) for one in ENDPOINTS if one.caller is None}
    posts = {one.path.removeprefix("/v1/") for one in ENDPOINTS if one.caller is not None}
    assert len(gets) > 10
    assert len(posts) > 12
    assert gets == set(driver.GETS)
    assert posts == {*driver.REQUESTS, *driver.PAYLOADS}


def _driver() -> Any:
    sys.path[:0] = [str(FUZZ), str(ROOT)]
    try:
        return importlib.import_module("http_callers")
    finally:
        del sys.path[:2]
