"""Staleness of a completion at the step that trains it, if it may span several policies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prime_protocol.rollout import Rollouts
from prime_protocol.schedule import Schedule, StalenessFrom, StalePolicy


@dataclass(frozen=True, slots=True)
class Versions:
    """The policies of one rollout. Example: Versions(start=3, oldest=3, end=5)."""

    start: int
    """Leased policy."""
    oldest: int
    """Oldest policy that sampled a token."""
    end: int
    """Policy that sampled the last token."""

    def counted_from(self, staleness_from: StalenessFrom) -> int:
        """Return the policy from which staleness is counted."""
        return {StalenessFrom.START: self.start, StalenessFrom.OLDEST: self.oldest, StalenessFrom.END: self.end}[
            staleness_from
        ]


def versions_of(rollouts: Rollouts, *, start: int) -> list[Versions]:
    """Return the policies of each rollout of a bundle whose lease named `start`."""
    num = rollouts.num_rollouts
    oldest_N: npt.NDArray[np.int64] = np.full(num, np.iinfo(np.int64).max)
    end_N = np.zeros(num, np.int64)
    of_S, version_S = rollouts.rollout_numbers[rollouts.spans_S3[:, 0]], rollouts.spans_S3[:, 1]
    np.minimum.at(oldest_N, of_S, version_S.astype(np.int64))
    end_N[of_S] = version_S  # spans are in order: the last one of each completion stays
    return [Versions(start, oldest, end) for oldest, end in zip(oldest_N.tolist(), end_N.tolist(), strict=True)]


def masked(versions: Sequence[Versions], schedule: Schedule, *, step: int) -> tuple[bool, ...]:
    """Return for each completion whether it is too old to train on at `step` (StalePolicy.MASK)."""
    lag_max = schedule.max_off_policy_steps
    if schedule.stale is not StalePolicy.MASK or lag_max is None:
        return (False,) * len(versions)
    return tuple(step - each.counted_from(schedule.staleness_from) > lag_max for each in versions)
