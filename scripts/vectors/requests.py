"""One request of each kind, with a different value in every field. See make_vectors.py."""

from __future__ import annotations

from collections.abc import Iterator

from prime_protocol.digest import digest_of
from prime_protocol.identity import SigningKey
from prime_protocol.requests import (
    AdminRequest,
    BatchRequest,
    BundleRequest,
    CheckRequest,
    CheckResultRequest,
    HeartbeatRequest,
    HoldingRequest,
    JoiningAsked,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    PeersRequest,
    ReceiptsRequest,
    Request,
    ReturnLeaseRequest,
    RevokeRequest,
    UploadUrlRequest,
    WorkerState,
)
from prime_protocol.telemetry import DownloadReport, Hardware, HeldOutFigures, Interval
from prime_protocol.verdict import RejectReason, Verdict
from vectors.folder import COORDINATOR, STRANGER, TRAINER, VALIDATOR, WORKER
from vectors.runs import ENGINE

SESSION = "fedcba9876543210" * 2
POLICY, LEASE, BUNDLE = (digest_of(text) for text in (b"policy 7", b"a lease", b"a bundle"))


def requests() -> Iterator[tuple[str, Request, SigningKey]]:
    """Yield name, request and signer."""
    yield (
        "join request with everything",
        JoinRequest(
            name="a workstation",
            software="vectors 1",
            engine=ENGINE.model_copy(update={"seeded": False}),
            rollouts_max=64,
            invite="an invitation's text",
            hardware=Hardware(device="cpu", cores=16, memory_bytes=2**35),
            session=SESSION,
        ),
        WORKER,
    )
    yield (
        "join request of a person's machine",
        JoinRequest(
            name="a workstation", software="vectors 1", engine=ENGINE, rollouts_max=64, delegation="a delegation's text"
        ),
        WORKER,
    )
    yield "revoke request of a person", RevokeRequest(machine=WORKER.key_id), STRANGER
    yield (
        "heartbeat",
        HeartbeatRequest(
            state=WorkerState.GENERATING,
            policy_version=7,
            bundles_spooled=2,
            usable_after_ms=5_200,
            swap_ms=310,
            session=SESSION,
        ),
        WORKER,
    )
    yield (
        "heartbeat that names its leases",
        HeartbeatRequest(
            state=WorkerState.GENERATING,
            policy_version=7,
            bundles_spooled=0,
            session=SESSION,
            holding=(LEASE, "9" * 64),
        ),
        WORKER,
    )
    yield (
        "heartbeat with downloads",
        HeartbeatRequest(
            state=WorkerState.FETCHING,
            policy_version=7,
            bundles_spooled=0,
            downloads=DownloadReport(
                peer_bytes=90_000_000, operator_bytes=4_000_000, links=6, done_bytes=1_200_000, all_bytes=4_100_000
            ),
        ),
        WORKER,
    )
    yield (
        "lease request with what is held",
        LeaseRequest(
            policy_version=7, policy_digest=POLICY, rollouts_max=16, holding=(LEASE,), wait_s=20.0, session=SESSION
        ),
        WORKER,
    )
    yield "lease handed back", ReturnLeaseRequest(lease_id=LEASE), WORKER
    yield (
        "lease handed back, its environment failed",
        ReturnLeaseRequest(lease_id=LEASE, failed=True, session=SESSION),
        WORKER,
    )
    upload = UploadUrlRequest(lease_id=LEASE, body_bytes=5_000_000, body_sha256="5a" * 32)
    yield "request for the URL of an upload", upload, WORKER
    yield "leave", LeaveRequest(session=SESSION), WORKER
    yield "receipts", ReceiptsRequest(after=41), WORKER
    yield "peers", PeersRequest(port=8_470, addresses=("/ip4/192.0.2.7/tcp/8470",), peers_max=12), WORKER
    yield "check request", CheckRequest(policy_versions=(6, 7), wait_s=15.0), VALIDATOR
    yield "check request that asks for its time", CheckRequest(policy_versions=(), asks_left=True), VALIDATOR
    yield "check request of a process", CheckRequest(policy_versions=(), session="5" * 32), VALIDATOR
    yield (
        "check request that promises to name bundles",
        CheckRequest(policy_versions=(), session="5" * 32, names_bundles=True),
        VALIDATOR,
    )
    yield "holding request", HoldingRequest(session="5" * 32, bundles=(BUNDLE, "9" * 64)), VALIDATOR
    yield "holding request of nothing", HoldingRequest(session="", bundles=()), VALIDATOR
    yield "bundle request", BundleRequest(bundle=BUNDLE), VALIDATOR
    yield (
        "check result of spans",
        CheckResultRequest(
            bundle=BUNDLE,
            verdict=Verdict.accept(),
            rewards=(0.0, 1.0),
            num_tokens=48,
            measured={"logprob_mean_abs": 0.0009765625},
            versions=((6, 7),),
            unscored=(1,),
        ),
        VALIDATOR,
    )
    refusal = Verdict.refuse(RejectReason.LOGPROB_MISMATCH, "0.5 nats away")
    yield "refusal", CheckResultRequest(bundle=BUNDLE, verdict=refusal, rewards=()), VALIDATOR
    yield "second batch request", BatchRequest(step=7, durable_step=5, wait_s=10.0, part=1), TRAINER
    greedy, sampled = Interval(mean=0.5, low=0.4375, high=0.5625), Interval(mean=0.25, low=0.125, high=0.375)
    yield (
        "batch request with held-out figures",
        BatchRequest(step=7, durable_step=5, held_out=HeldOutFigures(policy_version=6, greedy=greedy, sampled=sampled)),
        TRAINER,
    )
    yield "ban request", AdminRequest(action="ban", worker=WORKER.key_id, reason="sends rubbish"), COORDINATOR
    yield "drain request", AdminRequest(action="drain"), COORDINATOR
    yield "pause request", AdminRequest(action="pause", reason="moving"), COORDINATOR
    yield "resume request", AdminRequest(action="resume"), COORDINATOR
    yield "snapshot request", AdminRequest(action="snapshot"), COORDINATOR
    joining = JoiningAsked(workers_max=100, invites_needed=False)
    yield "limit request", AdminRequest(action="limit", joining=joining), COORDINATOR
    yield "limit request that ends all limits", AdminRequest(action="limit", joining=JoiningAsked()), COORDINATOR
