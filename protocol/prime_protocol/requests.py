"""Requests to the coordinator; replies.py has its answers. SPEC.md, section "HTTP".

Every request body is a DSSE envelope of type REQUEST, signed by its sender. The payload is a `Stamped` request,
distinguished by its `action`. The signature covers run, time stamp and nonce, so a request can be neither replayed nor
used in another run.

`wait_s` lets the server hold a request open until there is an answer, so clients need not poll fast.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.assignment import Count, Name, Step, Text
from prime_protocol.delegation import DelegationText
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.evidence import BundleEvidence
from prime_protocol.identity import KeyId
from prime_protocol.invite import InviteText
from prime_protocol.parcel import ParcelHeader
from prime_protocol.peers import Multiaddr
from prime_protocol.rollout import EngineInfo
from prime_protocol.telemetry import DownloadReport, Hardware, HeldOutFigures, Speed
from prime_protocol.verdict import Verdict


def _is_default(value: object) -> bool:
    """Return True for the default. Optional fields are omitted then, so old signed bytes stay valid."""
    return not value


def _is_unknown(value: object) -> bool:
    """Return True for None. For numbers of which 0 means something."""
    return value is None


def _optional(*, max_length: int) -> Any:
    return Field(default=(), max_length=max_length, exclude_if=_is_default)


Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Epoch = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$", max_length=32)]
"""Period in which the server remembers every nonce. The empty text names none."""
Session = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$", max_length=32)]
"""Process of a worker or a validator, identified by 16 random bytes. The empty text names none. For workers it is also a
session: that of releases before sessions."""
ClaimedMs = Annotated[int, Field(ge=0, le=limits.CLAIMED_MS_MAX)]
WaitSeconds = Annotated[float, Field(ge=0.0, le=limits.WAIT_S_MAX)]
Head = Annotated[int, Field(ge=-1, le=limits.STEP_MAX)]
"""Policy version, or -1 before the first."""
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{24}$", max_length=24)]
Rewards = Annotated[tuple[float, ...], Field(max_length=limits.LEASE_ROLLOUTS_MAX)]


class JoinRequest(WireModel):
    """Request of a worker to take part. It may join again in the same session."""

    action: Literal["join"] = "join"
    name: Name
    """Contributor's name for the machine. The operator sees it; it proves nothing."""
    software: Name
    """Version of the worker's software."""
    engine: EngineInfo
    rollouts_max: int = Field(ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    """Completions that this worker samples at once efficiently."""
    invite: InviteText = Field(default="", exclude_if=_is_default)
    """Invitation, if the run requires one for new keys."""
    hardware: Hardware | None = Field(default=None, exclude_if=_is_default)
    """Machine's own description of its hardware."""
    session: Session = Field(default="", exclude_if=_is_default)
    """Random id chosen at the start of the process. While a key takes part in one session, the coordinator admits no other."""
    delegation: DelegationText = Field(default="", exclude_if=_is_default)
    """Delegation by the key of the machine's owner, if it takes part as one of several machines of a person."""


class RevokeRequest(WireModel):
    """Request of a person's key to end the delegations of one of its machines that were issued before."""

    action: Literal["revoke"] = "revoke"
    machine: KeyId
    """Machine that takes no part any more."""


class WorkerState(StrEnum):
    """Activity that a worker reports. For display only; it decides nothing."""

    FETCHING = "fetching"
    """Downloading or verifying a policy."""
    GENERATING = "generating"
    IDLE = "idle"
    """Holding a policy and waiting for a lease."""
    DRAINING = "draining"
    """Finishing its leases; it takes no new ones."""


class HeartbeatRequest(WireModel):
    """Sign of life of a worker. After four missed ones its leases go to other workers."""

    action: Literal["heartbeat"] = "heartbeat"
    state: WorkerState
    policy_version: Head
    """Policy that its engine holds."""
    bundles_spooled: int = Field(ge=0, le=limits.BUNDLES_SPOOLED_MAX)
    """Bundles on its disk that are not uploaded yet."""
    usable_after_ms: ClaimedMs | None = Field(default=None, exclude_if=_is_unknown)
    """Milliseconds from the time stamp in that policy's manifest until the engine could use it, as the worker measured them."""
    swap_ms: ClaimedMs | None = Field(default=None, exclude_if=_is_unknown)
    """Part of `usable_after_ms` that the engine's swap took."""
    session: Session = Field(default="", exclude_if=_is_default)
    holding: tuple[Digest, ...] | None = Field(default=None, max_length=1_024, exclude_if=_is_unknown)
    """Leases that it works on, from a worker that understands `HeartbeatReply.cancelled`."""
    downloads: DownloadReport | None = Field(default=None, exclude_if=_is_unknown)
    """What it receives of checkpoints, for the run's page; None: nothing to report."""


class LeaseRequest(WireModel):
    """Request of a worker for work."""

    action: Literal["lease"] = "lease"
    policy_version: Step
    policy_digest: Digest
    """Digest of the manifest of the policy that the worker holds and has verified."""
    rollouts_max: int = Field(ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    holding: tuple[Digest, ...] | None = Field(default=None, max_length=1_024)
    """Leases that it still works on or has not uploaded yet. Its other leases lapse: it never got them, or lost them in
    a crash. None: no statement about them."""
    wait_s: WaitSeconds = 0.0
    speed: Speed | None = Field(default=None, exclude_if=_is_default)
    """Speed that the worker claims. It counts until the coordinator has measured the first bundle."""
    session: Session = Field(default="", exclude_if=_is_default)


class ReturnLeaseRequest(WireModel):
    """Return of a lease that the worker will not finish."""

    action: Literal["return_lease"] = "return_lease"
    lease_id: Digest
    failed: bool = Field(default=False, exclude_if=_is_default)
    """Whether the environment failed before its first request to the model, or a logprob is no number. SPEC.md, section 8."""
    session: Session = Field(default="", exclude_if=_is_default)


class LeaveRequest(WireModel):
    """Notice that a worker leaves. Its open leases go back."""

    action: Literal["leave"] = "leave"
    session: Session = Field(default="", exclude_if=_is_default)


class ReceiptsRequest(WireModel):
    """Request of a worker for the receipts of its bundles. The answer is a ReceiptList."""

    action: Literal["receipts"] = "receipts"
    after: Count = 0
    """Cursor: the `next` of the last answer, 0 at first."""


class UploadUrlRequest(WireModel):
    """Request of a worker for a URL to which it may send the body of a bundle. The answer is an UploadUrl."""

    action: Literal["upload_url"] = "upload_url"
    lease_id: Digest
    body_bytes: int = Field(ge=1, le=limits.COUNT_MAX)
    body_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", max_length=64)]
    """SHA-256 of the body, which services of S3 verify."""


class CheckRequest(WireModel):
    """Request of a validator for a bundle to check."""

    action: Literal["check"] = "check"
    policy_versions: tuple[Step, ...] = Field(max_length=1_024)
    """Policies that it has available; bundles of these come first."""
    wait_s: WaitSeconds = 0.0
    asks_left: bool = Field(default=False, exclude_if=_is_default)
    """Whether the answer must contain `left_ms`."""
    session: Session = Field(default="", exclude_if=_is_default)
    """Random id chosen at the start of the process. With a new one, the bundles of the key's earlier process go back."""
    names_bundles: bool = Field(default=False, exclude_if=_is_default)
    """Whether the process sends HoldingRequests for the bundles that it gets."""


class HoldingRequest(WireModel):
    """List of the bundles that a validator's process still has, sent every few seconds. The answer is a HoldingReply."""

    action: Literal["holding"] = "holding"
    session: Session
    """As in its CheckRequests."""
    bundles: tuple[Digest, ...] = Field(max_length=1_024)


class CheckResultRequest(WireModel):
    """Verdict of a validator on a bundle, with the rewards that it computed itself."""

    action: Literal["check_result"] = "check_result"
    bundle: Digest
    verdict: Verdict
    rewards: Rewards
    """One reward per completion of an accepted bundle, in its order; empty if it was rejected."""
    num_tokens: Count = 0
    """Completion tokens of an accepted bundle, as the validator counted them. The worker's credit."""
    measured: dict[Name, float] = Field(default_factory=dict, max_length=64)
    """Measured values behind the verdict, for the operator and for calibration."""
    versions: tuple[tuple[Step, Step], ...] = _optional(max_length=limits.LEASE_ROLLOUTS_MAX)
    """Per group of an accepted bundle: the oldest policy of its tokens, and the oldest of its completions' last tokens.
    Empty if the lease's own policy sampled all of them."""
    unscored: tuple[Count, ...] = _optional(max_length=limits.LEASE_ROLLOUTS_MAX)
    """Indices of completions on which the environment failed; their rewards are 0. An `unverifiable` bundle has them only if
    that is the reason."""
    evidence: BundleEvidence | None = Field(default=None, exclude_if=lambda value: value is None)
    """Evidence of its tokens against the worker, for accepted and rejected bundles; null without a forward pass or if
    the run has no calibration."""
    fingerprints: tuple[tuple[Count, Fingerprint], ...] = _optional(max_length=limits.FINGERPRINTS_MAX)
    """Pairs of an accepted bundle: a slot, and a window of one of its completions that does not occur twice by chance
    (copies.py)."""
    logprobs: Digest | None = Field(default=None, exclude_if=_is_default)
    """Parcel of the validator's own logprobs, sent before (parcel.py)."""

    @model_validator(mode="after")
    def _rewards_go_with_acceptance(self) -> Self:
        if self.verdict.accepted != bool(self.rewards):
            raise ValueError("an accepted bundle must have rewards, a rejected one must have none")
        return self


class BatchRequest(WireModel):
    """Request of the trainer for the groups of one step. A repeated request for the same step gets the same batch."""

    action: Literal["batch"] = "batch"
    step: Step
    durable_step: Step
    """Step at which its own durable checkpoint would resume; older batches need not be kept."""
    wait_s: WaitSeconds = 0.0
    part: Count = Field(default=0, exclude_if=_is_default)
    """Number of the batch in the step, below schedule.trigger_parameter_sync_step; the trainer asks for them in order."""
    train_ms: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """Training time of the newest step that the trainer has finished, without waiting. For metrics only."""
    held_out: HeldOutFigures | None = Field(default=None, exclude_if=lambda value: value is None)
    """Held-out figures of one policy, by the trainer. For display only."""


class BundleRequest(WireModel):
    """Request of a validator, the trainer or an auditor for the bytes of a bundle."""

    action: Literal["bundle"] = "bundle"
    bundle: Digest


class PeersRequest(WireModel):
    """Request of a follower of the run for peers; it may offer itself as one. The answer is a PeersReply.

    Its address is the source address of the request: no peer can announce another host's address.
    """

    action: Literal["peers"] = "peers"
    port: int | None = Field(default=None, ge=1, le=65_535)
    """Port at which it serves over HTTP. None offers nothing there."""
    addresses: tuple[Multiaddr, ...] = Field(default=(), max_length=limits.PEER_ADDRESSES_MAX)
    """Addresses at which others may dial it over libp2p. Hints only: the connection proves the key."""
    peers_max: int = Field(default=limits.PEERS_MAX, ge=0, le=limits.PEERS_MAX)


class JoiningAsked(WireModel):
    """Limits on who joins that the operator asks for. Null: as the coordinator's settings say."""

    workers_max: int | None = Field(default=None, ge=1, le=limits.COUNT_MAX)
    """Workers that take part at one time, at most the RunSpec's number."""
    workers_per_network_max: int | None = Field(default=None, ge=1, le=limits.COUNT_MAX)
    """Workers from one network at one time."""
    invites_needed: bool | None = None
    """Whether new keys need an invitation."""


class AdminRequest(WireModel):
    """Request of the operator, signed by the root or coordinator key."""

    action: Literal["ban", "unban", "drain", "pause", "resume", "limit", "snapshot"]
    worker: KeyId | None = None
    """Worker to ban or unban; required for both."""
    reason: Text = ""
    joining: JoiningAsked | None = Field(default=None, exclude_if=_is_unknown)
    """Limits from now on; required for `limit`."""

    @model_validator(mode="after")
    def _has_its_object(self) -> Self:
        if self.worker is None and self.action in ("ban", "unban"):
            raise ValueError("ban and unban must name a worker")
        if self.joining is None and self.action == "limit":
            raise ValueError("limit must name the limits")
        return self


Request = Annotated[
    JoinRequest
    | RevokeRequest
    | HeartbeatRequest
    | LeaseRequest
    | ReturnLeaseRequest
    | LeaveRequest
    | ReceiptsRequest
    | UploadUrlRequest
    | CheckRequest
    | HoldingRequest
    | CheckResultRequest
    | BatchRequest
    | BundleRequest
    | PeersRequest
    | AdminRequest,
    Field(discriminator="action"),
]


class Stamped(WireModel):
    """Signed content of a request: run, nonce, time and the request itself."""

    run: Digest
    nonce: Nonce
    """16 random bytes; a server refuses a nonce that it has seen."""
    issued_at_ms: Count
    """Unix time by the sender's clock; it may differ from the server's by REQUEST_AGE_S_MAX."""
    epoch: Epoch = Field(default="", exclude_if=_is_default)
    """Epoch of the server that this request is for, from its last WRONG_EPOCH answer."""
    request: Request


class BlobHeader(ParcelHeader):
    """Header of a blob upload (envelope type BLOB). The body's digest is its address."""

    run: Digest
    issued_at_ms: Count
    """Unix time by the trainer's clock; it may differ from the server's by REQUEST_AGE_S_MAX."""
    epoch: Epoch = Field(default="", exclude_if=_is_default)
    """Epoch of the server, as in a stamped request."""
