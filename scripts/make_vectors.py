"""Write golden vectors: inputs as they are on the wire, and what every implementation must make of them.

    python scripts/make_vectors.py tests/vectors/v2

A folder is written once. Old vectors stay as they are and keep verifying; a change of the wire gets a new folder. All keys
and times are fixed, so two runs of one version of this script differ at most in how zstd compresses.

A folder holds one JSON list per kind, and binary inputs beside it. A case has a `name`, an `input` (a file in the folder, or
`hex`, or `text`), the kind's own parameters, and either `expect` or the `error` code. tests/protocol/test_vectors.py shows
in one short function per kind how to read them.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, pre_authentication_encoding, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.manifest import BasePolicy, CheckpointKind, Manifest, Provenance
from prime_protocol.messages import BatchGroup, BlobHeader, JoinRequest, LeaseRequest, Stamped, TrainBatch
from prime_protocol.noise import SEED_MAX, gumbel_noise
from prime_protocol.parcel import pack_parcel
from prime_protocol.rollout import Completion, EngineInfo, FinishReason, RolloutHeader, pack_body, rollouts_for
from prime_protocol.run_spec import EnvironmentSpec, JoinLink, ModelFile, RoleKeys, RunSpec
from prime_protocol.tensor_file import pack_tensors
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason
from prime_protocol.weights import Weights, WeightTensor, state_root

NOW_MS = 1_790_000_000_000
CONFIG = b'{"model_type": "qwen3", "vocab_size": 264}'
STOP = 257
ROOT, COORDINATOR, TRAINER, VALIDATOR, WORKER, STRANGER = (SigningKey(bytes([i]) * 32) for i in range(1, 7))
ENGINE = EngineInfo(name="vectors", version="1", dtype="fp32", device="cpu")
E = ErrorCode
Case = dict[str, Any]


class Folder:
    """A folder of vectors that does not exist yet."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            sys.exit(f"{path} exists. Vectors are never changed: give a new folder.")
        self.path = path

    def file(self, name: str, data: bytes) -> str:
        assert not (self.path / name).exists()
        (self.path / name).write_bytes(data)
        return name

    def cases(self, kind: str, cases: list[Case]) -> None:
        names = [case["name"] for case in cases]
        assert len(set(names)) == len(names)
        text = json.dumps(cases, indent=1, ensure_ascii=False)
        (self.path / f"{kind}.json").write_text(text + "\n", encoding="utf-8")


def fields(message: WireModel) -> Any:
    return json.loads(message.model_dump_json())


def flipped(data: bytes, place: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def keys(folder: Folder) -> None:
    p = 2**255 - 19
    weak = {
        "order 1, the identity": 1,
        "order 2": p - 1,
        "order 4": 0,
        "order 4, the other sign": 1 << 255,
        "order 8": 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
        "order 8, y negated": p - 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
        "order 1, not canonical": p + 1,
        "order 4, not canonical": p,
        "order 1, with a sign that x = 0 cannot have": 1 | 1 << 255,
        "not canonical": p + 3,
        "not on the curve": 2,
    }
    key_id = WORKER.key_id
    folder.cases(
        "seed",
        [
            {"name": name, "hex": seed.hex(), "expect": {"public": key.public.raw.hex(), "key_id": key.key_id}}
            for name, seed in [
                (
                    "libp2p peer-id specification",
                    bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"),
                ),
                ("RFC 8032 test 1", bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")),
                ("worker of these vectors", WORKER.to_bytes()),
            ]
            for key in [SigningKey(seed)]
        ],
    )
    folder.cases(
        "public_key",
        [{"name": "usable", "hex": WORKER.public.raw.hex(), "expect": key_id}]
        + [
            {"name": name, "hex": value.to_bytes(32, "little").hex(), "error": E.BAD_KEY}
            for name, value in weak.items()
        ]
        + [{"name": "31 bytes", "hex": "02" * 31, "error": E.BAD_KEY}],
    )
    folder.cases(
        "key_id",
        [{"name": "usable", "text": key_id, "expect": WORKER.public.raw.hex()}]
        + [
            {"name": name, "text": text, "error": E.BAD_KEY}
            for name, text in [
                ("empty", ""),
                ("a leading 1 too many", "1" + key_id),
                ("no leading 1", key_id[1:]),
                ("a character that base58 lacks", key_id[:-1] + "0"),
                ("a CIDv1 peer id", "bafzaajaiaejcbsgnq5i6txrmuyowa3z4o3iur3mezejulcwjhwtmxcxhihq6kcav"),
                ("an RSA peer id", "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"),
            ]
        ],
    )


def json_texts(folder: Folder) -> None:
    good = ['{"a":[1,-0.5,1e3,true,null]}', ' {"\\ud83d\\ude00":"é"} \n', "[" * 16 + "]" * 16, '["[[[[[[[[[[[[[[[[["]']
    bad = {
        "duplicate key": b'{"a":1,"a":1}',
        "duplicate key, escaped": b'{"a":1,"\\u0061":1}',
        "NaN": b"[NaN]",
        "Infinity": b"[-Infinity]",
        "overflow": b"[1e999]",
        "lone surrogate": b'["\\ud800"]',
        "surrogate in UTF-8": b'["\xed\xa0\x80"]',
        "byte order mark": b"\xef\xbb\xbf{}",
        "UTF-16": "{}".encode("utf-16"),
        "trailing bytes": b"{} {}",
        "trailing comma": b"[1,]",
        "control character in a string": b'["\n"]',
        "leading zero": b"[01]",
        "unclosed string": b'["',
        "empty": b"",
    }
    folder.cases(
        "json",
        [{"name": f"valid {i}", "hex": text.encode().hex(), "expect": json.loads(text)} for i, text in enumerate(good)]
        + [{"name": name, "hex": data.hex(), "error": E.MALFORMED} for name, data in bad.items()]
        + [{"name": "too deep", "hex": (b"[" * 17 + b"]" * 17).hex(), "error": E.TOO_LARGE}],
    )


def envelopes(folder: Folder) -> None:
    def case(name: str, envelope: str, **more: Any) -> Case:
        return {
            "name": name,
            "text": envelope,
            "payload_type": PayloadType.LEASE,
            "trusted": [ROOT.key_id],
            "threshold": 1,
        } | more

    def told(envelope: Envelope) -> Any:
        return {
            "payload": envelope.payload.hex(),
            "digest": envelope.digest,
            "signed_bytes": pre_authentication_encoding(envelope.payload_type, envelope.payload).hex(),
        }

    one = seal("é{}".encode(), PayloadType.LEASE, ROOT)
    two = seal(b"{}", PayloadType.LEASE, ROOT, WORKER)
    text = one.to_bytes().decode()
    plain: Case = json.loads(text)
    signature = base64.b64decode(plain["signatures"][0]["sig"])
    sig = [{"keyid": ROOT.key_id, "sig": base64.b64encode(flipped(signature, 40)).decode()}]
    both = [ROOT.key_id, WORKER.key_id]
    padded = seal(b"AB", PayloadType.LEASE, ROOT).to_bytes().decode().replace('"QUI="', '"QUJ="')
    folder.cases(
        "envelope",
        [
            case("one signature", text, expect=told(one)),
            case("fields in another order, with spaces", json.dumps(dict(reversed(plain.items())), indent=2), expect=told(one)),
            case("two of two", two.to_bytes().decode(), trusted=both, threshold=2, expect=told(two)),
            case("a signature by an unknown key is ignored", two.to_bytes().decode(), expect=told(two)),
            case("one key twice is one", seal(b"", PayloadType.LEASE, ROOT, ROOT).to_bytes().decode(), trusted=both, threshold=2, error=E.BAD_SIGNATURE),
            case("no trusted key", text, trusted=[WORKER.key_id], error=E.BAD_SIGNATURE),
            case("changed payload", json.dumps(plain | {"payload": "e30="}), error=E.BAD_SIGNATURE),
            case("changed signature", json.dumps(plain | {"signatures": sig}), error=E.BAD_SIGNATURE),
            case("a trusted signature that fails beside a good one", json.dumps(plain | {"signatures": plain["signatures"] + [sig[0] | {"keyid": WORKER.key_id}]}), trusted=both, error=E.BAD_SIGNATURE),
            case("another kind", text, payload_type=PayloadType.RECEIPT, error=E.WRONG_PAYLOAD_TYPE),
            case("another kind, renamed", text.replace("lease", "receipt"), payload_type=PayloadType.RECEIPT, error=E.BAD_SIGNATURE),
            case("unknown field", json.dumps(plain | {"x": 1}), error=E.UNKNOWN_FIELD),
            case("no signatures", json.dumps(plain | {"signatures": []}), error=E.WRONG_TYPE),
            case("17 signatures", json.dumps(plain | {"signatures": plain["signatures"] * 17}), error=E.TOO_LARGE),
            case("base64 with unused bits set", padded, error=E.MALFORMED),
            case("base64 without padding", json.dumps(plain | {"payload": "e30"}), error=E.MALFORMED),
            case("base64 for URLs", json.dumps(plain | {"payload": "_-8="}), error=E.MALFORMED),
        ],
    )  # fmt: skip


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
    folder.cases(
        "run_spec",
        [
            wire | {"name": "pinned and signed", "expect": fields(spec)},
            wire | {"name": "another run", "pinned": digest_of(b"other"), "error": E.WRONG_RUN},
            {"name": "signed by another key", "text": strange.to_bytes().decode(), "pinned": strange.digest, "error": E.BAD_SIGNATURE},
            {"name": "another protocol version", "text": later.to_bytes().decode(), "pinned": later.digest, "error": E.VERSION_UNSUPPORTED},
            {"name": "unknown field", "text": unknown.to_bytes().decode(), "pinned": unknown.digest, "error": E.UNKNOWN_FIELD},
        ],
    )  # fmt: skip
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
    signed: list[tuple[str, PayloadType, WireModel, SigningKey]] = [
        ("lease", PayloadType.LEASE, lease, COORDINATOR),
        ("join request", PayloadType.REQUEST, stamped(join), WORKER),
        ("lease request", PayloadType.REQUEST, stamped(work), WORKER),
        ("receipt", PayloadType.RECEIPT, receipt, COORDINATOR),
        ("batch", PayloadType.BATCH, TrainBatch(run=run.digest, step=2, groups=groups), COORDINATOR),
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
        raw = pack_tensors(arrays)
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
    tensors = {name.rpartition("_")[0]: getattr(rollouts, name).tolist() for name in rollouts.__dataclass_fields__}
    base: Case = {"trusted": [WORKER.key_id]}
    cases = [
        base
        | {"name": "honest", "input": folder.file("bundle.parcel", good), "digest": digest_of(good), "expect": tensors}
    ]
    for i, (name, data, code) in enumerate(bad):
        cases.append(base | {"name": name, "input": folder.file(f"bundle_bad_{i:02}.parcel", data), "error": code})
    folder.cases("bundle", cases)

    judged: list[tuple[str, bytes, RejectReason | None]] = [
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
    folder.cases(
        "assignment",
        [
            {"name": name, "input": folder.file(f"judged_{i}.parcel", data), "lease": fields(lease), "vocab_size": 264, "trusted": [WORKER.key_id], "expect": reason}
            for i, (name, data, reason) in enumerate(judged)
        ],
    )  # fmt: skip
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
        encoded = encode_checkpoint(weights, policies[0] if version else None, part_bytes=64)
        first_root = first_root or encoded.state_root
        manifest = Manifest(
            run=run.digest,
            policy_version=version,
            kind=CheckpointKind.DELTA if version else CheckpointKind.ANCHOR,
            base=BasePolicy(policy_version=0, state_root=first_root) if version else None,
            previous=previous.digest if previous else None,
            model_config_digest=digest_of(CONFIG),
            state_root=encoded.state_root,
            tensors=encoded.tensors,
            parts=encoded.part_entries,
            chunks=encoded.chunks,
            produced_by=Provenance(
                step=version - 1,
                optimizer_steps=version,
                batch=digest_of(b"batch") if version else None,
                software="vectors 1",
            ),
            created_at_ms=NOW_MS,
        )
        previous = seal(manifest, PayloadType.MANIFEST, TRAINER)
        base: Case = {
            "run_spec": "run_spec.envelope",
            "input": folder.file(f"policy_{version}.manifest", previous.to_bytes()),
            "parts": [folder.file(f"policy_{version}.part_{i}", part) for i, part in enumerate(encoded.parts)],
            "base": "policy_0" if version else None,
        }
        raw = {name: tensor.data.tobytes().hex() for name, tensor in weights.items()}
        told = {"digest": previous.digest, "state_root": encoded.state_root, "tensors": raw}
        cases.append(base | {"name": f"policy_{version}", "expect": told})
        for name, change, code in [
            ("another run", {"run": digest_of(b"other")}, E.WRONG_RUN),
            ("another root", {"state_root": digest_of(b"other")}, E.CHAIN_BROKEN),
            ("an uncovered element", {"chunks": [fields(encoded.chunks[0]) | {"start": 1}]}, E.CHAIN_BROKEN),
            ("no parts", {"parts": []}, E.CHAIN_BROKEN),
        ]:
            lied = seal(json.dumps(fields(manifest) | change).encode(), PayloadType.MANIFEST, TRAINER)
            file = folder.file(f"policy_{version}_bad_{name.replace(' ', '_')}.manifest", lied.to_bytes())
            cases.append(base | {"name": f"policy_{version}, {name}", "input": file, "error": code})
        forged = folder.file(
            f"policy_{version}_forged.manifest", seal(manifest, PayloadType.MANIFEST, STRANGER).to_bytes()
        )
        cases.append(base | {"name": f"policy_{version}, another signer", "input": forged, "error": E.BAD_SIGNATURE})
        broken = [folder.file(f"policy_{version}_bad.part_0", flipped(encoded.parts[0], -1)), *base["parts"][1:]]
        cases.append(base | {"name": f"policy_{version}, changed part", "parts": broken, "error": E.DIGEST_MISMATCH})
    folder.cases("checkpoint", cases)
    rows: list[Any] = [["b", "bf16", [2, 3], "00" * 32], ["a", "fp32", [], "11" * 32], ["é", "bf16", [0], "22" * 32]]
    root = state_root((name, dtype, tuple(shape), digest) for name, dtype, shape, digest in rows)
    folder.cases("state_root", [{"name": "three tensors", "rows": rows, "expect": root}])
    assert previous
    return previous.digest


def noise(folder: Folder) -> None:
    cases = []
    for seed, position in [(0, 0), (7, 0), (7, 1), (2**32, 5), (SEED_MAX, 2**20)]:
        values = gumbel_noise([seed], [position], 152_064)[0]
        cases.append(
            {
                "name": f"seed {seed}, position {position}",
                "seed": seed,
                "position": position,
                "expect": {"first_8": [float(x) for x in values[:8]], "argmax_of_264": int(values[:264].argmax()), "argmax_of_152064": int(values.argmax())},
            }
        )  # fmt: skip
    folder.cases("noise", cases)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Folder(Path(sys.argv[1]))
    keys(folder)
    json_texts(folder)
    envelopes(folder)
    noise(folder)
    run = runs(folder)
    lease = lease_of(run, checkpoints(folder, run))
    messages(folder, run, lease, bundles(folder, run, lease))


if __name__ == "__main__":
    main()
