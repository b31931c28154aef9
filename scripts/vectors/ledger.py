"""Golden vectors of the ledger. See make_vectors.py."""

from __future__ import annotations

from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.ledger import LedgerChain, LedgerHead
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason
from vectors.folder import COORDINATOR, NOW_MS, STRANGER, WORKER, Case, Folder

E = ErrorCode


def ledger(folder: Folder, run: Envelope) -> None:
    """Write a ledger of an accepted bundle, a rejected one, and the later rejection of the first."""
    accepted = _receipt(run, b"bundle 1", status=BundleStatus.ACCEPTED, num_tokens=11)
    refused = _receipt(run, b"bundle 2", status=BundleStatus.REFUSED, reason=RejectReason.SEED_MISMATCH)
    taken_back = _receipt(run, b"bundle 1", status=BundleStatus.REFUSED, reason=RejectReason.LOGPROB_MISMATCH)
    payloads = [accepted, refused, taken_back]
    chain = LedgerChain(run.digest)
    lines = [chain.add(payload) for payload in payloads]
    pending = LedgerChain(run.digest).add(_receipt(run, b"bundle 3", status=BundleStatus.PENDING))
    foreign = LedgerChain(run.digest).add(_receipt(run, b"bundle 3", status=BundleStatus.ACCEPTED, run="00" * 32))
    head = chain.head(NOW_MS)
    base: Case = {"run_spec": "run_spec.envelope"}
    good: Case = {
        "num_entries": 3,
        "digest": chain.digest,
        "receipts": [digest_of(payload) for payload in payloads],
    }
    empty = LedgerChain(run.digest).head(NOW_MS)
    bad: list[tuple[str, list[bytes], ErrorCode]] = [
        ("a line is missing", [lines[0], lines[2]], E.CHAIN_BROKEN),
        ("lines in another order", [lines[1], lines[0], lines[2]], E.CHAIN_BROKEN),
        ("a changed receipt", [lines[0].replace(b":11,", b":12,"), *lines[1:]], E.CHAIN_BROKEN),
        ("a line with spaces", [lines[0].replace(b'"index":0', b'"index": 0')], E.MALFORMED),
        ("a receipt that waits", [pending], E.WRONG_TYPE),
        ("a receipt of another run", [foreign], E.WRONG_RUN),
    ]
    folder.cases(
        "ledger",
        [
            base | _shown("three lines", lines, head, COORDINATOR) | {"expect": good},
            base
            | _shown("none yet", [], empty, COORDINATOR)
            | {"expect": {"num_entries": 0, "digest": run.digest, "receipts": []}},
            *(base | _shown(name, shown, head, COORDINATOR) | {"error": code} for name, shown, code in bad),
            base | _shown("signed by a stranger", lines, head, STRANGER) | {"error": E.BAD_SIGNATURE},
            base
            | _shown("a head of another run", lines, head.model_copy(update={"run": "00" * 32}), COORDINATOR)
            | {"error": E.WRONG_RUN},
        ],
    )


def _shown(name: str, lines: list[bytes], head: LedgerHead, key: SigningKey) -> Case:
    envelope = seal(head, PayloadType.LEDGER_HEAD, key).to_bytes().decode()
    return {"name": name, "lines": [line.decode() for line in lines], "text": envelope}


def _receipt(envelope: Envelope, name: bytes, **fields: object) -> bytes:
    defaults: dict[str, object] = {
        "run": envelope.digest,
        "worker": WORKER.key_id,
        "lease_id": digest_of(b"lease of " + name),
        "bundle": digest_of(name),
        "step": 2,
        "policy_version": 1,
        "num_rollouts": 4,
        "num_tokens": 0,
        "at_ms": NOW_MS,
    }
    return Receipt.model_validate(defaults | fields).model_dump_json().encode()
