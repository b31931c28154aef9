"""A worker's status: one line every few seconds, and status.json for `prime-node up` and `status`.

The sentences for its contributor, what it does, why it waits and why rollouts were rejected, are pure.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from prime_node.files import replace
from prime_node.inside import read_regular
from prime_node.patience import without_numbers
from prime_node.worker.control import ON_REQUEST
from prime_protocol.errors import LocalError
from prime_protocol.requests import WorkerState
from prime_protocol.verdict import RejectReason

log = logging.getLogger(__name__)


STATUS_BYTES_MAX = 2**20
"""Size limit of a status file."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Links to other peers. Example: Traffic(peers=4, down_bytes=397_000_000, up_bytes=120_500_000)."""

    peers: int = 0
    down_bytes: int = 0
    """Bytes of checkpoints received since the start, from all sources."""
    peer_bytes: int = 0
    """Part of `down_bytes` that other contributors sent."""
    done_bytes: int = 0
    """Verified bytes of the download in progress."""
    all_bytes: int = 0
    """Size of the download in progress; 0 if there is none."""
    up_bytes: int = 0
    """Bytes of checkpoints sent to peers since the start."""
    text: str = ""
    """The same and how peers reach this machine, for its owner."""


@dataclass(frozen=True, slots=True)
class Status:
    """A worker's status at one moment.

    Example: Status(worker="12D3Koo...", state=WorkerState.IDLE, policy_version=3, head=3, ...).
    """

    worker: str
    state: WorkerState
    policy_version: int
    """Policy held by the engine; -1 before the first."""
    head: int
    """Newest known policy."""
    step: int
    tokens_per_s: float
    rollouts_generated: int
    rollouts_accepted: int
    rollouts_pending: int
    tokens_accepted: int
    refused: dict[str, int] = field(default_factory=dict)
    """Rollouts by reason, from the receipts."""
    bundles_in_escrow: int = 0
    """Accepted bundles whose tokens are not credited yet."""
    bundles_spooled: int = 0
    bundles_uploaded: int = 0
    leases_dropped: int = 0
    """Leases handed back or expired before they were finished."""
    coordinator_away_s: float | None = None
    """Seconds for which the coordinator has not answered; None while it does."""
    waiting_for: str = ""
    """Reason why nothing is being generated."""
    paused: str = ""
    """Reason of a pause: the contributor's command or limits; empty if there is none."""
    control_at_ms: int = 0
    """Time of the contributor's last command that the worker follows; 0 without any."""
    notice: str = ""
    """Coordinator's message to the contributor."""
    tokens_generated: int = 0
    peers: int = 0
    down_bytes: int = 0
    """Bytes of checkpoints received since the start."""
    up_bytes: int = 0
    """Bytes sent since the start: bundles to the coordinator, checkpoints to peers."""
    swarm: str = ""
    """Peers, bytes served to them, and whether they can reach this worker."""
    person: str = ""
    """Person whose machine this is; empty without one."""
    rank: int | None = None
    """Place of this contributor among all of the run, by tokens; None before its first credited ones, or if unknown."""
    contributors: int = 0
    """Contributors with credited tokens; 0: none, or unknown."""
    share: float = 0.0
    """Its share of all tokens, 0 to 1."""
    ended: str = ""
    """Outcome of the worker; empty while it runs."""
    at_ms: int = 0

    @property
    def situation(self) -> tuple[str, ...]:
        """What a log shows as soon as it changes: why nothing is generated, or what the worker does."""
        away = "" if self.coordinator_away_s is None else "away"
        return (
            away,
            self.paused,
            without_numbers(self.waiting_for),
            "" if self.paused or self.waiting_for else self.state.value,
        )

    def line(self) -> str:
        """Return the line for a terminal.

        Example: `policy 41 of 42 | 812 tokens/s | accepted 1,024 | rejected 3 (stale 3) | 2 to upload | generating`.
        """
        parts = [
            f"policy {self.policy_version if self.policy_version >= 0 else '-'} of {self.head}"
            if self.head >= 0
            else "no policy yet",
            f"{self.tokens_per_s:,.0f} tokens/s",
            f"accepted {self.rollouts_accepted:,}",
        ]
        if self.refused:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.refused.items()))
            parts.append(f"rejected {sum(self.refused.values()):,} ({reasons})")
        if self.bundles_in_escrow:
            parts.append(f"{self.bundles_in_escrow} in escrow")
        if self.bundles_spooled:
            parts.append(f"{self.bundles_spooled} to upload")
        if self.coordinator_away_s is not None:
            parts.append(f"coordinator unreachable for {self.coordinator_away_s:.0f} s")
        elif self.paused:
            parts.append(f"paused {self.paused}")
        elif self.waiting_for:
            parts.append(f"waiting: {self.waiting_for}")
        else:
            parts.append(self.state.value)
        return " | ".join(parts)


def write_status(path: Path, status: Status) -> None:
    """Replace the status file atomically.

    Not durable, as it describes only the present; a full disk does not stop the work either.
    """
    try:
        replace(path, f"{json.dumps(dataclasses.asdict(status), indent=1)}\n".encode())
    except OSError as error:
        log.warning("status %s: %s", path, error)


def read_status(path: Path) -> Status:
    """Read a worker's latest status. Raises LocalError if the file holds none."""
    try:
        return _STATUS.validate_json(read_regular(path, bytes_max=STATUS_BYTES_MAX))
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}") from None
    except ValidationError:
        raise LocalError(f"{path} is not a worker's status file; is it another program's file?") from None


_STATUS = TypeAdapter(Status)


REASONS = {
    RejectReason.STALE: "too late: the step was trained, or the policy was too old",
    RejectReason.FUTURE: "for a step or a policy that does not exist yet",
    RejectReason.LEASE_EXPIRED: "too late: the lease had ended",
    RejectReason.DUPLICATE: "sent before for the same lease",
    RejectReason.WRONG_POLICY: "by another policy than the lease names",
    RejectReason.WRONG_ASSIGNMENT: "other problems or seeds than assigned",
    RejectReason.WRONG_CONTEXT: "a turn does not continue the dialogue",
    RejectReason.INCOMPLETE: "the environment failed on this machine",
    RejectReason.TOKEN_OUT_OF_RANGE: "a token outside the vocabulary",
    RejectReason.BAD_TERMINATION: "an answer ends at the wrong place",
    RejectReason.LOGPROB_MISMATCH: "log probabilities are not those of the policy",
    RejectReason.SEED_MISMATCH: "tokens are not those that the seeds choose",
    RejectReason.PROOF_MISMATCH: "hidden states are not those of the policy",
    RejectReason.EQUIVOCATION: "two different answers to one lease",
    RejectReason.COPIED: "text of an earlier answer",
    RejectReason.STATISTICAL: "all evidence together contradicts the policy",
    RejectReason.IMPLAUSIBLE: "tokens are not plausible for the policy",
    RejectReason.MALFORMED: "not as the protocol describes",
    RejectReason.BANNED: "this key was banned meanwhile",
    RejectReason.UNPROVEN: "in escrow when another bundle was found dishonest",
    RejectReason.UNVERIFIABLE: "no validator could check them",
}
"""Reason of a rejection -> what is wrong with the rollouts."""


def reason_in_words(reason: str) -> str:
    """Return what is wrong with rollouts. A reason that this release does not know is returned with spaces."""
    return REASONS[RejectReason(reason)] if reason in REASONS else reason.replace("_", " ")


def speed_now(status: Status) -> float:
    """Return the tokens per second of a worker that generates; 0 while it does not. The status has the last measured speed."""
    return status.tokens_per_s if doing(status)[0] in ("Generating", "Finishing", "No answer") else 0.0


def doing(status: Status) -> tuple[str, str]:
    """Return what a worker does in a word, and a sentence on it.

    Example: ("Paused", "It computes nothing until 22:00, as its hours are 22:00-07:00.").
    """
    if status.ended:
        return "Ended", f"The worker has ended: {status.ended}."
    if status.coordinator_away_s is not None:
        away = f"The coordinator has not answered for {status.coordinator_away_s:.0f} s."
        return "No answer", f"{away} Finished work stays on this disk, and is uploaded once it answers."
    if status.state is WorkerState.DRAINING:
        return "Finishing", "It takes no new work, finishes and uploads what it has, and leaves the run."
    if status.paused == ON_REQUEST:
        return "Paused", "It was paused on request, and computes nothing until it is resumed."
    if status.paused:
        return "Paused", f"It computes nothing {status.paused}."
    if status.waiting_for:
        return "Waiting", f"It waits: {status.waiting_for}."
    if status.state is WorkerState.GENERATING:
        return "Generating", f"It generates answers for step {status.step:,} with policy {status.policy_version:,}."
    if status.state is WorkerState.FETCHING:
        return "Fetching", f"It fetches policy {status.head:,}." if status.head >= 0 else "It fetches the first policy."
    return "Ready", "It asks for the next work."
