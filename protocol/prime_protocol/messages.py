"""What the coordinator is asked and what it answers. SPEC.md, section "HTTP".

Every request body is a DSSE envelope of type REQUEST, signed by the asker; its payload is a `Stamped` request, told apart by
its `action`. Run, time stamp and nonce are inside the signature, so a request can neither be replayed nor carried to
another run. Answers come over the connection that the client opened; those that outlive it (leases, receipts, batches) are
signed envelopes themselves.

`wait_s` lets the server hold a request open until there is something to answer, so nobody has to poll fast.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.assignment import Count, Lease, Name, Problem, Step, Text, TokenIds
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode
from prime_protocol.evidence import BundleEvidence
from prime_protocol.identity import KeyId
from prime_protocol.invite import InviteText
from prime_protocol.parcel import ParcelHeader
from prime_protocol.peers import EnvelopeText, Multiaddr
from prime_protocol.rollout import EngineInfo
from prime_protocol.telemetry import Hardware, Speed
from prime_protocol.verdict import Verdict


def _is_default(value: object) -> bool:
    """Fields that came after the first release are left out where they say nothing: then old signed bytes stay as they are."""
    return not value


def _is_unknown(value: object) -> bool:
    """The same for a number of which 0 says something."""
    return value is None


def _optional(*, max_length: int) -> Any:
    return Field(default=(), max_length=max_length, exclude_if=_is_default)


Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Epoch = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$", max_length=32)]
"""A time in which the server remembers every nonce. The empty text names none."""
Session = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$", max_length=32)]
"""One process of one worker, by 16 random bytes. The empty text is a session too, that of releases before sessions."""
ClaimedMs = Annotated[int, Field(ge=0, le=limits.CLAIMED_MS_MAX)]
WaitSeconds = Annotated[float, Field(ge=0.0, le=limits.WAIT_S_MAX)]
Head = Annotated[int, Field(ge=-1, le=limits.STEP_MAX)]
"""A policy version, or -1 before the first."""
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{24}$", max_length=24)]
Rewards = Annotated[tuple[float, ...], Field(max_length=limits.LEASE_ROLLOUTS_MAX)]


class JoinRequest(WireModel):
    """A worker asks to take part. Joining again in the same session is allowed."""

    action: Literal["join"] = "join"
    name: Name
    """What the contributor calls the machine. Shown to the operator; proves nothing."""
    software: Name
    """Version of the worker's software."""
    engine: EngineInfo
    rollouts_max: int = Field(ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    """Completions that this worker samples at once with profit."""
    invite: InviteText = Field(default="", exclude_if=_is_default)
    """An invitation, where the run asks new keys for one."""
    hardware: Hardware | None = Field(default=None, exclude_if=_is_default)
    """What the machine is, as it says itself."""
    session: Session = Field(default="", exclude_if=_is_default)
    """Chosen at the start of the process. While a key takes part in one session, no other is let in."""


class WorkerState(StrEnum):
    """What a worker says it is doing. For people; nothing is decided by it."""

    FETCHING = "fetching"
    """Downloading or verifying a policy."""
    GENERATING = "generating"
    IDLE = "idle"
    """Has a policy, waits for a lease."""
    DRAINING = "draining"
    """Takes no new lease and finishes what it has."""


class HeartbeatRequest(WireModel):
    """A worker is alive. Four missed ones, and its leases go to others."""

    action: Literal["heartbeat"] = "heartbeat"
    state: WorkerState
    policy_version: Head
    """The policy that its engine holds."""
    bundles_spooled: int = Field(ge=0, le=limits.BUNDLES_SPOOLED_MAX)
    """Bundles that wait on its disk to be uploaded."""
    usable_after_ms: ClaimedMs | None = Field(default=None, exclude_if=_is_unknown)
    """From the time stamp in that policy's manifest until the engine could use it, as the worker measured it."""
    swap_ms: ClaimedMs | None = Field(default=None, exclude_if=_is_unknown)
    """Of that, what its engine took to swap to it."""
    session: Session = Field(default="", exclude_if=_is_default)


class LeaseRequest(WireModel):
    """A worker asks for work."""

    action: Literal["lease"] = "lease"
    policy_version: Step
    policy_digest: Digest
    """The manifest of the policy that it holds, verified by itself."""
    rollouts_max: int = Field(ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    holding: tuple[Digest, ...] | None = Field(default=None, max_length=1_024)
    """Leases that it is still working on or has not uploaded yet. Others of its own lapse: it never got them, or lost them in
    a crash. None says nothing about them."""
    wait_s: WaitSeconds = 0.0
    speed: Speed | None = Field(default=None, exclude_if=_is_default)
    """What it claims. Counts until its first bundle has come: then what was measured does."""
    session: Session = Field(default="", exclude_if=_is_default)


class ReturnLeaseRequest(WireModel):
    """A worker hands back a lease that it will not finish."""

    action: Literal["return_lease"] = "return_lease"
    lease_id: Digest
    failed: bool = Field(default=False, exclude_if=_is_default)
    """Its environment failed before it asked the model for anything. SPEC.md, section 8."""
    session: Session = Field(default="", exclude_if=_is_default)


class LeaveRequest(WireModel):
    """A worker goes. Its open leases are handed back."""

    action: Literal["leave"] = "leave"
    session: Session = Field(default="", exclude_if=_is_default)


class ReceiptsRequest(WireModel):
    """A worker asks what became of its bundles. Answered with a ReceiptList."""

    action: Literal["receipts"] = "receipts"
    after: Count = 0
    """Cursor: the `next` of the last answer, 0 at first."""


class CheckRequest(WireModel):
    """A validator asks for a bundle to judge."""

    action: Literal["check"] = "check"
    policy_versions: tuple[Step, ...] = Field(max_length=1_024)
    """Policies that it has at hand; bundles of these come first."""
    wait_s: WaitSeconds = 0.0
    asks_left: bool = Field(default=False, exclude_if=_is_default)
    """The answer is to say `left_ms`."""


class CheckResultRequest(WireModel):
    """A validator's verdict on a bundle, with the rewards that it computed itself."""

    action: Literal["check_result"] = "check_result"
    bundle: Digest
    verdict: Verdict
    rewards: Rewards
    """One for each completion of an accepted bundle, in its order; empty where it was refused."""
    num_tokens: Count = 0
    """Completion tokens of an accepted bundle, as the validator counted them: what the worker is credited with."""
    measured: dict[Name, float] = Field(default_factory=dict, max_length=64)
    """The numbers behind the verdict, for the operator and for calibration."""
    versions: tuple[tuple[Step, Step], ...] = _optional(max_length=limits.LEASE_ROLLOUTS_MAX)
    """Of each group of an accepted bundle: the oldest policy of its tokens, and of its completions' last tokens. Empty where the
    lease's own policy sampled them all."""
    unscored: tuple[Count, ...] = _optional(max_length=limits.LEASE_ROLLOUTS_MAX)
    """Indices of completions that could not be scored; their rewards are 0."""
    evidence: BundleEvidence | None = Field(default=None, exclude_if=lambda value: value is None)
    """What its tokens say against the worker, of accepted and of refused bundles; null where no forward pass was made, or the
    run has no calibration."""
    fingerprints: tuple[tuple[Count, Fingerprint], ...] = _optional(max_length=limits.FINGERPRINTS_MAX)
    """Of an accepted bundle: a slot, and a window of a completion for it that nobody says twice by chance (copies.py)."""
    logprobs: Digest | None = Field(default=None, exclude_if=_is_default)
    """Parcel of the validator's own logprobs, sent before (judged_logprobs.py)."""

    @model_validator(mode="after")
    def _rewards_go_with_acceptance(self) -> Self:
        if self.verdict.accepted != bool(self.rewards):
            raise ValueError("an accepted bundle has rewards, a refused one has none")
        return self


class BatchRequest(WireModel):
    """The trainer asks for the groups of one step. Asking again for the same step gives the same batch."""

    action: Literal["batch"] = "batch"
    step: Step
    durable_step: Step
    """The step that its own durable checkpoint would resume at; older batches need not be kept."""
    wait_s: WaitSeconds = 0.0
    part: Count = Field(default=0, exclude_if=_is_default)
    """Which batch of the step, below schedule.trigger_parameter_sync_step; they are asked for in order."""
    train_ms: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """What training took in the newest step that the trainer has finished, waiting left out. For the metrics alone."""


class BundleRequest(WireModel):
    """A validator or the trainer asks for the bytes of a bundle."""

    action: Literal["bundle"] = "bundle"
    bundle: Digest


class PeersRequest(WireModel):
    """Somebody who follows the run asks for peers, and may offer himself as one. Answered with a PeersReply.

    His address is the one that the request comes from: nobody can announce somebody else's.
    """

    action: Literal["peers"] = "peers"
    port: int | None = Field(default=None, ge=1, le=65_535)
    """Where he serves over HTTP. None offers nothing there."""
    addresses: tuple[Multiaddr, ...] = Field(default=(), max_length=limits.PEER_ADDRESSES_MAX)
    """Where he may be dialled over libp2p. Hints: the link proves the key."""
    peers_max: int = Field(default=limits.PEERS_MAX, ge=0, le=limits.PEERS_MAX)


class AdminRequest(WireModel):
    """The operator, by the root or coordinator key."""

    action: Literal["ban", "unban", "drain"]
    worker: KeyId | None = None
    """Needed to ban and to unban."""
    reason: Text = ""

    @model_validator(mode="after")
    def _ban_names_a_worker(self) -> Self:
        if self.worker is None and self.action != "drain":
            raise ValueError("ban and unban name a worker")
        return self


Request = Annotated[
    JoinRequest
    | HeartbeatRequest
    | LeaseRequest
    | ReturnLeaseRequest
    | LeaveRequest
    | ReceiptsRequest
    | CheckRequest
    | CheckResultRequest
    | BatchRequest
    | BundleRequest
    | PeersRequest
    | AdminRequest,
    Field(discriminator="action"),
]


class Stamped(WireModel):
    """What is signed: a request, for which run, when, and once only."""

    run: Digest
    nonce: Nonce
    """16 random bytes; a server refuses one that it has seen."""
    issued_at_ms: Count
    """Unix time by the asker's clock; it may differ from the server's by REQUEST_AGE_S_MAX."""
    epoch: Epoch = Field(default="", exclude_if=_is_default)
    """The server's epoch that this request is for, as its last WRONG_EPOCH answer named it."""
    request: Request


class JoinReply(WireModel):
    """Welcome. The worker's limits are in the RunSpec, which it has already verified."""

    step: Step
    head: Head
    """Newest published policy."""
    server_time_ms: Count
    """So that a worker with a wrong clock learns by how much."""
    notice: Text = Field(default="", exclude_if=_is_default)
    """For the contributor: what his machine lacks, and what follows from it."""


class HeartbeatReply(WireModel):
    step: Step
    head: Head
    draining: bool = False
    """The run is ending or the operator drains it: finish, upload, leave."""
    notice: Text = ""
    """For the contributor's screen: why nothing is leased, an upgrade hint, ..."""


class PeersReply(WireModel):
    """Envelopes as JSON texts, since they are shown to peers."""

    peers: EnvelopeText
    """A PeerList."""
    ticket: EnvelopeText = Field(default="", exclude_if=_is_default)
    """A PeerTicket for the asker. Empty for one that does not take part: peers serve it as a stranger."""
    reachable: bool | None = None
    """Whether the coordinator could reach him at the offered port; None while that is not known, or nothing was offered."""


class NotYet(WireModel):
    """HTTP 202: nothing to hand out now. Says why, so that nobody waits without knowing for what."""

    reason: Text
    retry_after_s: float = Field(ge=0.0, le=limits.RETRY_AFTER_S_MAX)


class UploadReply(WireModel):
    """What became of an uploaded bundle so far. The same bundle again gets the same answer."""

    bundle: Digest
    verdict: Verdict | None = None
    """None while it waits for a validator; the final word comes as a receipt."""


ReceiptText = Annotated[str, Field(max_length=limits.RECEIPT_CHARS_MAX)]


class ReceiptList(WireModel):
    """Receipt envelopes, oldest first, as JSON texts."""

    receipts: tuple[ReceiptText, ...] = Field(max_length=limits.RECEIPTS_MAX)
    next: Count


class CheckTask(WireModel):
    """A bundle to judge, with the lease that it answers."""

    bundle: Digest
    lease: Lease
    deadline_ms: Count
    """After this, by the coordinator's clock, the bundle goes to another validator."""
    newest_policy: Step | None = Field(default=None, exclude_if=lambda value: value is None)
    """The newest policy that a token may be of, where the run lets completions span policies; null: the lease's."""
    audit: bool = Field(default=True, exclude_if=bool)
    """Make the forward pass. Where false, check the assignment and compute the rewards."""
    left_ms: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """From the answer to the deadline, for validators whose clock differs; null where they do not ask."""


class BatchGroup(WireModel):
    """One accepted group of a training batch."""

    slot: Count
    problem: Problem
    prompt_token_ids: TokenIds
    worker: KeyId
    policy_version: Step
    bundle: Digest
    first: Count
    """Index of the group's first completion in its bundle; the others follow."""
    rewards: Rewards
    """By a validator. Length G."""
    unscored: tuple[Count, ...] = _optional(max_length=limits.LEASE_ROLLOUTS_MAX)
    """Completions, counted inside the group, that could not be scored and are not trained on."""
    logprobs: Digest | None = Field(default=None, exclude_if=_is_default)
    """Parcel with a validator's logprobs of the bundle, to be used in the place of the claimed ones; null: it was not audited."""


class TrainBatch(WireModel):
    """The coordinator's signed list of what one step, or a part of it, trains on (envelope type BATCH)."""

    run: Digest
    step: Step
    groups: tuple[BatchGroup, ...] = Field(max_length=limits.STEP_GROUPS_MAX)
    part: Count = Field(default=0, exclude_if=_is_default)
    """Which batch of the step."""
    previous: Digest | None = Field(default=None, exclude_if=_is_default)
    """Digest of the batch before it in the same step, so that the last one's digest stands for all; null for the first."""


class BlobHeader(ParcelHeader):
    """Header of a blob upload (envelope type BLOB). The body's digest is its address."""

    run: Digest
    issued_at_ms: Count
    """Unix time by the trainer's clock; it may differ from the server's by REQUEST_AGE_S_MAX."""
    epoch: Epoch = Field(default="", exclude_if=_is_default)
    """As in a stamped request."""


class ErrorBody(WireModel):
    """The body of every HTTP answer with a status of 400 or above."""

    code: ErrorCode
    detail: str = Field(max_length=limits.DETAIL_CHARS_MAX)
    retry_after_s: float | None = Field(default=None, ge=0.0, le=limits.RETRY_AFTER_S_MAX)
    epoch: Epoch = Field(default="", exclude_if=_is_default)
    """With WRONG_EPOCH: the server's present epoch."""
