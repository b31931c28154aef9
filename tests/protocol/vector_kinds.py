"""Meaning of the golden vectors: one function per kind, from bytes and parameters to their meaning. See test_vectors.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_protocol import replies, requests, verdict
from prime_protocol.adapters import AdapterSpec, merged
from prime_protocol.assigned import SeedRule
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.body_claim import open_claim, read_claim
from prime_protocol.calibration import require_possible
from prime_protocol.chain import check_manifest
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import open_index
from prime_protocol.close_flips import close_flip_sums, contexts_of
from prime_protocol.compared_choices import cooler_of, looser_of
from prime_protocol.delegation import open_delegation
from prime_protocol.digest import digest_of
from prime_protocol.dossier import BanStatement
from prime_protocol.envelope import (
    Envelope,
    PayloadType,
    load_json,
    open_envelope,
    parse_json,
    pre_authentication_encoding,
)
from prime_protocol.evidence import BundleEvidence
from prime_protocol.excess_flips import apart, flip_sums
from prime_protocol.identity import PublicKey, SigningKey
from prime_protocol.invite import open_invite
from prime_protocol.judged_logprobs import open_logprobs
from prime_protocol.ledger import LedgerChain, open_ledger_head
from prime_protocol.limits import Limits
from prime_protocol.manifest import CheckpointKind, Encoding, PartEntry, TensorEntry, open_manifest
from prime_protocol.noise import gumbel_noise
from prime_protocol.nucleus import choice_of, margins_of, slack_of
from prime_protocol.parcel import open_parcel
from prime_protocol.peers import check_authorization, open_peer_list
from prime_protocol.pieces import cut_pieces
from prime_protocol.proof import build_proofs
from prime_protocol.requests import BlobHeader
from prime_protocol.reward_ranks import MOMENTS, REWARD_RANKS, rank_sums
from prime_protocol.rollout import (
    BODY_LAYOUT,
    BODY_OPTIONAL,
    RolloutHeader,
    Rollouts,
    check_turn_rows,
    decompress_body,
    parse_body,
)
from prime_protocol.run_spec import JoinLink, PinnedRun, open_run_spec
from prime_protocol.seed_chain import OpenSecret, SeedChain, chain_from, committed
from prime_protocol.seed_chain import opened_secrets as chain_opened
from prime_protocol.shading import SHADING, SHADING_BY_REWARD, by_reward_sums, reward_classes, rises, shading_sums
from prime_protocol.tensor_file import unpack_tensors
from prime_protocol.timestamp import check_fresh, open_timestamp
from prime_protocol.training_state import open_training_state
from prime_protocol.turns import episodes_behind, turn_seed
from prime_protocol.verify import check_assignment
from prime_protocol.weights import Weights, WeightTensor, state_root

Case = dict[str, Any]
ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "vectors"
LISTS = sorted(VECTORS.glob("v*/*.json"))
CASES = [(path, case) for path in LISTS for case in json.loads(path.read_text(encoding="utf-8"))]
BOUNDS = Limits()


def data_of(case: Case, folder: Path) -> bytes:
    if "input" in case:
        return (folder / case["input"]).read_bytes()
    return bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode()


def fields(message: Any) -> Any:
    return json.loads(message.model_dump_json())


def seed(case: Case, folder: Path) -> Any:
    key = SigningKey(data_of(case, folder))
    return {"public": key.public.raw.hex(), "key_id": key.key_id}


def public_key(case: Case, folder: Path) -> Any:
    return PublicKey(data_of(case, folder)).key_id


def key_id(case: Case, folder: Path) -> Any:
    return PublicKey.from_key_id(case["text"]).raw.hex()


def json_text(case: Case, folder: Path) -> Any:
    return load_json(data_of(case, folder))


def envelope(case: Case, folder: Path) -> Any:
    opened = open_envelope(data_of(case, folder))
    payload = opened.verify(PayloadType(case["payload_type"]), trusted=case["trusted"], threshold=case["threshold"])
    signed = pre_authentication_encoding(opened.payload_type, payload)
    return {"payload": payload.hex(), "digest": opened.digest, "signed_bytes": signed.hex()}


def run_spec(case: Case, folder: Path) -> Any:
    return fields(open_run_spec(open_envelope(data_of(case, folder)), pinned=case["pinned"]).spec)


def _run_of(case: Case, folder: Path) -> PinnedRun:
    spec = open_envelope((folder / case["run_spec"]).read_bytes())
    run = open_run_spec(spec, pinned=spec.digest)
    for name in case.get("rings", ()):
        run.keys.add(open_envelope((folder / name).read_bytes()))
    return run


def key_ring(case: Case, folder: Path) -> Any:
    keys = _run_of(case, folder).keys
    return {"fields": fields(keys.rings[-1][0]), "digest": keys.digest}


def calibration(case: Case, folder: Path) -> Any:
    calibrations = _run_of(case, folder).calibrations
    added = [calibrations.add(open_envelope(text.encode())) for text in case["amendments"]]
    return {"fields": fields(added[-1]), "digest": calibrations.digest}


def timestamp(case: Case, folder: Path) -> Any:
    stamp = open_timestamp(open_envelope(data_of(case, folder)), _run_of(case, folder))
    check_fresh(stamp, case["now_ms"])
    return fields(stamp)


def invite(case: Case, folder: Path) -> Any:
    return fields(open_invite(case["text"], _run_of(case, folder), now_ms=case["now_ms"]))


def delegation(case: Case, folder: Path) -> Any:
    return fields(open_delegation(case["text"], case["machine"], case["run"], now_ms=case["now_ms"]))


def ledger(case: Case, folder: Path) -> Any:
    run = _run_of(case, folder)
    open_ledger_head(open_envelope(data_of(case, folder)), run)
    chain = LedgerChain(run.digest)
    receipts = [chain.follow(line.encode())[1] for line in case["lines"]]
    return {"num_entries": chain.num_entries, "digest": chain.digest, "receipts": receipts}


def seed_chain(case: Case, folder: Path) -> Any:
    chain, opened = SeedChain.model_validate(case["chain"]), OpenSecret.model_validate(case["told"])
    if "last" in case:
        assert committed(chain_from(bytes.fromhex(case["last"]), chain.length)) == chain
    return [secret.hex() for secret in chain_opened(chain, opened)]


def assigned(case: Case, folder: Path) -> Any:
    envelope, secret = open_envelope(case["run_spec"].encode()), bytes.fromhex(case["secret"])
    run = open_run_spec(envelope, pinned=envelope.digest)
    receipt = parse_json(json.dumps(case["receipt"]).encode(), verdict.Receipt)
    rule, shown = SeedRule(run.digest, run.spec), receipt.assigned
    assert shown is not None
    claims = {"policy_version": receipt.policy_version, "step": receipt.step, "num_rollouts": receipt.num_rollouts}
    rule.check_slots(shown, **claims)
    rule.check_seeds(shown, secret, policy_version=receipt.policy_version)
    if "prompts" in case:
        rule.check_prompts(shown, case["prompts"])
    problems = [(slot, rule.problem(secret, slot, draw)) for slot, draw in shown.places()]
    return [
        [slot, one.environment, one.index, list(rule.seeds(secret, receipt.policy_version, one, slot))]
        for slot, one in problems
    ]


def compared(case: Case, folder: Path) -> Any:
    evidence = parse_json(json.dumps(case["evidence"]).encode(), BundleEvidence)
    require_possible(evidence, dict.fromkeys(REWARD_RANKS, MOMENTS))
    return len(evidence.compared)


def join_link(case: Case, folder: Path) -> Any:
    link = JoinLink.parse(case["text"])
    return {"url": link.url, "run": link.run} | ({"invite": link.invite} if link.invite else {})


def message(case: Case, folder: Path) -> Any:
    others = {"BanStatement": BanStatement, "Lease": Lease, "Receipt": verdict.Receipt, "RolloutHeader": RolloutHeader}
    model = others.get(case["model"]) or getattr(requests, case["model"], None) or getattr(replies, case["model"])
    opened = open_envelope(data_of(case, folder))
    parsed = parse_json(opened.verify(PayloadType(case["payload_type"]), trusted=case["trusted"]), model)
    assert opened.digest == case["digest"]
    return fields(parsed)


def opened_bundle(case: Case, folder: Path) -> tuple[RolloutHeader, Rollouts]:
    parcel = open_parcel(data_of(case, folder), body_bytes_max=BOUNDS.rollout_bytes_max)
    header = parse_json(parcel.envelope.verify(PayloadType.ROLLOUT, trusted=case["trusted"]), RolloutHeader)
    return header, parse_body(header, parcel.check_body(header), BOUNDS)


def bundle(case: Case, folder: Path) -> Any:
    _, rollouts = opened_bundle(case, folder)
    assert digest_of(data_of(case, folder)) == case["digest"]
    arrays = {name.rpartition("_")[0]: getattr(rollouts, name) for name in Rollouts.__dataclass_fields__}
    proofs = arrays.pop("proofs")
    return {name: array.tolist() for name, array in arrays.items() if array is not None} | (
        {} if proofs is None else {"proofs": proofs.tobytes().hex()}
    )


def choice(case: Case, folder: Path) -> Any:
    logits = np.array(case["logits"])
    sampling = Sampling(completion_tokens_max=1, stop_token_ids=(), **case["filters"])
    noise = gumbel_noise(case["seeds"], case["positions"], logits.shape[1])
    every = np.arange(logits.shape[1])
    return {
        "slack": [[None if np.isinf(x) else float(x) for x in row] for row in slack_of(logits, sampling)],
        "tokens": choice_of(logits, noise, sampling).tolist(),
        "margins_of_first": margins_of(logits[[0] * len(every)], noise[[0] * len(every)], every, sampling).tolist(),
    }


def compared_choices(case: Case, folder: Path) -> Any:
    scaled = np.array(case["logits"]) / case["temperature"]
    noise = gumbel_noise(case["seeds"], case["positions"], scaled.shape[1])
    tokens = np.array(case["tokens"])
    return {"cooler": cooler_of(scaled, noise, tokens).tolist(), "looser": looser_of(scaled + noise, tokens).tolist()}


def proof(case: Case, folder: Path) -> Any:
    places = np.arange(sum(case["lengths"]) * case["width"])
    if "pattern" in case:
        values = (places * 40_503 % 30_000 + 1_000) | ((places % 3 == 0) << 15)
    else:
        values = np.frombuffer(bytes.fromhex(case["hidden"]), ">u2")
    rows = values.astype(np.uint16).reshape(-1, case["width"])
    return [found.tobytes().hex() for found in build_proofs(rows, case["lengths"])]


def assignment(case: Case, folder: Path) -> Any:
    lease = parse_json(json.dumps(case["lease"]).encode(), Lease)
    newest = case.get("newest_policy")
    judged = check_assignment(*opened_bundle(case, folder), lease, vocab_size=case["vocab_size"], newest_policy=newest)
    return judged.reason


def blob(case: Case, folder: Path) -> Any:
    parcel = open_parcel(data_of(case, folder), body_bytes_max=BOUNDS.blob_bytes_max)
    header = parse_json(parcel.envelope.verify(PayloadType.BLOB, trusted=case["trusted"]), BlobHeader)
    parcel.check_body(header)
    return fields(header)


def logprobs(case: Case, folder: Path) -> Any:
    run = _run_of(case, folder)
    header, values = open_logprobs(data_of(case, folder), run=run.digest, keys=run.keys, bytes_max=2**20)
    return {**fields(header), "logprobs": values.tolist()}


def shading(case: Case, folder: Path) -> Any:
    rises_T = rises(np.array(case["claimed"]), np.array(case["recomputed"]))
    by_reward = by_reward_sums(rises_T, np.array(case["owners"]), reward_classes(case["rewards"]))
    found = {SHADING: shading_sums(rises_T), SHADING_BY_REWARD: by_reward}
    return {name: [pytest.approx(log_e, abs=2e-6) for log_e in sums.log_e] for name, sums in found.items()}


def weights_of(case: Case, folder: Path) -> tuple[Envelope, Weights]:
    run = _run_of(case, folder)
    opened = open_envelope(data_of(case, folder))
    manifest = open_manifest(opened, run).manifest
    check_manifest(manifest, run)
    below = next((below for path, below in CASES if path.parent == folder and below["name"] == case["base"]), None)
    encoding = manifest.encodings[case["encoding"]]
    index = open_index((folder / case["index"]).read_bytes(), encoding, manifest.tensors)
    decoder = CheckpointDecoder(manifest, encoding, index, weights_of(below, folder)[1] if below else None)
    for number, part in enumerate(case["parts"]):
        decoder.feed_part(number, (folder / part).read_bytes())
    return opened, decoder.finish()


def checkpoint(case: Case, folder: Path) -> Any:
    opened, weights = weights_of(case, folder)
    root = state_root((name, tensor.dtype, tensor.shape, tensor.digest) for name, tensor in weights.items())
    raw = {name: tensor.data.tobytes().hex() for name, tensor in weights.items()}
    return {"digest": opened.digest, "state_root": root, "tensors": raw}


def root_of_rows(case: Case, folder: Path) -> Any:
    return state_root((name, dtype, tuple(shape), digest) for name, dtype, shape, digest in case["rows"])


def noise(case: Case, folder: Path) -> Any:
    values = gumbel_noise([case["seed"]], [case["position"]], 152_064)[0]
    first = [float(x) for x in values[:8]]
    return {
        "first_8": pytest.approx(first, abs=2e-6),
        "argmax_of_264": int(values[:264].argmax()),
        "argmax_of_152064": int(values.argmax()),
    }


def authorization(case: Case, folder: Path) -> Any:
    return check_authorization(case["header"], case["me"], _run_of(case, folder), now_ms=case["now_ms"])


def peer_list(case: Case, folder: Path) -> Any:
    return fields(open_peer_list(case["list"], _run_of(case, folder)))


def pieces(case: Case, folder: Path) -> Any:
    packed = data_of(case, folder)
    encoding = Encoding(
        kind=CheckpointKind.ANCHOR,
        base=None,
        index=PartEntry(digest=digest_of(packed), size=len(packed)),
        parts=tuple(PartEntry(digest=digest_of(b"part"), size=size) for size in case["parts"]),
    )
    count = int.from_bytes(packed[4:8], "little")
    tensor = TensorEntry(name="w", dtype="bf16", shape=(count,), digest=digest_of(b"w"))
    cut = cut_pieces(encoding, open_index(packed, encoding, [tensor]))
    return [[piece.part, piece.start, piece.end, piece.first_chunk, piece.last_chunk] for piece in cut]


def turns(case: Case, folder: Path) -> Any:
    tensors = unpack_tensors(
        decompress_body(bytes.fromhex(case["hex"]), size=case["size"]), BODY_LAYOUT, optional=BODY_OPTIONAL
    )
    rollouts = Rollouts(*(tensors.get(name) for name in BODY_LAYOUT))  # type: ignore[arg-type]
    check_turn_rows(rollouts, case["num_rollouts"])
    episodes = episodes_behind(rollouts, [tuple(prompt) for prompt in case["prompts"]])
    return [[[list(t.prompt_token_ids), list(t.completion.token_ids)] for t in episode] for episode in episodes]


def adapters(case: Case, folder: Path) -> Any:
    base, factors = ({row["name"]: _tensor(row) for row in case[of]} for of in ("base", "adapters"))
    whole = merged(base, factors, AdapterSpec.model_validate_json(json.dumps(case["spec"])))
    return [
        {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "hex": tensor.data.tobytes().hex()}
        for name, tensor in whole.items()
    ]


def body_claim(case: Case, folder: Path) -> Any:
    envelope, body = open_claim(case["text"]), bytes.fromhex(case["body"])
    claim = read_claim(envelope, envelope.sole_signer(), action=case["action"], body_bytes=len(body))
    assert claim.body_digest == digest_of(body)
    return {"signer": envelope.sole_signer(), "claim": fields(claim)}


def _tensor(row: Case) -> WeightTensor:
    data = np.frombuffer(bytes.fromhex(row["hex"]), "<u4" if row["dtype"] == "fp32" else "<u2")
    return WeightTensor(row["dtype"], tuple(row["shape"]), data)


def commitments(case: Case, folder: Path) -> Any:
    run = _run_of(case, folder)
    manifest = open_manifest(open_envelope(data_of(case, folder)), run).manifest
    check_manifest(manifest, run)
    return fields(manifest.produced_by)


def training_state(case: Case, folder: Path) -> Any:
    where = {"digest": case["digest"], "run": case["run"], "policy_version": case["policy_version"]}
    return fields(open_training_state(data_of(case, folder), **where))


KINDS: dict[str, Callable[[Case, Path], Any]] = {
    "adapters": adapters,
    "assignment": assignment,
    "authorization": authorization,
    "blob": blob,
    "body_claim": body_claim,
    "bundle": bundle,
    "proof": proof,
    "choice": choice,
    "commitments": commitments,
    "checkpoint": checkpoint,
    "envelope": envelope,
    "heartbeat_reply": lambda case, folder: fields(parse_json(data_of(case, folder), replies.HeartbeatReply)),
    "invite": invite,
    "delegation": delegation,
    "standing": lambda case, folder: fields(parse_json(data_of(case, folder), replies.Standing)),
    "join_link": join_link,
    "json": json_text,
    "key_id": key_id,
    "key_ring": key_ring,
    "ledger": ledger,
    "logprobs": logprobs,
    "message": message,
    "noise": noise,
    "peer_list": peer_list,
    "pieces": pieces,
    "public_key": public_key,
    "run_spec": run_spec,
    "assigned": assigned,
    "calibration": calibration,
    "compared": compared,
    "compared_choices": compared_choices,
    "seed_chain": seed_chain,
    "seed": seed,
    "shading": shading,
    "state_root": root_of_rows,
    "excess_flips": lambda case, folder: [
        pytest.approx(log_e, abs=2e-6)
        for log_e in flip_sums(
            np.array(case["flips"]), apart(np.array(case["claimed"]), np.array(case["recomputed"]))
        ).log_e
    ],
    "close_flips": lambda case, folder: [
        pytest.approx(log_e, abs=2e-6)
        for log_e in close_flip_sums(
            np.array(case["margins"]),
            apart(np.array(case["claimed"]), np.array(case["recomputed"])),
            contexts_of([(tuple(prompt), tuple(tokens)) for prompt, tokens in case["completions"]]),
        ).log_e
    ],
    "reward_ranks": lambda case, folder: {
        name: [pytest.approx(log_e, abs=2e-6) for log_e in sums.log_e]
        for name, sums in rank_sums(case["groups"]).items()
    },
    "timestamp": timestamp,
    "training_state": training_state,
    "turn_seed": lambda case, folder: turn_seed(case["seed"], case["turn"]),
    "turns": turns,
}
