"""An exported directory is an ordinary model, names its origin, and appears whole or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.node.table_engine import table_weights
from tests.node.worker_world import STRANGER, TRAINER, MemorySource, make_run

from prime_node.adapters.models.tiny_model import initial_weights, tiny_model_files
from prime_node.broadcast.audit.audit import Verified, audit
from prime_node.broadcast.audit.compare import compare
from prime_node.broadcast.audit.export import (
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    PROVENANCE_FILE,
    SIGNED_PROVENANCE_FILE,
    STATEMENT_TYPE,
    export_checkpoint,
    shards_of,
)
from prime_node.broadcast.audit.safetensors_file import INDEX_FILE, METADATA, read_weights
from prime_protocol.digest import digest_of
from prime_protocol.envelope import open_envelope, pre_authentication_encoding
from prime_protocol.errors import LocalError
from prime_protocol.manifest import open_manifest
from prime_protocol.run_spec import ModelFile, open_run_spec
from prime_protocol.weights import Weights, WeightTensor

FILES = tiny_model_files(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)


def changed(weights: Weights, seed: int) -> Weights:
    """Return the next policy: some bits of every tensor differ."""
    rng = np.random.default_rng(seed)
    return {
        name: WeightTensor(tensor.dtype, tensor.shape, tensor.data ^ (rng.random(tensor.data.size) < 0.02))
        for name, tensor in weights.items()
    }


def tiny_run(tmp_path: Path, *, files: dict[str, bytes] = FILES) -> tuple[MemorySource, list[Weights]]:
    """Publish a run of the tiny model with an anchor and two deltas."""
    (tmp_path / "model").mkdir()
    for name, data in files.items():
        (tmp_path / "model" / name).write_bytes(data)
    run = make_run(
        model_files=tuple(ModelFile(name=name, digest=digest_of(data), size=len(data)) for name, data in files.items())
    )
    source = MemorySource(run)
    source.blobs |= {digest_of(data): data for data in files.values()}
    config = {"model_config_digest": digest_of(files["config.json"])}
    weights = [initial_weights(tmp_path / "model", seed=0)]
    signed = source.publish(weights[0], **config)  # type: ignore[arg-type]
    for seed in (1, 2):
        weights.append(changed(weights[-1], seed))
        signed = source.publish(weights[-1], base=(signed, weights[-2]), **config)  # type: ignore[arg-type]
    return source, weights


def verified(source: MemorySource, policy_version: int | None = None) -> Verified:
    kept: list[Verified] = []
    report = asyncio.run(audit(source, source.run.digest, policy_version=policy_version, on_verified=kept.append))
    assert report.passed, report.failure
    return kept[0]


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Verified, Weights]:
    """Export the head of a tiny run as a directory."""
    source, weights = tiny_run(tmp_path)
    found = verified(source)
    export_checkpoint(found, tmp_path / "out", software="test 1", key=STRANGER)
    return tmp_path / "out", found, weights[-1]


def test_transformers_loads_an_export_with_exactly_the_signed_weights(exported: tuple[Path, Verified, Weights]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, _, weights = exported
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    loaded = {
        name: WeightTensor("bf16", tuple(tensor.shape), tensor.contiguous().view(torch.uint16).numpy().reshape(-1))
        for name, tensor in model.state_dict().items()
    }
    assert compare(weights, loaded).equal
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.decode(tokenizer.encode("abc", add_special_tokens=False)) == "abc"


def test_an_export_holds_the_weights_and_the_model_files_and_nothing_else(
    exported: tuple[Path, Verified, Weights],
) -> None:
    folder, _, weights = exported
    assert compare(weights, read_weights(folder)).equal
    for name, data in FILES.items():
        assert (folder / name).read_bytes() == data
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    beside = {"model.safetensors", PROVENANCE_FILE, SIGNED_PROVENANCE_FILE}
    assert names == {*FILES, *beside, "provenance/run.json", "provenance/manifest.json"}


def test_provenance_names_every_file_and_the_signed_policy(exported: tuple[Path, Verified, Weights]) -> None:
    folder, found, _ = exported
    statement = json.loads((folder / PROVENANCE_FILE).read_bytes())
    assert (statement["_type"], statement["predicateType"]) == (STATEMENT_TYPE, PREDICATE_TYPE)
    subjects = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    there = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert subjects.keys() == there.keys() - {PROVENANCE_FILE, SIGNED_PROVENANCE_FILE}
    assert all(hashlib.sha256(there[name].read_bytes()).hexdigest() == digest for name, digest in subjects.items())
    predicate, manifest = statement["predicate"], found.signed.manifest
    assert predicate["run"] == found.run.digest
    assert predicate["manifest"] == found.signed.digest
    assert predicate["state_root"] == manifest.state_root
    assert predicate["signer"] == TRAINER.key_id
    assert (predicate["policy_version"], predicate["step"]) == (2, 1)
    assert (predicate["software"], predicate["exported_by"]) == ("test", "test 1")


def test_the_exported_envelopes_prove_the_weights_without_the_source(exported: tuple[Path, Verified, Weights]) -> None:
    folder, found, _ = exported
    run = open_run_spec(open_envelope((folder / "provenance/run.json").read_bytes()), pinned=found.run.digest)
    manifest = open_manifest(open_envelope((folder / "provenance/manifest.json").read_bytes()), run).manifest
    weights = read_weights(folder)
    assert {entry.name: entry.digest for entry in manifest.tensors} == {
        name: tensor.digest for name, tensor in weights.items()
    }


def test_the_signed_provenance_is_an_in_toto_statement_that_dsse_software_verifies(
    exported: tuple[Path, Verified, Weights],
) -> None:
    dsse = pytest.importorskip("securesystemslib.dsse")
    signer = pytest.importorskip("securesystemslib.signer")
    folder, _, _ = exported
    envelope = dsse.Envelope.from_dict(json.loads((folder / SIGNED_PROVENANCE_FILE).read_bytes()))
    key = signer.SSlibKey(STRANGER.key_id, "ed25519", "ed25519", {"public": STRANGER.public.raw.hex()})
    assert envelope.verify([key], 1).keys() == {STRANGER.key_id}
    assert envelope.payload == (folder / PROVENANCE_FILE).read_bytes()
    envelope.payload = envelope.payload.replace(b"model.safetensors", b"other.safetensors")
    with pytest.raises(Exception, match="Accepted signatures do not match threshold"):
        envelope.verify([key], 1)


def test_the_signature_is_over_the_statement_and_its_type(exported: tuple[Path, Verified, Weights]) -> None:
    folder, _, _ = exported
    envelope = open_envelope((folder / SIGNED_PROVENANCE_FILE).read_bytes())
    assert envelope.payload_type == PAYLOAD_TYPE
    assert envelope.payload == (folder / PROVENANCE_FILE).read_bytes()
    (signature,) = envelope.signatures
    STRANGER.public.verify(signature.signature, pre_authentication_encoding(PAYLOAD_TYPE, envelope.payload))


def test_an_earlier_policy_can_be_exported(tmp_path: Path) -> None:
    source, weights = tiny_run(tmp_path)
    export_checkpoint(verified(source, 1), tmp_path / "out", software="test")
    assert compare(weights[1], read_weights(tmp_path / "out")).equal
    assert not (tmp_path / "out" / SIGNED_PROVENANCE_FILE).exists()


def test_large_weights_are_sharded_with_an_index_that_transformers_follows(tmp_path: Path) -> None:
    source, weights = tiny_run(tmp_path)
    files = export_checkpoint(verified(source), tmp_path / "out", software="test", shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_bytes())
    assert index["weight_map"].keys() == weights[-1].keys()
    assert set(index["weight_map"].values()) == {name for name in files if name.endswith(".safetensors")}
    assert len(set(index["weight_map"].values())) > 1
    assert compare(weights[-1], read_weights(tmp_path / "out")).equal
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert model.state_dict().keys() == weights[-1].keys()


def test_shards_keep_the_order_and_hold_as_much_as_fits() -> None:
    weights = {str(number): table_weights(number)["table"] for number in range(5)}  # 512 bytes each
    assert [list(shard) for shard in shards_of(weights, 1024)] == [["0", "1"], ["2", "3"], ["4"]]
    assert [list(shard) for shard in shards_of(weights, 100)] == [["0"], ["1"], ["2"], ["3"], ["4"]]


def test_an_export_never_touches_what_is_there(tmp_path: Path) -> None:
    source, _ = tiny_run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"mine")
    with pytest.raises(LocalError, match="not empty"):
        export_checkpoint(verified(source), tmp_path / "out", software="test")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_tensor_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    """Before, the export of a run with such a tensor succeeded, and no library could read it."""
    source = MemorySource(make_run())
    source.publish({METADATA: table_weights(0)["table"]})
    with pytest.raises(LocalError, match="tensor __metadata__"):
        export_checkpoint(verified(source), tmp_path / "out", software="test")
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    source, _ = tiny_run(tmp_path)
    (tmp_path / "out").mkdir()
    export_checkpoint(verified(source), tmp_path / "out", software="test")
    assert (tmp_path / "out" / PROVENANCE_FILE).is_file()


@pytest.mark.parametrize("name", ["PROVENANCE.json", "provenance", "model.safetensors", INDEX_FILE])
def test_a_model_file_that_would_pass_for_one_of_the_export_is_refused(tmp_path: Path, name: str) -> None:
    source, _ = tiny_run(tmp_path)  # no RunSpec names such a file: this is the second check
    with pytest.raises(LocalError, match="writes its own file of that name"):
        export_checkpoint(
            replace(verified(source), model_files=FILES | {name: b"{}"}), tmp_path / "out", software="test"
        )
    assert not list(tmp_path.glob("out*"))


def test_an_export_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    source, _ = tiny_run(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LocalError, match="export to"):
        export_checkpoint(verified(source), tmp_path / "file" / "out", software="test")
    assert (tmp_path / "file").read_bytes() == b""
