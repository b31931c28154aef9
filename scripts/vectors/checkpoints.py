"""Golden vectors of manifests and checkpoints. See make_vectors.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from prime_protocol.checkpoint import EncodedCheckpoint, encode_checkpoint, tensor_table
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.manifest import BasePolicy, Manifest, Provenance
from prime_protocol.weights import Weights, WeightTensor, root_of, state_root
from vectors.folder import NOW_MS, STRANGER, TRAINER, Case, Folder, fields, flipped
from vectors.runs import CONFIG, E


def checkpoints(folder: Folder, run: Envelope) -> str:
    """Policy 0 as an anchor and policy 1 as its delta. Returns the digest of policy 1's manifest."""
    embed = np.arange(0x3F00, 0x3F00 + 300, dtype=np.uint16)
    embed[:3] = (0x7FC1, 0x8000, 0xFF80)  # a NaN with payload, -0, -infinity
    moved = embed.copy()
    moved[[5, 77]] += 1
    policies: list[Weights] = [
        {
            "embed": WeightTensor("bf16", (30, 10), matrix),
            "empty": WeightTensor("bf16", (0, 4), np.zeros(0, np.uint16)),
            "norm": WeightTensor("fp32", (5,), np.full(5, 0x3F800000, np.uint32)),
        }
        for matrix in (embed, moved)
    ]
    cases: list[Case] = []
    previous: Envelope | None = None
    first_root = ""
    for version, weights in enumerate(policies):
        root = root_of(weights)
        first_root = first_root or root
        base_policy = BasePolicy(policy_version=0, state_root=first_root)
        update_paths = [encode_checkpoint(weights, part_bytes=64)]
        if version:
            update_paths.insert(0, encode_checkpoint(weights, (base_policy, policies[0]), part_bytes=64))
        manifest = Manifest(
            run=run.digest,
            policy_version=version,
            previous=previous.digest if previous else None,
            model_config_digest=digest_of(CONFIG),
            state_root=root,
            tensors=tensor_table(weights),
            encodings=tuple(way.encoding for way in update_paths),
            produced_by=Provenance(
                step=version - 1,
                optimizer_steps=version,
                batch=digest_of(b"batch") if version else None,
                software="vectors 1",
            ),
            created_at_ms=NOW_MS,
        )
        previous = seal(manifest, PayloadType.MANIFEST, TRAINER)
        file = folder.file(f"policy_{version}.manifest", previous.to_bytes())
        raw = {name: tensor.data.tobytes().hex() for name, tensor in weights.items()}
        expected = {"digest": previous.digest, "state_root": root, "tensors": raw}
        for number, way in enumerate(update_paths):
            cases.append(_way(folder, version, number, way) | {"input": file, "expect": expected})
        base = {name: value for name, value in cases[-len(update_paths)].items() if name != "expect"}
        first = fields(update_paths[0].encoding)
        for name, change, code in [
            ("another run", {"run": digest_of(b"other")}, E.WRONG_RUN),
            ("another root", {"state_root": digest_of(b"other")}, E.CHAIN_BROKEN),
            ("two encodings with one base", {"encodings": [first, first]}, E.CHAIN_BROKEN),
            ("a base that is not older", {"encodings": [first | _base_of(version, root)]}, E.CHAIN_BROKEN),
            ("no encodings", {"encodings": []}, E.WRONG_TYPE),
            ("no parts", {"encodings": [first | {"parts": []}]}, E.CHAIN_BROKEN),
        ]:
            lied = seal(json.dumps(fields(manifest) | change).encode(), PayloadType.MANIFEST, TRAINER)
            file = folder.file(f"policy_{version}_bad_{name.replace(' ', '_')}.manifest", lied.to_bytes())
            cases.append(base | {"name": f"policy_{version}, {name}", "input": file, "error": code})
        for name, index, code in _bad_indices(update_paths[0].index):
            entry = {"digest": digest_of(index), "size": len(index)}
            changes = {"encodings": [first | {"index": entry}]}
            lied = seal(json.dumps(fields(manifest) | changes).encode(), PayloadType.MANIFEST, TRAINER)
            stem = f"policy_{version}_bad_{name.replace(' ', '_')}"
            files = {
                "input": folder.file(f"{stem}.manifest", lied.to_bytes()),
                "index": folder.file(f"{stem}.index", index),
            }
            cases.append(base | files | {"name": f"policy_{version}, {name}", "error": code})
        tampered = folder.file(f"policy_{version}_tampered.index", flipped(update_paths[0].index, -1))
        cases.append(
            base | {"name": f"policy_{version}, tampered index", "index": tampered, "error": E.DIGEST_MISMATCH}
        )
        forged = folder.file(
            f"policy_{version}_forged.manifest", seal(manifest, PayloadType.MANIFEST, STRANGER).to_bytes()
        )
        cases.append(base | {"name": f"policy_{version}, another signer", "input": forged, "error": E.BAD_SIGNATURE})
        broken = [
            folder.file(f"policy_{version}_bad.part_0", flipped(update_paths[0].parts[0], -1)),
            *base["parts"][1:],
        ]
        cases.append(base | {"name": f"policy_{version}, changed part", "parts": broken, "error": E.DIGEST_MISMATCH})
    folder.cases("checkpoint", cases)
    rows: list[Any] = [["b", "bf16", [2, 3], "00" * 32], ["a", "fp32", [], "11" * 32], ["é", "bf16", [0], "22" * 32]]
    root = state_root((name, dtype, tuple(shape), digest) for name, dtype, shape, digest in rows)
    folder.cases("state_root", [{"name": "three tensors", "rows": rows, "expect": root}])
    assert previous
    return previous.digest


def _way(folder: Folder, version: int, number: int, way: EncodedCheckpoint) -> Case:
    stem = f"policy_{version}.{number}"
    return {
        "name": f"policy_{version}, {way.encoding.kind}",
        "run_spec": "run_spec.envelope",
        "encoding": number,
        "index": folder.file(f"{stem}.index", way.index),
        "parts": [folder.file(f"{stem}.part_{i}", part) for i, part in enumerate(way.parts)],
        "base": None if way.encoding.base is None else "policy_0, anchor",
    }


def _base_of(version: int, root: str) -> Case:
    return {"kind": "delta", "base": {"policy_version": version, "state_root": root}}


def _bad_indices(index: bytes) -> list[tuple[str, bytes, ErrorCode]]:
    """Indices that a dishonest trainer might sign. A row has 40 bytes, the head 8."""
    head, rows = index[:8], [index[at : at + 40] for at in range(8, len(index), 40)]

    def of(rows: list[bytes]) -> bytes:
        return head[:4] + len(rows).to_bytes(4, "little") + b"".join(rows)

    count = int.from_bytes(rows[0][4:8], "little")
    fewer = rows[0][:4] + (count - 1).to_bytes(4, "little") + rows[0][8:]
    return [
        ("another magic", b"PRX2" + index[4:], E.CHAIN_BROKEN),
        ("half a row", index[:-1], E.CHAIN_BROKEN),
        ("a chunk too few", of(rows[:-1]), E.CHAIN_BROKEN),
        ("a chunk too many", of([*rows, rows[0]]), E.CHAIN_BROKEN),
        ("reordered chunks", of(rows[::-1]), E.CHAIN_BROKEN),
        ("an uncovered element", of([fewer, *rows[1:]]), E.CHAIN_BROKEN),
    ]
