"""Answers of the coordinator. SPEC.md, section "HTTP".

They come over the connection that the client opened, so most are unsigned. Those that outlive it (leases, receipts, batches)
are signed envelopes.
"""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Count, Lease, Name, Problem, Step, Text, TokenIds
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import KeyId
from prime_protocol.peers import EnvelopeText
from prime_protocol.requests import Epoch, Head, Rewards
from prime_protocol.verdict import Verdict


class JoinReply(WireModel):
    """Answer to a JoinRequest. The worker's limits are in the RunSpec, which it has already verified."""

    step: Step
    head: Head
    """Newest published policy."""
    server_time_ms: Count
    """Server's clock, so that a worker can detect how far its own is off."""
    notice: Text = Field(default="", exclude_if=lambda value: not value)
    """Notice for the contributor: what the machine lacks, and the consequence."""


class HeartbeatReply(WireModel):
    """Answer to a HeartbeatRequest."""

    step: Step
    head: Head
    draining: bool = False
    """Whether the run is ending or the operator drains it. The worker then finishes, uploads and leaves."""
    notice: Text = ""
    """Notice for the contributor's screen: why nothing is leased, an upgrade hint, ..."""
    cancelled: tuple[Digest, ...] = Field(default=(), max_length=1_024, exclude_if=lambda value: not value)
    """Those of the request's `holding` that can no longer be used: the worker stops and gives them back."""


class PeersReply(WireModel):
    """Answer to a PeersRequest. It holds envelopes as JSON texts, because their receiver shows them to peers."""

    peers: EnvelopeText
    """Envelope of a PeerList."""
    ticket: EnvelopeText = Field(default="", exclude_if=lambda value: not value)
    """Envelope of a PeerTicket for the client. Empty if it does not take part: peers then serve it as a stranger."""
    reachable: bool | None = None
    """Whether the coordinator could reach the offered port; None if this is unknown, or no port was offered."""


class MachineStanding(WireModel):
    """What one machine has contributed to a run."""

    worker: KeyId
    name: Name
    state: Name
    """What it does, in a word, for people: `generating`, `idle`, `away`, `banned`, ..."""
    accepted: Count
    """Accepted rollouts."""
    refused: Count
    """Rejected rollouts."""
    tokens: Count
    """Tokens that its receipts credit. Those of bundles in escrow are not among them."""


class Standing(WireModel):
    """Place of a contributor among all contributors of a run: of a worker's key, or of a person with several machines."""

    contributor: KeyId
    """The person's key; of a machine without a person, its own."""
    rank: int | None = Field(default=None, ge=1, le=limits.COUNT_MAX)
    """Place by tokens, 1 for the most; null before the first credited ones."""
    contributors: Count
    """Contributors with credited tokens."""
    tokens: Count
    """Tokens of the contributor's machines together."""
    all_tokens: Count
    """Tokens of all contributors."""
    machines: tuple[MachineStanding, ...] = Field(max_length=limits.PERSON_MACHINES_MAX)


class NotYet(WireModel):
    """Answer that there is nothing to hand out now (HTTP 202). It gives the reason for the wait."""

    reason: Text
    retry_after_s: float = Field(ge=0.0, le=limits.RETRY_AFTER_S_MAX)


class UploadReply(WireModel):
    """State of an uploaded bundle. The same bundle again gets the same answer."""

    bundle: Digest
    verdict: Verdict | None = None
    """Verdict, or None until a validator has judged; the receipt holds the final one."""


class UploadUrl(WireModel):
    """Answer to an UploadUrlRequest."""

    url: Annotated[
        str,
        Field(
            max_length=limits.UPLOAD_URL_CHARS_MAX,
            pattern=r"^https?://(?:[0-9a-zA-Z.-]{1,150}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?/[!-~]{1,2000}$",
        ),
    ]
    """Address for one PUT with `upload_headers`."""


def upload_headers(body_bytes: int, sha256: bytes) -> dict[str, str]:
    """Return the headers that the PUT sends and the URL's signature covers."""
    checksum = base64.b64encode(sha256).decode()
    return {"content-length": str(body_bytes), "if-none-match": "*", "x-amz-checksum-sha256": checksum}


ReceiptText = Annotated[str, Field(max_length=limits.RECEIPT_CHARS_MAX)]


class ReceiptList(WireModel):
    """Receipt envelopes, oldest first, as JSON texts."""

    receipts: tuple[ReceiptText, ...] = Field(max_length=limits.RECEIPTS_MAX)
    next: Count


class CheckTask(WireModel):
    """Bundle to check, with the lease that it answers."""

    bundle: Digest
    lease: Lease
    deadline_ms: Count
    """Deadline by the coordinator's clock. After it the bundle goes to another validator."""
    newest_policy: Step | None = Field(default=None, exclude_if=lambda value: value is None)
    """Newest policy that a token may come from, if completions may span policies; null: the lease's policy only."""
    audit: bool = Field(default=True, exclude_if=bool)
    """Whether to make the forward pass. If false, check the assignment and compute the rewards."""
    left_ms: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """Time from the answer to the deadline, for validators with another clock; null unless requested."""


class HoldingReply(WireModel):
    """Answer to a HoldingRequest."""

    lost: tuple[Digest, ...] = Field(default=(), max_length=1_024)
    """Those of the bundles that have a verdict or that another validator has. The coordinator takes no verdict on them."""


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
    """Rewards by a validator. Length G."""
    unscored: tuple[Count, ...] = Field(
        default=(), max_length=limits.LEASE_ROLLOUTS_MAX, exclude_if=lambda value: not value
    )
    """Completions, counted within the group, that could not be scored and are not trained on."""
    logprobs: Digest | None = Field(default=None, exclude_if=lambda value: not value)
    """Parcel with a validator's logprobs of the bundle, to use instead of the claimed ones; null if it was not audited."""


class TrainBatch(WireModel):
    """Coordinator's signed list of the groups that one step, or a part of it, trains on (envelope type BATCH)."""

    run: Digest
    step: Step
    groups: tuple[BatchGroup, ...] = Field(max_length=limits.STEP_GROUPS_MAX)
    part: Count = Field(default=0, exclude_if=lambda value: not value)
    """Number of the batch in the step."""
    previous: Digest | None = Field(default=None, exclude_if=lambda value: not value)
    """Digest of the previous batch of the step, so the last one's digest fixes all of them; null for the first."""


class ErrorBody(WireModel):
    """Body of every HTTP answer with a status of 400 or above."""

    code: ErrorCode
    detail: str = Field(max_length=limits.DETAIL_CHARS_MAX)
    retry_after_s: float | None = Field(default=None, ge=0.0, le=limits.RETRY_AFTER_S_MAX)
    epoch: Epoch = Field(default="", exclude_if=lambda value: not value)
    """Current epoch of the server, with WRONG_EPOCH."""
