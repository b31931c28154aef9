"""Golden vectors of bundles, of their fit to a lease, and of blobs. See make_vectors.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType
from prime_protocol.errors import ErrorCode
from prime_protocol.parcel import pack_parcel
from prime_protocol.requests import BlobHeader
from prime_protocol.rollout import Completion, FinishReason, RolloutHeader, pack_body, rollouts_for
from prime_protocol.tensor_file import pack_tensors
from prime_protocol.verdict import RejectReason
from vectors.folder import NOW_MS, STRANGER, TRAINER, WORKER, Case, Folder, fields, flipped
from vectors.proofs import proven, tensors_of
from vectors.runs import CONFIG, ENGINE, STOP, E


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
        defaults = {
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
        return RolloutHeader.model_validate(defaults | more)

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
