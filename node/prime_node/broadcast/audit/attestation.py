"""The provenance of exported files in supply-chain terms: an in-toto Statement in a DSSE envelope.

in-toto Statement v1: https://github.com/in-toto/attestation/tree/main/spec/v1. Its subjects are the files with their SHA-256;
its predicate names the signed policy that they were made from. Readers need none of this project's software. The signature,
if any, is the exporter's: it says who wrote the files. The run's own envelopes, stored with the files, prove that they are
the trainer's weights. OpenSSF model-signing takes ECDSA keys alone; DECISIONS.md says why this is not its bundle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prime_protocol.envelope import Envelope, Signature, pre_authentication_encoding
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.manifest import SignedManifest
from prime_protocol.run_spec import PinnedRun

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
