"""Every parser of bytes that strangers send, with valid inputs to begin with and what it may answer.

The list is complete for the protocol: tests/security/test_fuzzing.py compares `covers` with the functions of prime_protocol that
take bytes, and each message of the protocol has a parser `model.<name>` of its own. A parser takes bytes, and either returns or
raises one of `refusals`. Where it has `again`, what it returned must give the same bytes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from data_registry import data_parsers
from fuzz_parser import (
    COORDINATOR,
    NOW_MS,
    ROOT,
    RUN,
    SPEC,
    TRAINER,
    VALIDATOR,
    WORKER,
    Parser,
    json_of,
)
from pydantic import BaseModel
from tests.builder import build_manifest
from valid_messages import examples, wire_models

from prime_protocol import delegation, invite, ledger, peers
from prime_protocol.amendment import CalibrationAmendment, CalibrationChain
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.chain import check_link, checked_manifest
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.dossier import BanStatement, check_dossier
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.evidence import Moments
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyChain, KeyRing
from prime_protocol.manifest import sign_manifest
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.seed_chain import OpenSecret, SeedChain, opened_secrets
from prime_protocol.timestamp import check_fresh, open_timestamp
from prime_protocol.verdict import Receipt
from prime_protocol.weights import WeightTensor


def protocol_parsers() -> list[Parser]:
    """Those of prime_protocol."""
    return [*_models(), *_statements(), *data_parsers()]


def _models() -> list[Parser]:
    def parser(name: str, model: type[BaseModel]) -> Parser:
        def parse(data: bytes) -> BaseModel:
            value = parse_json(data, model)
            written = value.model_dump_json().encode()
            once = parse_json(written, model)
            assert once == value, f"{name} reads otherwise what it wrote: {written!r}"
            assert once.model_dump_json().encode() == written, f"{name} writes otherwise what it read: {written!r}"
            return value

        return Parser(f"model.{name}", parse, examples()[name], covers=("envelope.parse_json",))

    return [parser(name, model) for name, model in wire_models().items()]


def _statements() -> list[Parser]:
    """Return parsers of signed input: the payload is mutated and signed again, so that mutation reaches the code behind the
    signature."""
    weights = {"w": WeightTensor("bf16", (64,), np.arange(64, dtype=np.uint16))}
    first = build_manifest(RUN, None, weights, encode_checkpoint(weights))
    signed = sign_manifest(first, TRAINER)
    second = build_manifest(RUN, signed, weights, encode_checkpoint(weights))
    ring = KeyRing(
        run=RUN.digest, version=1, previous=RUN.digest, keys=SPEC.keys, published=None, created_at_ms=0
    )  # the first of a run
    moments = Moments(cap=1.0, lambdas=(1.0,), log_moments=(0.1,), num_tokens=1)
    known = PairMoments(worker="a/b/c", validator="a/b/c", moments={"logprob": moments})
    amendment = CalibrationAmendment(
        run=RUN.digest,
        version=1,
        previous=RUN.digest,
        pairs=(known.model_copy(update={"worker": "d/e/f"}),),
        created_at_ms=0,
    )
    own = {
        "run": RUN.digest,
        "head": {"policy_version": 0, "manifest": signed.digest},
        "key_ring": 0,
        "issued_at_ms": NOW_MS,
        "expires_at_ms": NOW_MS + 1_000,
    }
    receipts = examples()["Receipt"]

    def manifests(payload: bytes) -> None:
        found = checked_manifest(seal(payload, PayloadType.MANIFEST, TRAINER), RUN)
        check_link(found.manifest, signed)

    def keys(payload: bytes) -> None:
        KeyChain(RUN.digest, SPEC.keys).check(seal(payload, PayloadType.KEY_RING, ROOT))

    def calibrations(payload: bytes) -> None:
        chain = CalibrationChain(RUN.keys, Calibration(pairs=(known,)))
        chain.add(seal(payload, PayloadType.CALIBRATION, ROOT))

    def stamps(payload: bytes) -> None:
        check_fresh(open_timestamp(seal(payload, PayloadType.TIMESTAMP, COORDINATOR), RUN), NOW_MS)

    def spec(payload: bytes) -> None:
        envelope = seal(payload, PayloadType.RUN_SPEC, ROOT)
        open_run_spec(envelope, pinned=envelope.digest)

    def dossiers(payload: bytes) -> None:
        found = parse_json(payload, BanStatement)
        check_dossier(found, [parse_json(one, Receipt) for one in receipts], PinnedRun(found.run, SPEC, RUN.envelope))

    def line(data: bytes) -> bytes:
        chain = ledger.LedgerChain(RUN.digest)
        chain.follow(data)
        return data

    def authorization(payload: bytes) -> None:
        ticket = seal(payload, PayloadType.PEER_TICKET, COORDINATOR).to_bytes().decode()
        header = peers.authorization(ticket, VALIDATOR.key_id, RUN.digest, WORKER, now_ms=NOW_MS)
        peers.check_authorization(header, VALIDATOR.key_id, RUN, now_ms=NOW_MS)

    def chain(payload: bytes) -> None:
        opened_secrets(SeedChain(end="0" * 64, length=4), parse_json(payload, OpenSecret))

    def signed_as(kind: PayloadType, key: SigningKey, parse: Callable[[Any], object]) -> Callable[[bytes], object]:
        return lambda payload: parse(seal(payload, kind, key))

    ticket = {"run": RUN.digest, "peer": WORKER.key_id, "expires_at_ms": NOW_MS + 1000}
    shown = peers.authorization(
        seal(json_of(ticket), PayloadType.PEER_TICKET, COORDINATOR).to_bytes().decode(),
        VALIDATOR.key_id,
        RUN.digest,
        WORKER,
        now_ms=NOW_MS,
    )
    invited = {"run": RUN.digest, "invite": "0" * 32, "keys_max": 3, "expires_at_ms": NOW_MS + 1}
    authorised = {
        "person": VALIDATOR.key_id,
        "machine": WORKER.key_id,
        "issued_at_ms": NOW_MS,
        "expires_at_ms": NOW_MS + 1_000,
    }
    answer = {"run": RUN.digest, "nonce": "0" * 32}
    head = {"run": RUN.digest, "num_entries": 1, "digest": "0" * 64, "at_ms": 0}
    listed = {"run": RUN.digest, "peers": [], "issued_at_ms": 0}
    vector_lines = [b'{"index":0,"previous":"%s","receipt":%s}' % (RUN.digest.encode(), one) for one in receipts]

    def of_our_run(name: str) -> list[bytes]:
        return examples()[name]

    return [
        Parser(
            "run_spec", spec, [SPEC.model_dump_json().encode(), *of_our_run("RunSpec")], ("run_spec.open_run_spec",)
        ),
        Parser(
            "manifest",
            manifests,
            [first.model_dump_json().encode(), second.model_dump_json().encode(), *of_our_run("Manifest")],
            ("manifest.open_manifest", "chain.checked_manifest", "chain.check_manifest", "chain.check_link"),
        ),
        Parser(
            "key_ring",
            keys,
            [ring.model_dump_json().encode(), *of_our_run("KeyRing")],
            (
                "key_ring.KeyChain.check",
                "key_ring.KeyChain.add",
                "key_ring.KeyChain.verify",
                "key_ring.KeyChain.verify_kept",
            ),
        ),
        Parser(
            "calibration",
            calibrations,
            [amendment.model_dump_json().encode(), *of_our_run("CalibrationAmendment")],
            ("amendment.CalibrationChain.check", "amendment.CalibrationChain.add"),
        ),
        Parser("timestamp", stamps, [json_of(own), *of_our_run("Timestamp")], ("timestamp.open_timestamp",)),
        Parser("dossier", dossiers, of_our_run("BanStatement"), ("dossier.check_dossier",)),
        Parser("ledger_line", line, vector_lines, ("ledger.LedgerChain.follow",), again=lambda same: bytes(same)),
        Parser(
            "ledger_head",
            signed_as(PayloadType.LEDGER_HEAD, COORDINATOR, lambda found: ledger.open_ledger_head(found, RUN)),
            [json_of(head), *of_our_run("LedgerHead")],
            ("ledger.open_ledger_head",),
        ),
        Parser(
            "invite",
            signed_as(
                PayloadType.INVITE,
                COORDINATOR,
                lambda found: invite.open_invite(found.to_base64(), RUN, now_ms=NOW_MS),
            ),
            [json_of(invited)],
            ("invite.open_invite",),
        ),
        Parser(
            "invite_text",
            lambda data: invite.open_invite(data.decode("latin-1"), RUN, now_ms=NOW_MS),
            [seal(json_of(invited), PayloadType.INVITE, COORDINATOR).to_base64().encode()],
            ("invite.open_invite",),
        ),
        Parser(
            "delegation",
            signed_as(
                PayloadType.DELEGATION,
                VALIDATOR,
                lambda found: delegation.open_delegation(found.to_base64(), WORKER.key_id, RUN.digest, now_ms=NOW_MS),
            ),
            [json_of(authorised)],
            ("delegation.open_delegation", "delegation.read_delegation"),
        ),
        Parser(
            "delegation_text",
            lambda data: delegation.read_delegation(data.decode("latin-1")),
            [seal(json_of(authorised), PayloadType.DELEGATION, VALIDATOR).to_base64().encode()],
            ("delegation.read_delegation", "envelope.open_base64"),
        ),
        Parser(
            "peer_list",
            signed_as(
                PayloadType.PEER_LIST, COORDINATOR, lambda found: peers.open_peer_list(found.to_bytes().decode(), RUN)
            ),
            [json_of(listed), *of_our_run("PeerList")],
            ("peers.open_peer_list",),
        ),
        Parser("peer_ticket", authorization, [json_of(ticket)], ("peers.check_authorization",)),
        Parser(
            "authorization",
            lambda data: peers.check_authorization(data.decode("latin-1"), VALIDATOR.key_id, RUN, now_ms=NOW_MS),
            [shown.encode()],
            ("peers.check_authorization",),
        ),
        Parser(
            "dial_back_answer",
            lambda payload: peers.check_answer(
                seal(payload, PayloadType.PEER_ANSWER, WORKER).to_bytes(), WORKER.key_id, RUN.digest, "0" * 32
            ),
            [json_of(answer)],
            ("peers.check_answer",),
        ),
        Parser("open_secret", chain, of_our_run("OpenSecret"), ("seed_chain.opened_secrets",)),
    ]
