"""Events: the facts that the coordinator's state is folded from.

An event states what was decided, not what was requested: a lease event names its slots. So a release with another scheduler
replays the log to the same state. The log stores each event's time, which is an argument of `tick`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from prime_node.broadcast.routes import UpdateRoute
from prime_node.carrier import carrier
from prime_node.coordinator.state.curriculum import Rating
from prime_node.coordinator.state.persons import MachineRevoked, PersonBanned, PersonUnbanned
from prime_node.coordinator.state.records import Claim, JoiningLimits
from prime_protocol.evidence import BundleEvidence, Weighed
from prime_protocol.verdict import RejectReason


@carrier(frozen=True, slots=True)
class WorkerJoined:
    """Event: a key joins, for the first time or again. Its open leases lapse."""

    worker: str
    name: str
    software: str
    engine: str
    rollouts_max: int
    network: str = ""
    """Keyed hash of the network that the worker joined from; empty: a network that the operator trusts."""
    invite: str = ""
    hardware: str = ""
    session: str = ""
    person: str = ""
    """Person whose delegation it joined with; empty: none."""
    delegated_until_ms: int = 0
    """End of that delegation."""
    type: Literal["worker_joined"] = "worker_joined"


@carrier(frozen=True, slots=True)
class SpeedClaimed:
    """Event: a worker without any bundle claims its speed."""

    worker: str
    claim: Claim
    type: Literal["speed_claimed"] = "speed_claimed"


@carrier(frozen=True, slots=True)
class WorkerLeft:
    """Event: a worker left. Its open leases lapse."""

    worker: str
    type: Literal["worker_left"] = "worker_left"


@carrier(frozen=True, slots=True)
class WorkersLost:
    """Event: workers were silent for too long. Their open leases lapse; they may join again."""

    workers: tuple[str, ...]
    type: Literal["workers_lost"] = "workers_lost"


@carrier(frozen=True, slots=True)
class WorkerBanned:
    """Event: the operator bans a worker. A ban by strikes follows from a verdict, without an event of its own."""

    worker: str
    reason: str
    type: Literal["worker_banned"] = "worker_banned"


@carrier(frozen=True, slots=True)
class WorkerUnbanned:
    """Event: the operator lifts a worker's ban and clears its strikes."""

    worker: str
    type: Literal["worker_unbanned"] = "worker_unbanned"


@carrier(frozen=True, slots=True)
class LeaseGranted:
    """Event: a worker gets a lease on some slots of one step."""

    lease_id: str
    worker: str
    step: int
    policy_version: int
    policy_digest: str
    slots: tuple[int, ...]
    expires_at_ms: int
    draws: tuple[int, ...] = ()
    """Draw of each slot (curriculum.py); empty if all have their first."""
    remembered: int = 64
    """Ended leases that the worker keeps (endings.py)."""
    prompts: str = ""
    """Digest of the prompts, if the run commits to them."""
    type: Literal["lease_granted"] = "lease_granted"


@carrier(frozen=True, slots=True)
class LeaseReturned:
    """Event: a worker returns a lease; it cannot be redeemed any more."""

    lease_id: str
    cancelled: bool = False
    """Whether no batch could take its groups any more."""
    type: Literal["lease_returned"] = "lease_returned"


@carrier(frozen=True, slots=True)
class EpisodesFailed:
    """Event: the environment of slots failed on a worker.

    The worker returned its lease for that, or its bundle was rejected (failing.py).
    """

    worker: str
    slots: tuple[int, ...]
    is_judged: bool = False
    """Whether a validator's environment failed as well."""
    type: Literal["episodes_failed"] = "episodes_failed"


@carrier(frozen=True, slots=True)
class LeasesExpired:
    """Event: leases expired, or their worker does not know of them. They lapse."""

    lease_ids: tuple[str, ...]
    type: Literal["leases_expired"] = "leases_expired"


@carrier(frozen=True, slots=True)
class BundleArrived:
    """Event: a bundle is durable and redeems its lease; it waits for a verdict."""

    bundle: str
    lease_id: str
    worker: str
    num_rollouts: int
    num_bytes: int
    audited: bool = True
    """Whether a validator makes a forward pass for it."""
    seeded: bool = True
    """Whether its engine claims to sample by the assigned seeds."""
    engine_class: str = ""
    """Class of the engine that its header names."""
    type: Literal["bundle_arrived"] = "bundle_arrived"


@carrier(frozen=True, slots=True)
class BundleTurnedAway:
    """Event: a signed bundle arrived too late for its lease and was rejected. Its bytes are not kept, its receipt is."""

    bundle: str
    lease_id: str
    worker: str
    num_rollouts: int
    reason: RejectReason
    detail: str
    type: Literal["bundle_turned_away"] = "bundle_turned_away"


@carrier(frozen=True, slots=True)
class Replaced:
    """The evidence in an accepted bundle's receipt, which the receipt that replaces it states again."""

    bundle: str
    weighed: Weighed | None


@carrier(frozen=True, slots=True)
class BundleContradicted:
    """Event: a worker signed a second, different bundle for a redeemed lease.

    An honest worker keeps the bytes of the first, so it never does this.
    """

    lease_id: str
    worker: str
    other: str
    """The second bundle. Its bytes are not kept, its signed header is."""
    replaced: tuple[Replaced, ...] = ()
    """The first bundle's receipt, if it was accepted."""
    type: Literal["bundle_contradicted"] = "bundle_contradicted"


@carrier(frozen=True, slots=True)
class VerdictGiven:
    """Event: a validator's verdict, or UNVERIFIABLE by the coordinator if no validator answered."""

    bundle: str
    reason: RejectReason | None
    """Reason of the rejection; None: accepted."""
    detail: str
    rewards: tuple[float, ...]
    num_tokens: int
    validator: str
    versions: tuple[tuple[int, int], ...] = ()
    """Per group of an accepted bundle, the oldest policy of its tokens and of its last tokens; empty: the lease's own."""
    unscored: tuple[int, ...] = ()
    """Completions of an accepted bundle that could not be scored; their rewards are 0."""
    evidence: BundleEvidence | None = None
    """Evidence of its tokens against the worker, if a forward pass was made."""
    fingerprints: tuple[tuple[int, str], ...] = ()
    """Slots of an accepted bundle and the fingerprints of their text (copies.py)."""
    replaced: tuple[Replaced, ...] = ()
    """Receipts of accepted bundles that this one shows to be copies."""
    logprobs: str = ""
    """Parcel of the validator's own logprobs of an accepted bundle; empty if it made none."""
    unjudged: bool = False
    """Whether all attempts passed without a validator's verdict, or the worker's engine class has no calibration."""
    type: Literal["verdict_given"] = "verdict_given"


@carrier(frozen=True, slots=True)
class EscrowReleased:
    """Event: the run ends and all bundles of these workers are judged: their escrow is credited."""

    workers: tuple[str, ...]
    type: Literal["escrow_released"] = "escrow_released"


@carrier(frozen=True, slots=True)
class BatchFixed:
    """Event: the trainer got the next batch of a step. The batch is final."""

    step: int
    slots: tuple[int, ...]
    chosen_after: int = 0
    """Event in whose state the batch was chosen: its bytes were read since. 0: unknown."""
    rules: int = 1
    """CHOICE_RULES of the release that chose it (batches.py)."""
    type: Literal["batch_fixed"] = "batch_fixed"


@carrier(frozen=True, slots=True)
class GroupsDropped:
    """Event: accepted groups became too old before a batch took them: their slots are leased again."""

    slots: tuple[int, ...]
    rules: int = 1
    """CHOICE_RULES of the release that dropped them."""
    type: Literal["groups_dropped"] = "groups_dropped"


@carrier(frozen=True, slots=True)
class GroupsLost:
    """Event: the stored bytes of accepted groups were damaged or lost before a batch took them: their slots are leased again."""

    slots: tuple[int, ...]
    type: Literal["groups_lost"] = "groups_lost"


@carrier(frozen=True, slots=True)
class GroupsRated:
    """Event: accepted groups were put into difficulty pools; filtered groups are dropped and their slots leased again."""

    step: int
    ratings: tuple[Rating, ...]
    type: Literal["groups_rated"] = "groups_rated"


@carrier(frozen=True, slots=True)
class ExamplesLifted:
    """Event: examples return from the easy and hard pools to the normal one."""

    examples: tuple[str, ...]
    type: Literal["examples_lifted"] = "examples_lifted"


@carrier(frozen=True, slots=True)
class TrainerDurable:
    """Event: the trainer would resume at this step: data of earlier steps may be deleted."""

    step: int
    type: Literal["trainer_durable"] = "trainer_durable"


@carrier(frozen=True, slots=True)
class ManifestPublished:
    """Event: the next policy is published."""

    policy_version: int
    digest: str
    routes: tuple[UpdateRoute, ...]
    """Encodings of the policy."""
    type: Literal["manifest_published"] = "manifest_published"


@carrier(frozen=True, slots=True)
class EvaluationBegun:
    """Event: workers are to evaluate a published policy (evaluations.py)."""

    policy_version: int
    slots: tuple[int, ...]
    """Slots after the run's last one; assignments.py maps them to problems."""
    type: Literal["evaluation_begun"] = "evaluation_begun"


@carrier(frozen=True, slots=True)
class EncodingsForgotten:
    """Event: the bytes of old encodings are being deleted. Their manifests stay."""

    encodings: tuple[tuple[int, int | None], ...]
    """Policy version and base version of each."""
    type: Literal["encodings_forgotten"] = "encodings_forgotten"


@carrier(frozen=True, slots=True)
class DrainSet:
    """Event: the operator drains the run: no new leases, outstanding bundles are still accepted."""

    type: Literal["drain_set"] = "drain_set"


@carrier(frozen=True, slots=True)
class RunPaused:
    """Event: the operator pauses the run, or gives another reason: no new leases until it resumes."""

    reason: str
    type: Literal["run_paused"] = "run_paused"


@carrier(frozen=True, slots=True)
class RunResumed:
    """Event: the operator resumes the run."""

    type: Literal["run_resumed"] = "run_resumed"


@carrier(frozen=True, slots=True)
class JoiningLimited:
    """Event: the operator limits who joins from now on. All limits are replaced."""

    limits: JoiningLimits
    type: Literal["joining_limited"] = "joining_limited"


@carrier(frozen=True, slots=True)
class CalibrationAdded:
    """Event: an amendment of the calibration is in force. Its bytes are in the published folder."""

    version: int
    digest: str
    type: Literal["calibration_added"] = "calibration_added"


Event = (
    WorkerJoined
    | SpeedClaimed
    | WorkerLeft
    | WorkersLost
    | WorkerBanned
    | WorkerUnbanned
    | PersonBanned
    | PersonUnbanned
    | MachineRevoked
    | LeaseGranted
    | LeaseReturned
    | EpisodesFailed
    | LeasesExpired
    | BundleArrived
    | BundleTurnedAway
    | BundleContradicted
    | VerdictGiven
    | EscrowReleased
    | BatchFixed
    | GroupsDropped
    | GroupsLost
    | GroupsRated
    | ExamplesLifted
    | TrainerDurable
    | ManifestPublished
    | EvaluationBegun
    | EncodingsForgotten
    | DrainSet
    | RunPaused
    | RunResumed
    | JoiningLimited
    | CalibrationAdded
)

_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])
event_from_json: Callable[[str], Event] = _EVENT.validator.validate_json
"""Function that returns an event of our own log. A pydantic ValidationError means that another release wrote the log."""


def event_to_json(event: Event) -> str:
    """Return the event as JSON for the log."""
    return _EVENT.dump_json(event).decode()
