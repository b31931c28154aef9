"""Write golden vectors: inputs as they are on the wire, and what every implementation must make of them.

    python scripts/make_vectors.py tests/vectors/v3

A folder is written once. Old vectors stay as they are and keep verifying; a change of the wire gets a new folder. All keys
and times are fixed, so two runs of one version of this script differ at most in how zstd compresses.

A folder holds one JSON list per kind, and binary inputs beside it. A case has a `name`, an `input` (a file in the folder, or
`hex`, or `text`), the kind's own parameters, and either `expect` or the `error` code. tests/protocol/test_vectors.py shows
in one short function per kind how to read them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.checkpoint import EncodedCheckpoint, encode_checkpoint, tensor_table
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.manifest import BasePolicy, Manifest, Provenance
from prime_protocol.messages import BatchGroup, BlobHeader, JoinRequest, LeaseRequest, Stamped, TrainBatch
from prime_protocol.noise import SEED_MAX
from prime_protocol.parcel import pack_parcel
from prime_protocol.rollout import Completion, EngineInfo, FinishReason, RolloutHeader, pack_body, rollouts_for
from prime_protocol.run_spec import EnvironmentSpec, JoinLink, ModelFile, RunSpec
from prime_protocol.schedule import Schedule
from prime_protocol.tensor_file import pack_tensors
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason
from prime_protocol.weights import Weights, WeightTensor, root_of, state_root
from vectors_adapters import adapters
from vectors_basics import envelopes, json_texts, keys, noise
from vectors_folder import (
    COORDINATOR,
    NOW_MS,
    ROOT,
    STRANGER,
    TRAINER,
    VALIDATOR,
    WORKER,
    Case,
    Folder,
    fields,
    flipped,
)
from vectors_invite import invites
from vectors_ledger import ledger
from vectors_peers import peers
from vectors_proofs import choices, proofs, proven, tensors_of
from vectors_trust import trust
from vectors_turns import turns

CONFIG = b'{"model_type": "qwen3", "vocab_size": 264}'
STOP = 257
ENGINE = EngineInfo(name="vectors", version="1", dtype="fp32", device="cpu")
E = ErrorCode


def run_spec() -> RunSpec:
    return RunSpec(
        name="vectors",
        created_at_ms=NOW_MS,
        keys=RoleKeys(
            root=(ROOT.key_id,),
            coordinator=(COORDINATOR.key_id,),
            trainer=(TRAINER.key_id,),
            validator=(VALIDATOR.key_id,),
        ),
        model_files=(ModelFile(name="config.json", digest=digest_of(CONFIG), size=len(CONFIG)),),
        vocab_size=264,
        environments=(EnvironmentSpec(name="spell", id="reasoning_gym", options={"task": "spell_backward", "max": 6}),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(STOP,)),
        max_steps=10,
        groups_per_step=2,
        rollouts_per_group=2,
    )


def runs(folder: Folder) -> Envelope:
    spec = run_spec()
    envelope = seal(spec, PayloadType.RUN_SPEC, ROOT)
    folder.file("run_spec.envelope", envelope.to_bytes())
    wire = {"input": "run_spec.envelope", "pinned": envelope.digest}
    later = seal(b'{"protocol_version":2,"what":"the future"}', PayloadType.RUN_SPEC, ROOT)
    strange = seal(spec, PayloadType.RUN_SPEC, STRANGER)
    unknown = seal(json.dumps(fields(spec) | {"x": 1}).encode(), PayloadType.RUN_SPEC, ROOT)
    partial = Schedule.model_validate({"preset": "verl_partial", "trigger_parameter_sync_step": 2})
    scheduled = spec.model_copy(update={"async_level": 1, "schedule": partial})
    timed = seal(scheduled, PayloadType.RUN_SPEC, ROOT)
    folder.cases(
        "run_spec",
        [
            wire | {"name": "pinned and signed", "expect": fields(spec)},
            {
                "name": "a schedule",
                "text": timed.to_bytes().decode(),
                "pinned": timed.digest,
                "expect": fields(scheduled),
            },
            wire | {"name": "another run", "pinned": digest_of(b"other"), "error": E.WRONG_RUN},
            *(
                {"name": name, "text": other.to_bytes().decode(), "pinned": other.digest, "error": code}
                for name, other, code in [
                    ("signed by another key", strange, E.BAD_SIGNATURE),
                    ("another protocol version", later, E.VERSION_UNSUPPORTED),
                    ("unknown field", unknown, E.UNKNOWN_FIELD),
                ]
            ),
        ],
    )
    link = JoinLink("http://203.0.113.5:8400", envelope.digest)
    folder.cases(
        "join_link",
        [{"name": "plain", "text": str(link), "expect": {"url": link.url, "run": link.run}}]
        + [
            {"name": name, "text": text, "error": "value_error"}
            for name, text in [
                ("no digest", link.url),
                ("a short digest", str(link)[:-1]),
                ("upper case", f"{link.url}/#{link.run.upper()}"),
                ("another scheme", f"ftp://host/#{link.run}"),
                ("a password", f"http://user:password@host/#{link.run}"),
            ]
        ],
    )
    return envelope


def lease_of(run: Envelope, policy_digest: str) -> Lease:
    return Lease(
        run=run.digest,
        lease_id=digest_of(b"lease"),
        worker=WORKER.key_id,
        step=2,
        policy_version=1,
        policy_digest=policy_digest,
        groups=tuple(
            GroupAssignment(
                slot=slot,
                problem=Problem(environment="spell", index=slot),
                prompt_token_ids=(104, 105),
                seeds=(slot * 10, SEED_MAX - slot),
            )
            for slot in (4, 5)
        ),
        sampling=run_spec().sampling,
        issued_at_ms=NOW_MS,
        expires_at_ms=NOW_MS + 600_000,
    )


def messages(folder: Folder, run: Envelope, lease: Lease, bundle: str) -> None:
    def stamped(request: Any) -> Stamped:
        return Stamped(run=run.digest, nonce="00112233445566778899aabbccddeeff", issued_at_ms=NOW_MS, request=request)

    join = JoinRequest(name="a laptop", software="vectors 1", engine=ENGINE, rollouts_max=8)
    work = LeaseRequest(policy_version=1, policy_digest=lease.policy_digest, rollouts_max=4, wait_s=30.0)
    receipt = Receipt(
        run=run.digest,
        worker=WORKER.key_id,
        lease_id=lease.lease_id,
        bundle=bundle,
        step=2,
        policy_version=1,
        num_rollouts=4,
        num_tokens=0,
        status=BundleStatus.REFUSED,
        reason=RejectReason.LOGPROB_MISMATCH,
        at_ms=NOW_MS,
    )
    groups = tuple(
        BatchGroup(
            slot=group.slot,
            problem=group.problem,
            prompt_token_ids=group.prompt_token_ids,
            worker=WORKER.key_id,
            policy_version=1,
            bundle=bundle,
            first=2 * i,
            rewards=(0.5, 1.0),
        )
        for i, group in enumerate(lease.groups)
    )
    second = TrainBatch(run=run.digest, step=2, groups=groups[:1], part=1, previous=digest_of(b"first batch"))
    signed: list[tuple[str, PayloadType, WireModel, SigningKey]] = [
        ("lease", PayloadType.LEASE, lease, COORDINATOR),
        ("join request", PayloadType.REQUEST, stamped(join), WORKER),
        ("lease request", PayloadType.REQUEST, stamped(work), WORKER),
        ("receipt", PayloadType.RECEIPT, receipt, COORDINATOR),
        ("batch", PayloadType.BATCH, TrainBatch(run=run.digest, step=2, groups=groups), COORDINATOR),
        ("second batch of a step", PayloadType.BATCH, second, COORDINATOR),
    ]
    cases = []
    for name, kind, message, key in signed:
        envelope = seal(message, kind, key)
        base: Case = {"model": type(message).__name__, "payload_type": kind, "trusted": [key.key_id]}
        cases.append(
            base
            | {"name": name, "text": envelope.to_bytes().decode(), "expect": fields(message), "digest": envelope.digest}
        )
        for fault, change, code in [
            ("unknown field", {"x": 1}, E.UNKNOWN_FIELD),
            ("wrong type", {"run": 5}, E.WRONG_TYPE),
        ]:
            bad = seal(json.dumps(fields(message) | change).encode(), kind, key)
            cases.append(base | {"name": f"{name}, {fault}", "text": bad.to_bytes().decode(), "error": code})
    folder.cases("message", cases)


def bundles(folder: Folder, run: Envelope, lease: Lease) -> str:
    completions = (
        Completion((97, STOP), (-0.5, -0.25), FinishReason.STOP),
        Completion((98, 99, 100, 101), (-1.0, -2.0, -0.125, -0.5), FinishReason.LENGTH),
        Completion((STOP,), (-3.0,), FinishReason.STOP),
        Completion((1, 2, 3, STOP), (-0.5, -0.5, -0.5, -0.5), FinishReason.STOP),
    )
    rollouts = rollouts_for(lease, completions)
    body, size = pack_body(rollouts)

    def header(body: bytes, size: int = size, **more: Any) -> RolloutHeader:
        told = {
            "body_digest": digest_of(body),
            "body_bytes": len(body),
            "run": run.digest,
            "worker": WORKER.key_id,
            "lease_id": lease.lease_id,
            "step": 2,
            "policy_version": 1,
            "policy_digest": lease.policy_digest,
            "num_rollouts": 4,
            "decompressed_bytes": size,
            "engine": ENGINE,
            "created_at_ms": NOW_MS,
        }
        return RolloutHeader.model_validate(told | more)

    def parcel(body: bytes = body, size: int = size, **more: Any) -> bytes:
        return pack_parcel(header(body, size, **more), body, PayloadType.ROLLOUT, WORKER)

    def frame(**changes: Any) -> tuple[bytes, int]:
        """The body with other tensors."""
        arrays = {name.rpartition("_")[0]: getattr(rollouts, name) for name in rollouts.__dataclass_fields__} | changes
        raw = pack_tensors({name: array for name, array in arrays.items() if array is not None})
        return zstandard.ZstdCompressor(level=3).compress(raw), len(raw)

    good = parcel()
    by_stranger = pack_parcel(header(body), body, PayloadType.ROLLOUT, STRANGER)
    forged = by_stranger.replace(STRANGER.key_id.encode(), WORKER.key_id.encode())
    wrapped = np.array(
        [[0, 1, 2], [2**31 - 1, 1, 1], [-(2**31), 1, 1], [-1, 1, 1], [1, 1, 4], [2, 1, 1], [3, 1, 4]], np.int32
    )
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(zstandard.ZstdDecompressor().decompress(body))
    bad: list[tuple[str, bytes, ErrorCode]] = [
        ("wrong magic", b"PRP2" + good[4:], E.MALFORMED),
        ("cut inside the header", good[:100], E.MALFORMED),
        ("header longer than allowed", b"PRP1\xff\xff\xff\xff" + good[8:], E.TOO_LARGE),
        ("changed body", flipped(good, -1), E.DIGEST_MISMATCH),
        ("longer body", good + b"\0", E.DIGEST_MISMATCH),
        ("signed by another key", forged, E.BAD_SIGNATURE),
        ("two frames", parcel(body + body), E.MALFORMED),
        ("no content size", parcel(silent), E.MALFORMED),
        ("frame larger than declared", parcel(body, size - 1), E.DECOMPRESSED_TOO_LARGE),
        ("declared over the limit", parcel(body, 2**40), E.DECOMPRESSED_TOO_LARGE),
        ("logprob above 0", parcel(*frame(logprobs=np.abs(rollouts.logprobs_T))), E.MALFORMED),
        ("logprob not finite", parcel(*frame(logprobs=rollouts.logprobs_T * np.float32(np.inf))), E.MALFORMED),
        ("lengths that do not add up", parcel(*frame(lengths=rollouts.lengths_N + 1)), E.MALFORMED),
        ("spans that wrap in 32 bits", parcel(*frame(spans=wrapped)), E.MALFORMED),
        ("a tensor too many", parcel(*frame(rewards=np.ones(4, np.float32))), E.MALFORMED),
        ("a tensor of another type", parcel(*frame(seeds=rollouts.seeds_N.astype(np.int32))), E.MALFORMED),
        ("another number of rollouts", parcel(num_rollouts=3), E.MALFORMED),
    ]
    proving, rows = proven(lease, completions)
    bad += [
        ("a proof too few", parcel(*frame(proofs=rows[:-1])), E.MALFORMED),
        ("a proof of modulus 0", parcel(*frame(proofs=np.zeros_like(rows))), E.MALFORMED),
        ("proofs of other bytes", parcel(*frame(proofs=rows[:, :-2])), E.MALFORMED),
    ]
    tensors = tensors_of(rollouts)
    base: Case = {"trusted": [WORKER.key_id]}
    cases = [
        base
        | {"name": "honest", "input": folder.file("bundle.parcel", good), "digest": digest_of(good), "expect": tensors}
    ]
    proven_parcel = parcel(*pack_body(proving))
    cases.append(
        base
        | {
            "name": "with hidden-state proofs",
            "input": folder.file("bundle_proven.parcel", proven_parcel),
            "digest": digest_of(proven_parcel),
            "expect": tensors_of(proving),
        }
    )
    for i, (name, data, code) in enumerate(bad):
        cases.append(base | {"name": name, "input": folder.file(f"bundle_bad_{i:02}.parcel", data), "error": code})
    folder.cases("bundle", cases)

    def spanning(*policies: int) -> bytes:
        """The first completion's two tokens by two policies."""
        spans = [*((0, version, 1) for version in policies), *rollouts.spans_S3[1:].tolist()]
        return parcel(*frame(spans=np.array(spans, np.int32)))

    spans: list[tuple[str, bytes, RejectReason | None]] = [
        ("spans of two policies", spanning(1, 2), None),
        ("spans that go back", spanning(2, 1), RejectReason.WRONG_POLICY),
        ("a span before the lease's policy", spanning(0, 1), RejectReason.WRONG_POLICY),
        ("a span of a policy that is not published", spanning(1, 3), RejectReason.WRONG_POLICY),
    ]
    judged: list[tuple[str, bytes, RejectReason | None]] = [
        ("spans of two policies where the run drains", spans[0][1], RejectReason.WRONG_POLICY),
        ("honest", good, None),
        ("another policy", parcel(policy_version=0), RejectReason.WRONG_POLICY),
        ("another step", parcel(step=1), RejectReason.WRONG_ASSIGNMENT),
        ("another seed", parcel(*frame(seeds=rollouts.seeds_N ^ 1)), RejectReason.WRONG_ASSIGNMENT),
        (
            "token outside the vocabulary",
            parcel(*frame(token_ids=rollouts.token_ids_T + 7)),
            RejectReason.TOKEN_OUT_OF_RANGE,
        ),
        ("no stop token", parcel(*frame(token_ids=rollouts.token_ids_T - 1)), RejectReason.BAD_TERMINATION),
    ]
    base |= {"lease": fields(lease), "vocab_size": 264}
    folder.cases(
        "assignment",
        [
            base | {"name": name, "input": folder.file(f"judged_{i}.parcel", data), "expect": reason}
            for i, (name, data, reason) in enumerate(judged)
        ]
        + [
            base | {"name": name, "newest_policy": 2, "input": folder.file(f"spans_{i}.parcel", data), "expect": reason}
            for i, (name, data, reason) in enumerate(spans)
        ],
    )
    blob = BlobHeader(body_digest=digest_of(CONFIG), body_bytes=len(CONFIG), run=run.digest, issued_at_ms=NOW_MS)
    folder.file("blob.parcel", pack_parcel(blob, CONFIG, PayloadType.BLOB, TRAINER))
    folder.cases(
        "blob", [{"name": "config.json", "input": "blob.parcel", "trusted": [TRAINER.key_id], "expect": fields(blob)}]
    )
    return digest_of(good)


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
        ways = [encode_checkpoint(weights, part_bytes=64)]
        if version:
            ways.insert(0, encode_checkpoint(weights, (base_policy, policies[0]), part_bytes=64))
        manifest = Manifest(
            run=run.digest,
            policy_version=version,
            previous=previous.digest if previous else None,
            model_config_digest=digest_of(CONFIG),
            state_root=root,
            tensors=tensor_table(weights),
            encodings=tuple(way.encoding for way in ways),
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
        told = {"digest": previous.digest, "state_root": root, "tensors": raw}
        for number, way in enumerate(ways):
            cases.append(_way(folder, version, number, way) | {"input": file, "expect": told})
        base = {name: value for name, value in cases[-len(ways)].items() if name != "expect"}
        first = fields(ways[0].encoding)
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
        for name, index, code in _bad_indices(ways[0].index):
            entry = {"digest": digest_of(index), "size": len(index)}
            changes = {"encodings": [first | {"index": entry}]}
            lied = seal(json.dumps(fields(manifest) | changes).encode(), PayloadType.MANIFEST, TRAINER)
            stem = f"policy_{version}_bad_{name.replace(' ', '_')}"
            files = {
                "input": folder.file(f"{stem}.manifest", lied.to_bytes()),
                "index": folder.file(f"{stem}.index", index),
            }
            cases.append(base | files | {"name": f"policy_{version}, {name}", "error": code})
        tampered = folder.file(f"policy_{version}_tampered.index", flipped(ways[0].index, -1))
        cases.append(
            base | {"name": f"policy_{version}, tampered index", "index": tampered, "error": E.DIGEST_MISMATCH}
        )
        forged = folder.file(
            f"policy_{version}_forged.manifest", seal(manifest, PayloadType.MANIFEST, STRANGER).to_bytes()
        )
        cases.append(base | {"name": f"policy_{version}, another signer", "input": forged, "error": E.BAD_SIGNATURE})
        broken = [folder.file(f"policy_{version}_bad.part_0", flipped(ways[0].parts[0], -1)), *base["parts"][1:]]
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


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Folder(Path(sys.argv[1]))
    keys(folder)
    json_texts(folder)
    envelopes(folder)
    noise(folder)
    choices(folder)
    proofs(folder)
    run = runs(folder)
    trust(folder, run)
    peers(folder, run)
    lease = lease_of(run, checkpoints(folder, run))
    messages(folder, run, lease, bundles(folder, run, lease))
    ledger(folder, run)
    turns(folder, lease)
    invites(folder, run)
    adapters(folder)


if __name__ == "__main__":
    main()
