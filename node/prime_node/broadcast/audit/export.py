"""A verified policy as a plain Hugging Face model directory that states its provenance.

    model.safetensors                    or model-00001-of-0000N.safetensors and their index, above SHARD_BYTES
    adapter_model.safetensors            instead, with adapter_config.json for peft, if the run's policies are adapters; given
                                         their base, the model with the adapters merged in
    config.json, tokenizer.json, ...     the model files of the RunSpec, byte for byte
    PROVENANCE.json                      an in-toto Statement: every other file's SHA-256, and which signed policy it is
    PROVENANCE.dsse.json                 the same, signed by the exporter, if a key was given
    provenance/run.json, manifest.json   the run's own signed envelopes: the proof; keys-0001.json, ... if its keys changed

Invariant: the directory appears whole or not at all. It is written next to its final place and renamed.

in-toto Statement v1: https://github.com/in-toto/attestation/tree/main/spec/v1. Its subjects are the files with their SHA-256;
its predicate names the signed policy that they were made from. Readers need none of this project's software. The signature,
if any, is the exporter's: it says who wrote the files. The run's own envelopes, stored with the files, prove that they are
the trainer's weights. OpenSSF model-signing takes ECDSA keys alone; DECISIONS.md says why this is not its bundle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prime_node.broadcast.audit.audit import Verified
from prime_node.broadcast.audit.safetensors_file import INDEX_FILE, METADATA, write_safetensors
from prime_node.inside import write_inside
from prime_protocol.adapters import AdapterMismatch, AdapterSpec, factors_in_fp32, merged
from prime_protocol.envelope import Envelope, Signature, pre_authentication_encoding
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.manifest import SignedManifest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights, num_bytes, root_of

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://prime-node/exported-policy/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def statement(files: Mapping[str, str], run: PinnedRun, signed: SignedManifest, *, software: str) -> bytes:
    """Return the statement about files given as name -> SHA-256. `signed` was verified for `run`."""
    manifest = signed.manifest
    trainers = run.keys.ever(Role.TRAINER)
    predicate: dict[str, Any] = {
        "run": run.digest,
        "run_name": run.spec.name,
        "policy_version": manifest.policy_version,
        "manifest": signed.digest,
        "state_root": manifest.state_root,
        "signer": next(item.key_id for item in signed.envelope.signatures if item.key_id in trainers),
        "step": manifest.produced_by.step,
        "optimizer_steps": manifest.produced_by.optimizer_steps,
        "batch": manifest.produced_by.batch,
        "software": manifest.produced_by.software,
        "created_at_ms": manifest.created_at_ms,
        "exported_by": software,
    }
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(files.items())]
    fields = {"_type": STATEMENT_TYPE, "subject": subjects, "predicateType": PREDICATE_TYPE, "predicate": predicate}
    return (json.dumps(fields, indent=1) + "\n").encode()


def sign_statement(data: bytes, key: SigningKey) -> Envelope:
    """Return the statement in a DSSE envelope, signed by the exporter."""
    signature = key.sign(pre_authentication_encoding(PAYLOAD_TYPE, data))
    return Envelope(PAYLOAD_TYPE, data, (Signature(key.key_id, signature),))


SHARD_BYTES = 5 * 10**9
"""Bytes above which weights are split into several files, as the Hugging Face hub asks for."""
ADAPTER_CONFIG_FILE = "adapter_config.json"
PROVENANCE_FILE = "PROVENANCE.json"
SIGNED_PROVENANCE_FILE = "PROVENANCE.dsse.json"


def export_checkpoint(
    verified: Verified,
    folder: Path,
    *,
    software: str,
    key: SigningKey | None = None,
    shard_bytes: int = SHARD_BYTES,
    base: Weights | None = None,
) -> dict[str, str]:
    """Write the directory. Return file name -> SHA-256. Raises LocalError, and leaves nothing behind then."""
    check_free(folder)
    if base is not None:
        verified = replace(verified, weights=_merged(verified, base))
    elif (spec := verified.run.spec.adapters) is not None and spec.unit_log2 is not None:
        verified = replace(verified, weights=_factors(verified.weights, spec))
    _check_names(verified)
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "provenance").mkdir(parents=True)
        files = _write(verified, partial, shard_bytes=shard_bytes, is_merged=base is not None)
        provenance = statement(files, verified.run, verified.signed, software=software)
        (partial / PROVENANCE_FILE).write_bytes(provenance)
        if key is not None:
            (partial / SIGNED_PROVENANCE_FILE).write_bytes(sign_statement(provenance, key).to_bytes())
        _make_durable(partial)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise LocalError(f"export to {folder}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return files


def check_free(folder: Path) -> None:
    """Check that the export goes to a new or empty folder. Raises LocalError."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise LocalError(f"{folder} is not empty; export to a new folder")


def _check_names(verified: Verified) -> None:
    """Check that no model file or tensor of the run has a name that the export writes itself. Raises LocalError."""
    for name in map(str.casefold, verified.model_files):
        if name.startswith("provenance") or ".safetensors" in name or name == ADAPTER_CONFIG_FILE:
            raise LocalError(f"the run has a model file {name}, and an export writes its own file of that name")
    if METADATA in verified.weights:
        raise LocalError(f"the policy has a tensor {METADATA}, which no safetensors file can hold")


def shards_of(weights: Weights, shard_bytes: int) -> Iterator[Weights]:
    """Yield the tensors in their own order, as many to a file as fit; a larger one has a file to itself."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.data.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.data.nbytes
    for names in shards:
        yield {name: weights[name] for name in names}


def _merged(verified: Verified, base: Weights) -> Weights:
    """Return the base with the adapters merged in. Raises LocalError."""
    spec = verified.run.spec.adapters
    if spec is None:
        raise LocalError("this run's policies are whole models: run the export without a base")
    if (found := root_of(base)) != spec.base_root:
        raise LocalError(
            f"the base has state root {found[:16]}, the run's adapters are of {spec.base_root[:16]} ({spec.base})"
        )
    try:
        return merged(base, verified.weights, spec)
    except AdapterMismatch as error:
        raise LocalError(f"the policy does not fit the run's base: {error}") from None


def _factors(weights: Weights, spec: AdapterSpec) -> Weights:
    """Return integer factors as the floats that peft reads. Raises LocalError."""
    try:
        return factors_in_fp32(weights, spec)
    except AdapterMismatch as error:
        raise LocalError(f"the policy is not of the run's adapters: {error}") from None


def _peft_config(spec: AdapterSpec) -> bytes:
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": list(spec.targets) or "all-linear",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    return (json.dumps(fields, indent=1) + "\n").encode()


def _write(verified: Verified, folder: Path, *, shard_bytes: int, is_merged: bool) -> dict[str, str]:
    files: dict[str, str] = {}
    stem, adapters = "model", None if is_merged else verified.run.spec.adapters
    for name, data in verified.model_files.items():
        write_inside(folder, name, data)
        files[name] = hashlib.sha256(data).hexdigest()
    small = {
        "provenance/run.json": verified.run.envelope.to_bytes(),
        "provenance/manifest.json": verified.signed.envelope.to_bytes(),
        **{f"provenance/keys-{ring.version:04d}.json": one.to_bytes() for ring, one in verified.run.keys.rings},
    }
    if adapters is not None:
        stem, shard_bytes = "adapter_model", 2**62  # peft reads one file
        small[ADAPTER_CONFIG_FILE] = _peft_config(adapters)
    shards = list(shards_of(verified.weights, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files[name] = write_safetensors(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes(verified.weights)}, "weight_map": weight_map}
        small[INDEX_FILE] = (json.dumps(index, indent=1) + "\n").encode()
    for name, data in small.items():
        (folder / name).write_bytes(data)
        files[name] = hashlib.sha256(data).hexdigest()
    return files


def _make_durable(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
