"""The records of slots: of a step, of an evaluation, and of the groups that fill them. See records.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from prime_node.algo.estimates import Mark
from prime_node.carrier import carrier
from prime_protocol.schedule import StalenessFrom


@carrier(frozen=True, slots=True)
class AcceptedGroup:
    """The accepted group of a slot."""

    worker: str
    policy_version: int
    bundle: str
    first: int
    """Index of its first completion in the bundle."""
    rewards: tuple[float, ...]
    oldest_version: int | None = None
    """Oldest policy that sampled a token; None: the leased policy_version sampled all of them."""
    end_version: int | None = None
    """Oldest policy that sampled a last token; None: the leased policy_version sampled all of them."""
    order: int = 0
    """Number of groups that were accepted before it."""
    unscored: tuple[int, ...] = ()
    """Completions that could not be scored, counted inside the group. They are not trained on."""
    logprobs: str = ""
    """Parcel of a validator's logprobs of the bundle; empty if it was not audited."""

    def counted_from(self, staleness_from: StalenessFrom) -> int:
        """Return the policy that its staleness is counted from."""
        if self.oldest_version is None or self.end_version is None or staleness_from is StalenessFrom.START:
            return self.policy_version
        return self.oldest_version if staleness_from is StalenessFrom.OLDEST else self.end_version


@dataclass(slots=True)
class StepSlots:
    """The R slots of one step. Each is open, held (by leases and pending bundles), or accepted."""

    open: list[int]
    """Slots that wait to be leased, descending: the lowest is the last, and is leased first."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Slot -> times leased."""
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Slot -> the leases that hold it: open ones and those with a pending bundle."""
    accepted: dict[int, AcceptedGroup] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    """Slot -> the step whose batch took it."""
    bundles: list[str] = field(default_factory=list)
    """Bundles whose bytes are deleted with the step."""
    fixed: bool = False
    """Whether the trainer has got all its slots."""


@dataclass(slots=True)
class Evaluation(StepSlots):
    """The slots of one evaluation. They move like those of a step and are never trained."""

    num_slots: int = 0
    retired: bool = False
    """Whether its policy is too old to be leased: returned slots stay closed."""


@carrier(frozen=True, slots=True)
class Results:
    """The results of an evaluation."""

    num_slots: int
    """Problems asked."""
    marks: dict[int, Mark]
    """Marks by slot, of the answered problems."""
