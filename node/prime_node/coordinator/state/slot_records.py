"""The records of slots: those of a step, those of an evaluation, and what fills them. See records.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from prime_node.algo.estimates import Mark
from prime_node.coordinator.state.carrier import carrier
from prime_protocol.schedule import StalenessFrom


@carrier(frozen=True, slots=True)
class AcceptedGroup:
    """A slot's group."""

    worker: str
    policy_version: int
    bundle: str
    first: int
    """Index of its first completion in the bundle."""
    rewards: tuple[float, ...]
    oldest_version: int | None = None
    """The oldest policy that sampled a token; None: policy_version, the one leased, sampled them all."""
    end_version: int | None = None
    """The oldest policy that sampled a last token; None likewise."""
    order: int = 0
    """How many groups had been accepted before."""
    unscored: tuple[int, ...] = ()
    """Completions, counted inside the group, that could not be scored: they are not trained on."""
    logprobs: str = ""
    """Parcel of a validator's logprobs of the bundle; empty where it was not audited."""

    def counted_from(self, staleness_from: StalenessFrom) -> int:
        """The policy that its staleness is counted from."""
        if self.oldest_version is None or self.end_version is None or staleness_from is StalenessFrom.START:
            return self.policy_version
        return self.oldest_version if staleness_from is StalenessFrom.OLDEST else self.end_version


@dataclass(slots=True)
class StepSlots:
    """The R slots of one step. Each is open, held (by leases and bundles without a verdict), or accepted."""

    open: list[int]
    """Slots that wait to be leased, descending: the lowest, which is leased first, is the last."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Slot -> times leased."""
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Slot -> the leases that hold it: open ones and those whose bundle waits for a verdict."""
    accepted: dict[int, AcceptedGroup] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    """Slot -> the step that it was given to the trainer for."""
    bundles: list[str] = field(default_factory=list)
    """Bundles whose bytes are deleted with the step."""
    fixed: bool = False
    """All its slots have been given to the trainer."""


@dataclass(slots=True)
class Evaluation(StepSlots):
    """The slots of one evaluation, which move like those of a step and are never trained."""

    num_slots: int = 0
    retired: bool = False
    """Its policy is too old to be leased: what comes back stays closed."""


@carrier(frozen=True, slots=True)
class Results:
    """What an evaluation gave."""

    num_slots: int
    """Problems that were asked."""
    marks: dict[int, Mark]
    """By slot, of those that were answered."""
