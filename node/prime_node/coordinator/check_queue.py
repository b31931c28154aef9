"""The queue of bundles that wait for a verdict. Soft state: rebuilt from the state after a restart.

A bundle goes to one validator at a time. The bundles that one process of a validator has are a line, in the order in which it
took them. The time of a bundle counts from when it is the first of its line, so no bundle pays for those before it. It is
enough for the most tokens that the lease allows, not for those of the bundle: else a worker could make its bundles too large
to audit. Once the first bundle's time is over, the whole line goes to other validators.

A validator names the bundles in its hands every few seconds (HoldingRequest). A bundle that it does not name for SILENT_S goes
to another one: the process has ended, or has dropped it.

Each bundle that was first in a line when the line was lost has one attempt less: it may be what stops validators. After
several attempts it is not handed out any more. Those behind it lose nothing.

Only the validator that has a bundle may give a verdict: its own choice of bundles would let it accept all those of an
accomplice. A late verdict counts until another validator has taken the bundle.
agreement.py says which validator may judge a bundle again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from prime_protocol.assignment import Problem, TokenIds
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
"""Maximum time for the tokens of one bundle."""
SILENT_S = 45.0
"""Time after which a bundle that its validator does not name goes to another one."""
HELD_S_MAX = 7_200.0
"""Maximum time for which a validator has a bundle, with the time for those before it."""


def lease_tokens_max(prompts: Iterable[tuple[Problem, TokenIds]], spec: RunSpec) -> int:
    """Return the maximum number of tokens in the forward pass of a bundle for a lease of these problems and prompts."""
    environments = {one.name: one for one in spec.environments}
    total = 0
    for problem, prompt_token_ids in prompts:
        environment = environments[problem.environment]
        turn = len(prompt_token_ids) + spec.sampling.completion_tokens_max
        if environment.turns_max > 1:
            turn = spec.context_tokens_max(environment)
        total += spec.rollouts_per_group * environment.turns_max * turn
    return total


@dataclass(slots=True)
class HandedBundle:
    """A bundle that a validator has."""

    policy_version: int
    line: tuple[str, str]
    """Validator and its process."""
    taken_s: float
    named_s: float | None
    """Time at which the validator took it or last named it; None if it names none."""
    first_s: float | None = None
    """Time at which it became the first of its line; None before that."""


@dataclass(slots=True)
class CheckQueue:
    """The queue, in order of arrival. Times are monotonic."""

    check_s: float
    attempts_max: int
    _waiting: dict[str, int] = field(default_factory=dict)
    """Bundle -> its policy."""
    _handed: dict[str, HandedBundle] = field(default_factory=dict)
    """Bundles that validators have, in the order in which they took them."""
    _attempts: dict[str, int] = field(default_factory=dict)
    """Bundle -> lines that were lost while it was their first."""
    _given_up: list[str] = field(default_factory=list)
    """Bundles without further attempts that `overdue` has not returned yet."""
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
        session: str = "",
        names_bundles: bool = False,
        may: Callable[[str], bool] = lambda bundle: True,
        tokens_max: Callable[[str], int] = lambda bundle: 0,
    ) -> str | None:
        """Hand out a bundle: the oldest of these policies, or else the oldest.

        Consider only bundles that this validator may judge. `tokens_max` is the maximum number of tokens in the bundle's
        forward pass. `names_bundles` says whether the validator names the bundles that it has (`named`).
        """
        head = [bundle for bundle, _ in zip(self._waiting, range(LOOK_AHEAD_MAX), strict=False) if may(bundle)]
        if not head:
            return None
        bundle = next((bundle for bundle in head if self._waiting[bundle] in policy_versions), head[0])
        tokens_s = TOKENS_FACTOR * tokens_max(bundle) / self._speeds.get(validator, TOKENS_PER_S)
        self._tokens_s[bundle] = min(tokens_s, TOKENS_S_MAX)
        self._handed[bundle] = HandedBundle(
            self._waiting.pop(bundle), (validator, session), now_s, now_s if names_bundles else None
        )
        if self._holders.get(bundle) != validator or bundle not in self._taken_s:
            self._taken_s[bundle] = now_s
        self._holders[bundle] = validator
        self._lines(now_s)
        return bundle

    def begin(self, validator: str, session: str) -> bool:
        """Put the bundles of a validator's earlier process back in front if this one is new. Return whether there were any."""
        known = self._sessions.setdefault(validator, [])
        if not session or session in known:
            return False
        self._sessions[validator] = [*known[1 - SESSIONS_KNOWN_MAX :], session]
        if not known:
            return False
        lines: dict[tuple[str, str], list[str]] = {}
        for bundle, handed in self._handed.items():
            if handed.line[0] == validator:
                lines.setdefault(handed.line, []).append(bundle)
        self._lose([bundle for line in lines.values() for bundle in line], [line[0] for line in lines.values()])
        return bool(lines)

    def named(self, validator: str, session: str, bundles: Collection[str], now_s: float) -> None:
        """Record that a validator's process has named the bundles that it still has."""
        for bundle in bundles:
            handed = self._handed.get(bundle)
            if handed is not None and handed.line == (validator, session):
                handed.named_s = now_s

    def due_s(self, bundle: str) -> float:
        """Return the time at which a bundle that is handed out goes to another validator at the latest."""
        mine = self._handed[bundle]
        due_s = mine.taken_s
        for other, one in self._handed.items():
            if one.line == mine.line:
                due_s = (due_s if one.first_s is None else one.first_s) + self.check_s + self._tokens_s[other]
            if other == bundle:
                break
        return min(due_s, mine.taken_s + HELD_S_MAX)

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
        """Put bundles of silent validators and of those out of time back in front. Return those without further attempts.

        A validator that is out of time gets twice the time for tokens from then on.
        """
        lost, blamed = [], []
        for (validator, _), line in self._lines(now_s).items():
            if self.due_s(line[0]) <= now_s:
                self._speeds[validator] = max(self._speeds.get(validator, TOKENS_PER_S) / 2, TOKENS_PER_S_MIN)
                lost += line
                blamed.append(line[0])
                continue
            silent = [bundle for bundle in line if self._is_silent(bundle, now_s)]
            lost += silent
            blamed += silent[:1] if len(silent) == len(line) else silent  # a validator that lives has dropped them
        self._lose(lost, blamed)
        given_up, self._given_up = self._given_up, []
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
        return len(self._waiting) + len(self._handed) + len(self._given_up)

    def _lines(self, now_s: float) -> dict[tuple[str, str], list[str]]:
        """Return the bundles of each line. The time of a bundle that has become the first begins."""
        lines: dict[tuple[str, str], list[str]] = {}
        for bundle, handed in self._handed.items():
            line = lines.setdefault(handed.line, [])
            if not line and handed.first_s is None:
                handed.first_s = now_s
            line.append(bundle)
        return lines

    def _is_silent(self, bundle: str, now_s: float) -> bool:
        named_s = self._handed[bundle].named_s
        return named_s is not None and now_s - named_s >= SILENT_S

    def _lose(self, bundles: Collection[str], blamed: Collection[str]) -> None:
        """Put bundles back in front, in their order. Each one that is `blamed` has one attempt less."""
        back = {bundle: self._handed.pop(bundle).policy_version for bundle in bundles}
        for bundle in blamed:
            self._attempts[bundle] = self._attempts.get(bundle, 0) + 1
            if self._attempts[bundle] >= self.attempts_max:
                del back[bundle]
                self._given_up.append(bundle)
        self._waiting = {**back, **self._waiting} if back else self._waiting
