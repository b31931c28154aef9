"""The queue of bundles that wait for a verdict. Soft state: rebuilt from the state after a restart.

A bundle goes to one validator at a time, with a deadline; after it, to the next one. The deadline leaves time for the most
tokens that the lease allows, not for those of the bundle: else a worker could make its bundles too large to audit.

Only the validator that has a bundle may give a verdict: its own choice of bundles would let it accept all those of an
accomplice. A late verdict counts until another validator has taken the bundle. A bundle that several validators left unanswered
is not handed out any more: it may be what stops them.
agreement.py says which validator may judge a bundle again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from prime_protocol.assignment import Lease
from prime_protocol.run_spec import RunSpec

COMPARED_FACTOR = 4
"""Factor on a validator's time if rewards are compared: it has to sample the completions for the comparison."""
LOOK_AHEAD_MAX = 256
"""Pending bundles that are searched for one whose policy the validator holds."""
TOKENS_PER_S = 1_000.0
"""Assumed speed of a validator's forward passes before any was measured."""
TOKENS_PER_S_MIN = 100.0
"""Minimum of the assumed speed. A slower validator fits `check_seconds` to its speed."""
SPEED_WEIGHT = 0.1
"""Weight of a measurement below the assumed speed. A faster one replaces it: the rest of the time was waiting."""
TOKENS_FACTOR = 4.0
"""Factor on the time for the tokens: long completions are slower than short ones, and other bundles may come first."""
SESSIONS_KNOWN_MAX = 16
"""Newest sessions of a validator that are known: as many machines may share its key."""
TOKENS_S_MAX = 1_800.0
"""Maximum time for the tokens: a validator that has ended holds its bundles for as long."""


def lease_tokens_max(lease: Lease, spec: RunSpec) -> int:
    """Return the maximum number of tokens in the forward pass of a bundle for this lease."""
    environments = {one.name: one for one in spec.environments}
    total = 0
    for group in lease.groups:
        environment = environments[group.problem.environment]
        turn = len(group.prompt_token_ids) + lease.sampling.completion_tokens_max
        if environment.turns_max > 1:
            turn = spec.context_tokens_max(environment)
        total += len(group.seeds) * environment.turns_max * turn
    return total


@dataclass(slots=True)
class CheckQueue:
    """The queue, in order of arrival. Times are monotonic."""

    check_s: float
    attempts_max: int
    _waiting: dict[str, int] = field(default_factory=dict)
    """Bundle -> its policy."""
    _handed: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Bundle -> (deadline, its policy)."""
    _attempts: dict[str, int] = field(default_factory=dict)
    _holders: dict[str, str] = field(default_factory=dict)
    """Bundle -> validator that took it last."""
    _taken_s: dict[str, float] = field(default_factory=dict)
    """Bundle -> time at which that validator first took it."""
    _tokens_s: dict[str, float] = field(default_factory=dict)
    """Bundle -> seconds that its holder has for its tokens."""
    _speeds: dict[str, float] = field(default_factory=dict)
    """Validator -> assumed tokens per second."""
    _sessions: dict[str, list[str]] = field(default_factory=dict)
    """Validator -> its newest sessions."""

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
        tokens_max: Callable[[str], int] = lambda bundle: 0,
    ) -> str | None:
        """Hand out a bundle: the oldest of these policies, or else the oldest.

        Consider only bundles that this validator may judge. `tokens_max` is the maximum number of tokens in the bundle's
        forward pass. The deadline follows from it and from the other bundles that the validator has.
        """
        head = [bundle for bundle, _ in zip(self._waiting, range(LOOK_AHEAD_MAX), strict=False) if may(bundle)]
        if not head:
            return None
        bundle = next((bundle for bundle in head if self._waiting[bundle] in policy_versions), head[0])
        tokens_s = TOKENS_FACTOR * tokens_max(bundle) / self._speeds.get(validator, TOKENS_PER_S)
        before_s = sum(self._tokens_s[other] for other in self._handed if self._holders[other] == validator)
        self._tokens_s[bundle] = min(tokens_s, TOKENS_S_MAX)
        due_s = now_s + self.check_s + min(before_s + tokens_s, TOKENS_S_MAX)
        self._handed[bundle] = (due_s, self._waiting.pop(bundle))
        self._attempts[bundle] = self._attempts.get(bundle, 0) + 1
        if self._holders.get(bundle) != validator or bundle not in self._taken_s:
            self._taken_s[bundle] = now_s
        self._holders[bundle] = validator
        return bundle

    def begin(self, validator: str, session: str) -> bool:
        """Put the bundles of a validator's earlier process back in front if this one is new. Return whether there were any.

        They are not lost until their deadline, which may be half an hour away. Each still counts as an attempt: it may be
        what stops the validator.
        """
        known = self._sessions.setdefault(validator, [])
        if not session or session in known:
            return False
        self._sessions[validator] = [*known[1 - SESSIONS_KNOWN_MAX :], session]
        mine = [bundle for bundle in self._handed if self._holders[bundle] == validator]
        back = {bundle: self._handed.pop(bundle)[1] for bundle in mine} if known else {}
        self._waiting = {**back, **self._waiting} if back else self._waiting
        return bool(back)

    def due_s(self, bundle: str) -> float:
        """Return the deadline of a bundle that is handed out."""
        return self._handed[bundle][0]

    def tokens_s(self, bundle: str) -> float:
        """Return the seconds that the bundle's tokens add to `check_s`; 0 before it is handed out."""
        return self._tokens_s.get(bundle, 0.0)

    def measure(self, bundle: str, num_tokens: int, now_s: float) -> None:
        """Record the time that a bundle's holder took for a forward pass of `num_tokens` completion tokens."""
        validator = self._holders[bundle]
        found = num_tokens / max(now_s - self._taken_s[bundle], 0.001)
        before = self._speeds.get(validator, TOKENS_PER_S)
        speed = found if found > before else before + SPEED_WEIGHT * (found - before)
        self._speeds[validator] = max(speed, TOKENS_PER_S_MIN)

    def is_held_by(self, bundle: str, validator: str) -> bool:
        """Return whether this validator was the last to take the bundle, which has no verdict since."""
        return self._holders.get(bundle) == validator

    def overdue(self, now_s: float) -> list[str]:
        """Put bundles whose deadline has passed back in front. Return those that were handed out too often.

        Their holders get twice the time for tokens from then on.
        """
        late = [(bundle, policy_version) for bundle, (due_s, policy_version) in self._handed.items() if due_s <= now_s]
        again, given_up = {}, []
        for bundle, policy_version in late:
            del self._handed[bundle]
            holder = self._holders[bundle]
            self._speeds[holder] = max(self._speeds.get(holder, TOKENS_PER_S) / 2, TOKENS_PER_S_MIN)
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
            self._taken_s.pop(bundle, None)
            self._tokens_s.pop(bundle, None)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._handed)
