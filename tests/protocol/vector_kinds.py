"""Meaning of the golden vectors: one function per kind, from bytes and parameters to their meaning. See test_vectors.py.

vector_numbers.py has the kinds whose meaning is computed numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.protocol.vector_files_world import BOUNDS, CASES, Case, data_of, fields, run_of
from tests.protocol.vector_numbers import KINDS_OF_NUMBERS

from prime_protocol import replies, requests, verdict
from prime_protocol.adapters import AdapterSpec, merged
from prime_protocol.assigned import SeedRule
from prime_protocol.assignment import Lease
from prime_protocol.body_claim import open_claim, read_claim
from prime_protocol.calibration import require_possible
from prime_protocol.chain import check_manifest
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import open_index
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
from prime_protocol.identity import PublicKey, SigningKey
from prime_protocol.invite import open_invite
from prime_protocol.ledger import LedgerChain, open_ledger_head
from prime_protocol.manifest import CheckpointKind, Encoding, PartEntry, TensorEntry, open_manifest
from prime_protocol.parcel import open_logprobs, open_parcel
from prime_protocol.peers import check_authorization, open_peer_list
from prime_protocol.pieces import cut_pieces
from prime_protocol.requests import BlobHeader
from prime_protocol.reward_ranks import MOMENTS, REWARD_RANKS
from prime_protocol.rollout import (
    BODY_LAYOUT,
    BODY_OPTIONAL,
    RolloutHeader,
    Rollouts,
    check_turn_rows,
    decompress_body,
    parse_body,
)
from prime_protocol.run_spec import JoinLink, open_run_spec
from prime_protocol.seed_chain import OpenSecret, SeedChain, chain_from, committed
from prime_protocol.seed_chain import opened_secrets as chain_opened
from prime_protocol.tensor_file import unpack_tensors
from prime_protocol.timestamp import check_fresh, open_timestamp
from prime_protocol.training_state import open_training_state
from prime_protocol.turns import episodes_behind, turn_seed
from prime_protocol.verify import check_assignment
from prime_protocol.weights import Weights, WeightTensor, state_root


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


def key_ring(case: Case, folder: Path) -> Any:
    keys = run_of(case, folder).keys
    return {"fields": fields(keys.rings[-1][0]), "digest": keys.digest}


def calibration(case: Case, folder: Path) -> Any:
    calibrations = run_of(case, folder).calibrations
    added = [calibrations.add(open_envelope(text.encode())) for text in case["amendments"]]
    return {"fields": fields(added[-1]), "digest": calibrations.digest}


def timestamp(case: Case, folder: Path) -> Any:
    stamp = open_timestamp(open_envelope(data_of(case, folder)), run_of(case, folder))
    check_fresh(stamp, case["now_ms"])
    return fields(stamp)


def invite(case: Case, folder: Path) -> Any:
    return fields(open_invite(case["text"], run_of(case, folder), now_ms=case["now_ms"]))


def delegation(case: Case, folder: Path) -> Any:
    return fields(open_delegation(case["text"], case["machine"], case["run"], now_ms=case["now_ms"]))


def ledger(case: Case, folder: Path) -> Any:
    run = run_of(case, folder)
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
    run = run_of(case, folder)
    header, values = open_logprobs(data_of(case, folder), run=run.digest, keys=run.keys, bytes_max=2**20)
    return {**fields(header), "logprobs": values.tolist()}


def weights_of(case: Case, folder: Path) -> tuple[Envelope, Weights]:
    run = run_of(case, folder)
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


def authorization(case: Case, folder: Path) -> Any:
    return check_authorization(case["header"], case["me"], run_of(case, folder), now_ms=case["now_ms"])


def peer_list(case: Case, folder: Path) -> Any:
    return fields(open_peer_list(case["list"], run_of(case, folder)))


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
    run = run_of(case, folder)
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
    "peer_list": peer_list,
    "pieces": pieces,
    "public_key": public_key,
    "run_spec": run_spec,
    "assigned": assigned,
    "calibration": calibration,
    "compared": compared,
    "seed_chain": seed_chain,
    "seed": seed,
    "state_root": root_of_rows,
    "timestamp": timestamp,
    "training_state": training_state,
    "turn_seed": lambda case, folder: turn_seed(case["seed"], case["turn"]),
    "turns": turns,
    **KINDS_OF_NUMBERS,
}
