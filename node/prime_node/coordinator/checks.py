"""The queue of bundles that wait for a verdict. Soft state: rebuilt from the state after a restart.

A bundle goes to one validator at a time, with a deadline; after it, to the next one. Only the validator that has it may give a
verdict: its own choice of bundles would let it accept all those of an accomplice. A late verdict counts until another validator
has taken the bundle. A bundle that several validators left unanswered is not handed out any more: it may be what stops them.
agreement.py says which validator may judge a bundle again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

COMPARED_FACTOR = 4
"""Factor on a validator's time if rewards are compared: it has to sample the completions for the comparison."""
LOOK_AHEAD_MAX = 256
"""Pending bundles that are searched for one whose policy the validator holds."""


@dataclass(slots=True)
class CheckQueue:
    """The queue, in order of arrival. Times are monotonic."""

    check_s: float
    attempts_max: int
    _waiting: dict[str, int] = field(default_factory=dict)
    """Bundle -> its policy."""
    _handed: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Bundle -> (deadline, its policy), the earliest deadline first."""
    _attempts: dict[str, int] = field(default_factory=dict)
    _holders: dict[str, str] = field(default_factory=dict)
    """Bundle -> validator that took it last."""

    def add(self, bundle: str, policy_version: int) -> None:
        """Append a bundle."""
        self._waiting[bundle] = policy_version

    def again(self, bundle: str, policy_version: int) -> None:
        """Put a bundle at the front, to be judged again."""
        self.settled([bundle])
        self._waiting = {bundle: policy_version, **self._waiting}

    def take(
        self,
        policy_versions: Collection[int],
        now_s: float,
        *,
        validator: str = "",
        may: Callable[[str], bool] = lambda bundle: True,
    ) -> str | None:
        """Hand out a bundle whose verdict is due in `check_s`: the oldest of these policies, or else the oldest.

        Consider only bundles that this validator may judge.
        """
        head = [bundle for bundle, _ in zip(self._waiting, range(LOOK_AHEAD_MAX), strict=False) if may(bundle)]
        if not head:
            return None
        bundle = next((bundle for bundle in head if self._waiting[bundle] in policy_versions), head[0])
        self._handed[bundle] = (now_s + self.check_s, self._waiting.pop(bundle))
        self._attempts[bundle] = self._attempts.get(bundle, 0) + 1
        self._holders[bundle] = validator
        return bundle

    def is_held_by(self, bundle: str, validator: str) -> bool:
        """Return whether this validator was the last to take the bundle, which has no verdict since."""
        return self._holders.get(bundle) == validator

    def overdue(self, now_s: float) -> list[str]:
        """Put bundles whose deadline has passed back in front. Return those that were handed out too often."""
        late = []
        for bundle, (deadline_s, policy_version) in self._handed.items():
            if deadline_s > now_s:
                break
            late.append((bundle, policy_version))
        again, given_up = {}, []
        for bundle, policy_version in late:
            del self._handed[bundle]
            if self._attempts[bundle] < self.attempts_max:
                again[bundle] = policy_version
            else:
                given_up.append(bundle)
        self._waiting = {**again, **self._waiting} if again else self._waiting
        return given_up

    def settled(self, bundles: Iterable[str]) -> None:
        """Remove bundles that have a verdict."""
        for bundle in bundles:
            self._waiting.pop(bundle, None)
            self._handed.pop(bundle, None)
            self._attempts.pop(bundle, None)
            self._holders.pop(bundle, None)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._handed)
