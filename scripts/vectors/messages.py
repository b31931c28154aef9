"""Golden vectors of signed messages. See make_vectors.py."""

from __future__ import annotations

import json
from typing import Any

from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.dossier import BanStatement
from prime_protocol.envelope import Envelope, PayloadType, WireModel, seal
from prime_protocol.evidence import BundleEvidence, Sums, Weighed
from prime_protocol.identity import SigningKey
from prime_protocol.replies import BatchGroup, TrainBatch
from prime_protocol.requests import BatchRequest, CheckResultRequest, JoinRequest, LeaseRequest, Stamped
from prime_protocol.rollout import RolloutHeader
from prime_protocol.telemetry import Speed
from prime_protocol.verdict import BanKind, BundleStatus, Receipt, RejectReason, Verdict
from vectors.folder import COORDINATOR, NOW_MS, TRAINER, VALIDATOR, WORKER, Case, Folder, fields
from vectors.requests import requests
from vectors.runs import ENGINE, E


def messages(folder: Folder, run: Envelope, lease: Lease, bundle: str) -> None:
    def stamped(request: Any, *, epoch: str = "") -> Stamped:
        nonce = "00112233445566778899aabbccddeeff"
        return Stamped(run=run.digest, nonce=nonce, issued_at_ms=NOW_MS, epoch=epoch, request=request)

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
    sums = {"margin": Sums(num_tokens=64, log_e=(-0.25, 3.5)), "logprob": Sums(num_tokens=64, log_e=(-0.125, 0.0))}
    found = BundleEvidence(worker="vectors/fp32/cpu", validator="transformers/fp32/cpu", sums=sums)
    weighed = Weighed(worker=found.worker, validator=found.validator, sums=sums, number=3, log_evidence=2.75)
    verdict = CheckResultRequest(
        bundle=bundle,
        verdict=Verdict.accept(),
        rewards=(0.0, 1.0, 0.5, 1.0),
        num_tokens=64,
        evidence=found,
        fingerprints=((4, "00112233445566778899aabb"), (5, "ffeeddccbbaa998877665544")),
    )
    amended = verdict.model_copy(update={"evidence": found.model_copy(update={"calibration": 2})})
    weighed_later = weighed.model_copy(update={"calibration": 2})
    speed = Speed(rollout_ms=120, tokens_per_s=2_100, download_bytes_per_s=12_000_000)
    banned = BanStatement(
        run=run.digest,
        worker=WORKER.key_id,
        kind=BanKind.STATISTICAL,
        reason="3 bundles together are evidence of 11.6 nats",
        bundle=bundle,
        step=2,
        at_ms=NOW_MS,
        num_receipts=3,
    )
    copied = banned.model_copy(
        update={"kind": BanKind.HARD, "reason": "copied", "original": digest_of(b"the earlier parcel")}
    )
    naming = RolloutHeader(
        body_digest=digest_of(b"a body"),
        body_bytes=6,
        run=run.digest,
        worker=WORKER.key_id,
        lease_id=lease.lease_id,
        lease_digest=digest_of(seal(lease, PayloadType.LEASE, COORDINATOR).payload),
        step=2,
        policy_version=1,
        policy_digest=lease.policy_digest,
        num_rollouts=4,
        decompressed_bytes=100,
        engine=ENGINE,
        created_at_ms=NOW_MS,
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
    judged = groups[0].model_copy(update={"logprobs": digest_of(b"a validator's logprobs")})
    second = TrainBatch(run=run.digest, step=2, groups=groups[:1], part=1, previous=digest_of(b"first batch"))
    signed: list[tuple[str, PayloadType, WireModel, SigningKey]] = [
        ("lease", PayloadType.LEASE, lease, COORDINATOR),
        ("join request", PayloadType.REQUEST, stamped(join), WORKER),
        ("lease request", PayloadType.REQUEST, stamped(work), WORKER),
        ("request of an epoch", PayloadType.REQUEST, stamped(join, epoch="0123456789abcdef" * 2), WORKER),
        ("receipt", PayloadType.RECEIPT, receipt, COORDINATOR),
        ("batch", PayloadType.BATCH, TrainBatch(run=run.digest, step=2, groups=groups), COORDINATOR),
        ("second batch of a step", PayloadType.BATCH, second, COORDINATOR),
        ("audited batch", PayloadType.BATCH, TrainBatch(run=run.digest, step=2, groups=(judged,)), COORDINATOR),
        ("weighed receipt", PayloadType.RECEIPT, receipt.model_copy(update={"evidence": weighed}), COORDINATOR),
        ("amended receipt", PayloadType.RECEIPT, receipt.model_copy(update={"evidence": weighed_later}), COORDINATOR),
        ("check result", PayloadType.REQUEST, stamped(verdict), VALIDATOR),
        ("amended check result", PayloadType.REQUEST, stamped(amended), VALIDATOR),
        (
            "check result with logprobs",
            PayloadType.REQUEST,
            stamped(verdict.model_copy(update={"logprobs": digest_of(b"a validator's logprobs")})),
            VALIDATOR,
        ),
        ("claimed speed", PayloadType.REQUEST, stamped(work.model_copy(update={"speed": speed})), WORKER),
        ("batch request", PayloadType.REQUEST, stamped(BatchRequest(step=2, durable_step=1, train_ms=1_500)), TRAINER),
        ("ban", PayloadType.BAN, banned, COORDINATOR),
        ("ban for a copy", PayloadType.BAN, copied, COORDINATOR),
        ("header of a bundle that names its lease", PayloadType.ROLLOUT, naming, WORKER),
        *((name, PayloadType.REQUEST, stamped(request), key) for name, request, key in requests()),
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
