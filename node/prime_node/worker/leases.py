"""Validate a lease; size requests to this machine's speed."""

from __future__ import annotations

from prime_node.ports.engine import GenerateRequest
from prime_protocol import limits
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.messages import LeaseRequest
from prime_protocol.parcel import pack_parcel
from prime_protocol.rollout import EngineInfo, RolloutHeader, Rollouts, pack_body
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import Speed

SHARE_OF_LEASE = 0.4
"""Largest share of a lease's time that the requested work may take. The rest is for queueing and for the upload."""
MARGIN = 1.3
"""Safety factor: work is assumed to take this much longer than measured."""


def open_lease(envelope: Envelope, asked: LeaseRequest, *, run: PinnedRun, worker: str) -> Lease:
    """Return the lease if it answers our request. Raises PeerError.

    (1) A coordinator of the run signed it; (2) it is of this run and for this worker; (3) it names the policy that this
    worker reported, and a step that the policy may serve; (4) it requests no more than was offered and than the run
    allows; (5) prompts are within the limits and the vocabulary.
    """
    payload = run.keys.verify(envelope, PayloadType.LEASE, Role.COORDINATOR)  # (1)
    lease = parse_json(payload, Lease)
    if lease.run != run.digest or lease.worker != worker:  # (2)
        raise PeerError(ErrorCode.LEASE_FOREIGN, f"lease {lease.lease_id[:12]} is for another worker or run")
    names_ours = (lease.policy_version, lease.policy_digest) == (asked.policy_version, asked.policy_digest)
    if not names_ours or not run.spec.admission.admits_step(lease.step, lease.policy_version):  # (3)
        raise PeerError(
            ErrorCode.MALFORMED,
            f"lease {lease.lease_id[:12]} asks for policy {lease.policy_version} at step {lease.step}",
        )
    if lease.num_rollouts > asked.rollouts_max:  # (4)
        raise LimitExceeded("rollouts_max", lease.num_rollouts, asked.rollouts_max)
    if lease.sampling != run.spec.sampling:
        raise PeerError(ErrorCode.MALFORMED, f"lease {lease.lease_id[:12]} samples otherwise than the run")
    for group in lease.groups:  # (5)
        if len(group.prompt_token_ids) > run.spec.limits.prompt_tokens_max:
            raise LimitExceeded("prompt_tokens_max", len(group.prompt_token_ids), run.spec.limits.prompt_tokens_max)
        if max(group.prompt_token_ids) >= run.spec.vocab_size:
            raise PeerError(ErrorCode.MALFORMED, f"lease {lease.lease_id[:12]}: a prompt leaves the vocabulary")
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


class GenerationPace:
    """Measured speed of generation: an EWMA. A rehearsal's value counts until real work replaces it."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._seconds_per_rollout: float | None = None
        self._is_rehearsed = False

    def rehearsed(self, *, tokens: int, seconds: float, rollout_tokens: int) -> None:
        """Record a rehearsal: tokens in seconds. A rollout has at most `rollout_tokens`."""
        self.tokens_per_s = tokens / max(seconds, 1e-6)
        self._seconds_per_rollout, self._is_rehearsed = rollout_tokens / self.tokens_per_s, True

    def claim(self, *, download_bytes_per_s: float) -> Speed | None:
        """Return the claimed speed, for a coordinator that has not measured any yet."""
        if self._seconds_per_rollout is None:
            return None
        return Speed(
            rollout_ms=min(max(1, round(self._seconds_per_rollout * 1_000)), limits.CLAIMED_MS_MAX),
            tokens_per_s=min(round(self.tokens_per_s), limits.CLAIMED_TOKENS_PER_S_MAX),
            download_bytes_per_s=min(round(download_bytes_per_s), limits.CLAIMED_BYTES_PER_S_MAX),
        )

    def measured(self, *, rollouts: int, tokens: int, seconds: float) -> None:
        """Record the duration of finished work."""
        seconds = max(seconds, 1e-6)
        if self._seconds_per_rollout is None or self._is_rehearsed:
            self._is_rehearsed = False
            self._seconds_per_rollout = seconds / rollouts
            self.tokens_per_s = tokens / seconds
        else:
            self._seconds_per_rollout += 0.3 * (seconds / rollouts - self._seconds_per_rollout)
            self.tokens_per_s += 0.3 * (tokens / seconds - self.tokens_per_s)

    def fits(self, num_rollouts: int, *, seconds_left: float) -> bool:
        """Return whether the work can be finished in time. Before the first measurement: try it."""
        if self._seconds_per_rollout is None or self._is_rehearsed:
            return seconds_left > 0
        return num_rollouts * self._seconds_per_rollout * MARGIN < seconds_left

    def doubt(self) -> None:
        """Halve the estimate after work was refused because of it: it may have been bad luck."""
        if self._seconds_per_rollout is not None:
            self._seconds_per_rollout /= 2

    def rollouts_max(self, run: PinnedRun, *, wanted: int) -> int:
        """Return how many completions to request: no more than fit, at least one group."""
        if self._seconds_per_rollout is None:
            return wanted
        fitting = int(run.spec.lease_seconds * SHARE_OF_LEASE / self._seconds_per_rollout)
        return max(min(wanted, fitting), min(wanted, run.spec.rollouts_per_group))
