"""Validate a lease, and sign the bundle that answers it."""

from __future__ import annotations

from prime_node.ports.engine import GenerateRequest
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.messages import LeaseRequest
from prime_protocol.parcel import pack_parcel
from prime_protocol.rollout import EngineInfo, RolloutHeader, Rollouts, pack_body
from prime_protocol.run_spec import PinnedRun


def open_lease(envelope: Envelope, asked: LeaseRequest, *, run: PinnedRun, worker: str) -> Lease:
    """Return the lease if it answers our request. Raises RemoteError.

    (1) A coordinator of the run signed it; (2) it is of this run and for this worker; (3) it names the policy that this
    worker reported, and a step that the policy may serve; (4) it requests no more than was offered and than the run
    allows; (5) prompts are within the limits and the vocabulary.
    """
    payload = run.keys.verify(envelope, PayloadType.LEASE, Role.COORDINATOR)  # (1)
    lease = parse_json(payload, Lease)
    if lease.run != run.digest or lease.worker != worker:  # (2)
        raise RemoteError(ErrorCode.LEASE_FOREIGN, f"lease {lease.lease_id[:12]} is for another worker or run")
    names_ours = (lease.policy_version, lease.policy_digest) == (asked.policy_version, asked.policy_digest)
    if not names_ours or not run.spec.admission.admits_step(lease.step, lease.policy_version):  # (3)
        raise RemoteError(
            ErrorCode.MALFORMED,
            f"lease {lease.lease_id[:12]} asks for policy {lease.policy_version} at step {lease.step}",
        )
    if lease.num_rollouts > asked.rollouts_max:  # (4)
        raise LimitExceeded("rollouts_max", lease.num_rollouts, asked.rollouts_max)
    if lease.sampling != run.spec.sampling:
        raise RemoteError(ErrorCode.MALFORMED, f"lease {lease.lease_id[:12]} has other sampling settings than the run")
    for group in lease.groups:  # (5)
        if len(group.prompt_token_ids) > run.spec.limits.prompt_tokens_max:
            raise LimitExceeded("prompt_tokens_max", len(group.prompt_token_ids), run.spec.limits.prompt_tokens_max)
        if max(group.prompt_token_ids) >= run.spec.vocab_size:
            raise RemoteError(
                ErrorCode.MALFORMED, f"lease {lease.lease_id[:12]}: a prompt has tokens outside the vocabulary"
            )
    return lease


def requests_for(lease: Lease) -> list[GenerateRequest]:
    """Return the engine's requests, in the lease's order of groups and seeds."""
    return [GenerateRequest(group.prompt_token_ids, seed) for group in lease.groups for seed in group.seeds]


def bundle_for(lease: Lease, rollouts: Rollouts, *, key: SigningKey, engine: EngineInfo, created_at_ms: int) -> bytes:
    """Return the signed parcel that answers a lease."""
    body, decompressed_bytes = pack_body(rollouts)
    header = RolloutHeader(
        body_digest=digest_of(body),
        body_bytes=len(body),
        run=lease.run,
        worker=lease.worker,
        lease_id=lease.lease_id,
        step=lease.step,
        policy_version=lease.policy_version,
        policy_digest=lease.policy_digest,
        num_rollouts=lease.num_rollouts,
        decompressed_bytes=decompressed_bytes,
        engine=engine,
        created_at_ms=created_at_ms,
    )
    return pack_parcel(header, body, PayloadType.ROLLOUT, key)
