"""Events: the facts that the coordinator's state is folded from.

An event says what has been decided, not what was asked: a lease event names its slots. So a release with another
scheduler replays the log to the same state. Time is logged beside each event and is an argument of `tick`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from prime_node.broadcast.follow.paths import UpdateRoute
from prime_node.coordinator.state.carrier import carrier
from prime_node.coordinator.state.curriculum import Rating
from prime_node.coordinator.state.records import Claim
from prime_protocol.evidence import BundleEvidence, Weighed
from prime_protocol.verdict import RejectReason


@carrier(frozen=True, slots=True)
class WorkerJoined:
    """A key takes part, for the first time or again. Its open leases from before lapse."""

    worker: str
    name: str
    software: str
    engine: str
    rollouts_max: int
    network: str = ""
    """Where from, as a keyed hash; empty: a network that the operator trusts."""
    invite: str = ""
    hardware: str = ""
    session: str = ""
    type: Literal["worker_joined"] = "worker_joined"


@carrier(frozen=True, slots=True)
class SpeedClaimed:
    """A worker that has brought nothing yet says how fast it is."""

    worker: str
    claim: Claim
    type: Literal["speed_claimed"] = "speed_claimed"


@carrier(frozen=True, slots=True)
class WorkerLeft:
    """A worker said goodbye. Its open leases lapse."""

    worker: str
    type: Literal["worker_left"] = "worker_left"


@carrier(frozen=True, slots=True)
class WorkersLost:
    """Workers that were silent for too long. Their open leases lapse; they may join again."""

    workers: tuple[str, ...]
    type: Literal["workers_lost"] = "workers_lost"


@carrier(frozen=True, slots=True)
class WorkerBanned:
    """The operator bans a worker. (A ban by strikes follows from a verdict and needs no event of its own.)"""

    worker: str
    reason: str
    type: Literal["worker_banned"] = "worker_banned"


@carrier(frozen=True, slots=True)
class WorkerUnbanned:
    """The operator forgives a worker: ban and strikes are gone."""

    worker: str
    type: Literal["worker_unbanned"] = "worker_unbanned"


@carrier(frozen=True, slots=True)
class LeaseGranted:
    """Some slots of one step are promised to a worker."""

    lease_id: str
    worker: str
    step: int
    policy_version: int
    policy_digest: str
    slots: tuple[int, ...]
    expires_at_ms: int
    draws: tuple[int, ...] = ()
    """Which problem each slot is (curriculum.py); empty: those it was before, the first at first."""
    remembered: int = 64
    """How many of its worker's ended leases are kept (endings.py)."""
    type: Literal["lease_granted"] = "lease_granted"


@carrier(frozen=True, slots=True)
class LeaseReturned:
    """A worker hands a lease back; it cannot be redeemed any more."""

    lease_id: str
    type: Literal["lease_returned"] = "lease_returned"


@carrier(frozen=True, slots=True)
class EpisodesFailed:
    """Slots whose environment failed on a worker: it handed its lease back for that, or its bundle was refused (failing.py)."""

    worker: str
    slots: tuple[int, ...]
    is_judged: bool = False
    """A validator's environment failed as well."""
    type: Literal["episodes_failed"] = "episodes_failed"


@carrier(frozen=True, slots=True)
class LeasesExpired:
    """Leases whose time is up, or that their worker does not know of. They lapse."""

    lease_ids: tuple[str, ...]
    type: Literal["leases_expired"] = "leases_expired"


@carrier(frozen=True, slots=True)
class BundleArrived:
    """A bundle is durable and redeems its lease; it waits for a verdict."""

    bundle: str
    lease_id: str
    worker: str
    num_rollouts: int
    num_bytes: int
    audited: bool = True
    """A validator makes a forward pass for it."""
    seeded: bool = True
    """Its engine says that it samples by the assigned seeds."""
    type: Literal["bundle_arrived"] = "bundle_arrived"


@carrier(frozen=True, slots=True)
class BundleTurnedAway:
    """A signed bundle came too late for its lease. Its bytes are not kept, its receipt is."""

    bundle: str
    lease_id: str
    worker: str
    num_rollouts: int
    reason: RejectReason
    detail: str
    type: Literal["bundle_turned_away"] = "bundle_turned_away"


@carrier(frozen=True, slots=True)
class Replaced:
    """An accepted bundle's receipt that may be replaced: what it says of evidence is said by the next one too."""

    bundle: str
    weighed: Weighed | None


@carrier(frozen=True, slots=True)
class BundleContradicted:
    """A worker signed a second, other bundle for a lease that one had redeemed. No honest worker does: it keeps the bytes."""

    lease_id: str
    worker: str
    other: str
    """The second one. Its bytes are not kept, its signed header is."""
    replaced: tuple[Replaced, ...] = ()
    """The first one's receipt, where it was accepted."""
    type: Literal["bundle_contradicted"] = "bundle_contradicted"


@carrier(frozen=True, slots=True)
class VerdictGiven:
    """What a validator found, or UNVERIFIABLE by the coordinator where no validator answered."""

    bundle: str
    reason: RejectReason | None
    """None: accepted."""
    detail: str
    rewards: tuple[float, ...]
    num_tokens: int
    validator: str
    versions: tuple[tuple[int, int], ...] = ()
    """For each group of an accepted bundle the oldest policy of its tokens and of its last tokens; empty: the lease's own."""
    unscored: tuple[int, ...] = ()
    """Completions of an accepted bundle that could not be scored; their rewards are 0."""
    evidence: BundleEvidence | None = None
    """What its tokens say against the worker, where a forward pass was made."""
    fingerprints: tuple[tuple[int, str], ...] = ()
    """Of an accepted bundle: slots, and what was said in them (copies.py)."""
    replaced: tuple[Replaced, ...] = ()
    """The receipts of accepted bundles that turn out to be copies by it."""
    logprobs: str = ""
    """Parcel of the validator's own logprobs of an accepted bundle; empty where it made none."""
    type: Literal["verdict_given"] = "verdict_given"


@carrier(frozen=True, slots=True)
class SuretyReleased:
    """The run ends, and all work of these workers is judged: what is withheld of them is credited."""

    workers: tuple[str, ...]
    type: Literal["surety_released"] = "surety_released"


@carrier(frozen=True, slots=True)
class BatchFixed:
    """The trainer was given a batch of a step, its next one. It never changes from now on."""

    step: int
    slots: tuple[int, ...]
    type: Literal["batch_fixed"] = "batch_fixed"


@carrier(frozen=True, slots=True)
class GroupsDropped:
    """Accepted groups became too old before a batch took them: their slots are leased again."""

    slots: tuple[int, ...]
    type: Literal["groups_dropped"] = "groups_dropped"


@carrier(frozen=True, slots=True)
class GroupsRated:
    """Accepted groups were put into difficulty pools; those that are filtered are thrown away and their slots leased again."""

    step: int
    ratings: tuple[Rating, ...]
    type: Literal["groups_rated"] = "groups_rated"


@carrier(frozen=True, slots=True)
class ExamplesLifted:
    """Pooled examples are drawn again."""

    examples: tuple[str, ...]
    type: Literal["examples_lifted"] = "examples_lifted"


@carrier(frozen=True, slots=True)
class TrainerDurable:
    """The trainer would resume at this step: what earlier steps trained on may be forgotten."""

    step: int
    type: Literal["trainer_durable"] = "trainer_durable"


@carrier(frozen=True, slots=True)
class ManifestPublished:
    """The next policy is out."""

    policy_version: int
    digest: str
    routes: tuple[UpdateRoute, ...]
    """Its encodings."""
    type: Literal["manifest_published"] = "manifest_published"


@carrier(frozen=True, slots=True)
class EvaluationBegun:
    """A published policy is to be evaluated by the workers (evaluations.py)."""

    policy_version: int
    slots: tuple[int, ...]
    """Beyond the run's; which problems they are, assignments.py says."""
    type: Literal["evaluation_begun"] = "evaluation_begun"


@carrier(frozen=True, slots=True)
class EncodingsForgotten:
    """Old encodings whose bytes are being deleted. Their manifests stay."""

    encodings: tuple[tuple[int, int | None], ...]
    """Policy version and base version."""
    type: Literal["encodings_forgotten"] = "encodings_forgotten"


@carrier(frozen=True, slots=True)
class DrainSet:
    """The operator lets the run drain: nothing is leased, everything out is taken in."""

    type: Literal["drain_set"] = "drain_set"


Event = (
    WorkerJoined
    | SpeedClaimed
    | WorkerLeft
    | WorkersLost
    | WorkerBanned
    | WorkerUnbanned
    | LeaseGranted
    | LeaseReturned
    | EpisodesFailed
    | LeasesExpired
    | BundleArrived
    | BundleTurnedAway
    | BundleContradicted
    | VerdictGiven
    | SuretyReleased
    | BatchFixed
    | GroupsDropped
    | GroupsRated
    | ExamplesLifted
    | TrainerDurable
    | ManifestPublished
    | EvaluationBegun
    | EncodingsForgotten
    | DrainSet
)

_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


def event_to_json(event: Event) -> str:
    return _EVENT.dump_json(event).decode()


def event_from_json(payload: str) -> Event:
    """An event of our own log. A pydantic ValidationError means that the log was written by another release."""
    return _EVENT.validate_json(payload)
