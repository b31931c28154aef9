"""Agreement of validators on the same bundle. Soft state: after a restart, pending bundles are judged from the start.

For two check times after it, convictions wait for all validators of the run: the first to come back convicts no worker alone.

A verdict that would be a strike, or whose evidence would ban its worker, is held while another validator of the same engine
class is active. That validator judges the bundle too. (Different arithmetic may see less without a contradiction.) If both
convict, the verdict is final. If they contradict each other, a third validator decides; without one the bundle is unverifiable,
which is no strike, and the operator is notified. So no worker is banned by one validator's verdict that another one denies.

A held bundle that no other validator judges in time, or that all others call unverifiable, is rejected as unverifiable too. That
is no strike: one validator's verdict neither helps nor harms its worker. Each validator that was asked and did not answer is
counted. After UNANSWERED_MAX times in a row, strikes do not wait for that validator any more, except for one try every
RETRY_CHECKS check times, until it answers on a held bundle or on a second look. So a validator that is broken, or sides with
cheats, shields few of them. If only one validator of a class is active, its verdict is enough.

A verdict that raises its worker's evidence to SUSPICIOUS_NATS or more is held, too: otherwise one validator could raise it so far
that the next honest verdict bans. Then the lesser evidence counts, or none if no other validator answers.

A second validator also judges a share of the accepted bundles, after the verdict, which it does not change. This finds a
validator that accepts what another rejects. It is one of the same class, or of any class if no other one of that class works.

A validator's class is only its claim. Classes that the run's calibration does not know count as one with all others, and so
does every later claim of a validator that has claimed two classes. So no invented class keeps a second validator away.

validator_pairs.py counts how often the validators of one class convict.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from prime_node.coordinator.state import copies, suspicion
from prime_node.coordinator.state.records import PendingBundle, State
from prime_node.coordinator.validator_pairs import ValidatorPairs
from prime_protocol.requests import CheckResultRequest
from prime_protocol.verdict import RejectReason, Verdict

log = logging.getLogger(__name__)

CONTRADICTIONS_MAX = 32
"""Newest contradictions kept."""
LOOKS_MAX = 64
"""Accepted bundles that wait for a second look."""
UNANSWERED_MAX = 3
"""Held bundles in a row that a validator leaves unanswered before verdicts stop waiting for it."""
RETRY_CHECKS = 20
"""Interval, in check times, at which one held bundle waits for such a validator anyway."""
UNCONFIRMED = "one validator rejected it, and the validator asked to confirm did not answer; see the coordinator's log"
CONTRADICTED = "two validators disagree about it; see the coordinator's log"
SUSPICIOUS_NATS = math.log(10.0)


@dataclass(frozen=True, slots=True)
class Opinion:
    """One validator's result for a bundle."""

    validator: str
    result: CheckResultRequest
    convicts: bool
    """Whether it would be a strike or a ban."""
    suspects: bool = False
    """Whether its evidence raises the worker's to SUSPICIOUS_NATS or more."""

    @property
    def says(self) -> str:
        """The verdict in words, for the log and the status."""
        verdict = self.result.verdict
        return str(verdict.reason or ("accepted, with evidence for a ban" if self.convicts else "accepted"))


@dataclass(slots=True)
class Look:
    """An accepted bundle that a second validator has to judge."""

    pending: PendingBundle
    first: Opinion
    asked: tuple[str, ...]
    """Validators that may judge it."""
    until_s: float


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Contradicting verdicts of validators on one bundle."""

    bundle: str
    worker: str
    said: tuple[tuple[str, str], ...]
    """Pairs of a validator and its verdict."""
    at_ms: int


@dataclass(slots=True)
class HeldVerdict:
    """A bundle whose verdict waits for another validator's."""

    until_s: float
    waited_for: list[str]
    """Validators that have not answered yet."""
    opinions: list[Opinion] = field(default_factory=list)
    handed: set[str] = field(default_factory=set)
    """Validators that got the bundle because it is held."""


@dataclass(slots=True)
class Silence:
    """Counts of the held bundles that one validator left unanswered."""

    total: int = 0
    in_a_row: int = 0
    retry_s: float = 0.0
    """Time from which a bundle waits for this validator again, if `in_a_row` is UNANSWERED_MAX or more."""


@dataclass(slots=True)
class Agreement:
    """Comparison of validators. `check_s` is the time that a validator has for a bundle."""

    check_s: float
    known_classes: Collection[str] = ()
    """Classes of validators' engines that the run's calibration knows."""
    looks: dict[str, Look] = field(default_factory=dict)
    """Second looks by bundle."""
    contradictions: deque[Contradiction] = field(default_factory=lambda: deque(maxlen=CONTRADICTIONS_MAX))
    num_contradictions: int = 0
    _held: dict[str, HeldVerdict] = field(default_factory=dict)
    """Held verdicts by bundle."""
    _silent: dict[str, Silence] = field(default_factory=dict)
    """Unanswered counts by validator."""
    _heard: dict[str, float] = field(default_factory=dict)
    """Validator -> time of its last request or answer."""
    _classes: dict[str, str] = field(default_factory=dict)
    """Validator -> class of its engine that its evidence claims; empty once it has claimed another one."""
    _pairs: ValidatorPairs = field(default_factory=ValidatorPairs)
    _expected: tuple[str, ...] = ()
    """Validators that were at work before a restart, as far as is known, ..."""
    _expected_until_s: float = 0.0
    """... and the time until which convictions wait for them."""

    def expect(self, validators: Collection[str], now_s: float) -> None:
        """Wait for these validators after a restart, whether or not they come back."""
        self._expected, self._expected_until_s = tuple(validators), now_s + 2 * self.check_s

    def heard(self, validator: str, now_s: float, result: CheckResultRequest | None = None) -> None:
        """Record that a validator asked for work, or answered with `result` for a bundle that it was handed.

        `now_s` may be later than now: until then a validator works and may be silent.
        """
        self._heard[validator] = max(now_s, self._heard.get(validator, now_s))
        if result is None or result.evidence is None:
            return
        claimed = result.evidence.validator
        before = self._classes.setdefault(validator, claimed)
        if before not in (claimed, ""):
            self._classes[validator] = ""
            log.warning(
                "validator %s claimed engine class %s and now %s: it counts as every class until the coordinator "
                "restarts; check its configuration",
                validator,
                before,
                claimed,
            )

    def class_of(self, validator: str) -> str | None:
        """Return the engine class that a validator has claimed; None before its first evidence, empty after two classes."""
        return self._classes.get(validator)

    def may_judge(self, bundle: str, validator: str) -> bool:
        """Return whether a bundle waits for this validator too. A validator gets a held bundle once."""
        if (held := self._held.get(bundle)) is not None:
            return validator in held.waited_for and validator not in held.handed
        look = self.looks.get(bundle)
        return look is None or validator in look.asked

    def handed(self, bundle: str, validator: str) -> None:
        """Record that a validator got a bundle."""
        if (held := self._held.get(bundle)) is not None:
            held.handed.add(validator)

    def others(self, than: str, now_s: float) -> list[str]:
        """Return the other active validators of the same class."""
        return [one for one in self.active_others(than, now_s) if self._is_like(one, than)]

    def active_others(self, than: str, now_s: float) -> list[str]:
        """Return the other active validators, of any class."""
        recent_s = now_s - 2 * self.check_s
        return [one for one, at_s in self._heard.items() if one != than and at_s >= recent_s]

    def opinion(self, state: State, worker: str, validator: str, result: CheckResultRequest) -> Opinion:
        """Return a validator's result as an opinion: whether it convicts the worker."""
        reason, pending = result.verdict.reason, state.bundles.get(result.bundle)
        before, after = (suspicion.log_after(state, worker, one) for one in (None, result.evidence))
        convicts = after > before and after >= math.log(state.rules.evidence_max)
        if reason is not None:
            convicts |= reason.is_dishonest
        elif pending is not None and result.fingerprints:  # it names a copy, of this bundle or of another one
            earlier = copies.found_earlier(state, pending, result.fingerprints)
            convicts |= earlier is not None or bool(copies.found_later(state, pending, result.fingerprints))
        return Opinion(validator, result, convicts, after > before and after >= SUSPICIOUS_NATS)

    def conclude(
        self,
        mine: Opinion,
        worker: str,
        now_s: float,
        now_ms: int,
        *,
        tokens_s: float = 0.0,
        nats: Callable[[Opinion], float] = lambda opinion: 0.0,
    ) -> Opinion | None:
        """Return the opinion that decides a pending bundle; None if another validator has to be asked first.

        `tokens_s` is the time that its tokens add to `check_s`, `nats` the worker's evidence after an opinion; the least decides.
        """
        bundle = mine.result.bundle
        until_s = now_s + 2 * (self.check_s + tokens_s)
        if (held := self._held.get(bundle)) is None:
            waited_for = self._to_confirm(mine.validator, now_s) if mine.convicts or mine.suspects else []
            if not waited_for:
                return mine
            self._held[bundle] = HeldVerdict(until_s, waited_for, [mine])
            return None
        if mine.validator not in held.waited_for:  # a repeated answer
            return None
        held.waited_for.remove(mine.validator)
        if mine.result.verdict.reason is RejectReason.UNVERIFIABLE:
            self._left(mine.validator, now_s)
        elif not self._is_like(mine.validator, held.opinions[0].validator):  # it was asked before it named its class
            self._answered(mine.validator)
            if len(held.opinions) == 1 and not held.waited_for:
                del self._held[bundle]
                return held.opinions[0]
        else:
            self._answered(mine.validator)
            held.opinions.append(mine)
            convicting = [one for one in held.opinions if one.convicts]
            denying = [one for one in held.opinions if not one.convicts]
            if convicting and denying:
                self._note(bundle, worker, held.opinions, now_ms)
            if max(len(convicting), len(denying)) > 1:
                del self._held[bundle]
                return min(convicting if len(convicting) > 1 else denying, key=nats)
        held.until_s = until_s
        return None if held.waited_for else self.settle(bundle, now_s)

    def settle(self, bundle: str, now_s: float) -> Opinion:
        """Return the verdict on a held bundle that no other validator judged: unverifiable, or the first without its evidence."""
        held = self._held.pop(bundle)
        for validator in [one for one in held.waited_for if one in held.handed] or held.waited_for:
            self._left(validator, now_s)
        if not any(one.convicts for one in held.opinions):
            first = held.opinions[0]
            return replace(first, result=first.result.model_copy(update={"evidence": None}))
        detail = UNCONFIRMED if len(held.opinions) == 1 else CONTRADICTED
        unverifiable = Verdict.refuse(RejectReason.UNVERIFIABLE, detail)
        return Opinion("", CheckResultRequest(bundle=bundle, verdict=unverifiable, rewards=()), False)

    def has_answered(self, bundle: str, validator: str) -> bool:
        """Return whether a validator has judged a bundle that still waits for another validator's verdict."""
        if (held := self._held.get(bundle)) is not None:
            return any(one.validator == validator for one in held.opinions) or (
                validator in held.handed and validator not in held.waited_for
            )
        look = self.looks.get(bundle)
        return look is not None and look.first.validator == validator

    def is_held(self, bundle: str) -> bool:
        """Return whether the bundle's verdict is held."""
        return bundle in self._held

    def overdue(self, now_s: float) -> list[str]:
        """Return the held bundles that no other validator has judged in time. Drop second looks that no validator takes."""
        for bundle in [bundle for bundle, look in self.looks.items() if look.until_s < now_s]:
            del self.looks[bundle]
        return [bundle for bundle, held in self._held.items() if held.until_s < now_s]

    def look_again(self, pending: PendingBundle, first: Opinion, now_s: float, *, tokens_s: float = 0.0) -> bool:
        """Schedule a second look at an accepted bundle. Return whether there is room and another validator for it.

        `tokens_s` is the time that the bundle's tokens add to `check_s`.
        """
        asked = self.others(first.validator, now_s) or self.active_others(first.validator, now_s)
        if len(self.looks) >= LOOKS_MAX or not asked:
            return False
        self.looks[pending.bundle] = Look(pending, first, tuple(asked), now_s + 4 * (self.check_s + tokens_s))
        return True

    def looked(self, mine: Opinion, *, exact_rewards: bool, now_ms: int) -> Contradiction | None:
        """Compare a second validator's result for an accepted bundle with the first one's."""
        look = self.looks.pop(mine.result.bundle)
        theirs, reason = look.first.result, mine.result.verdict.reason
        if reason is RejectReason.UNVERIFIABLE or mine.validator == look.first.validator:
            return None
        self._answered(mine.validator)
        if not mine.convicts and (not exact_rewards or reason is not None or mine.result.rewards == theirs.rewards):
            return None
        return self._note(mine.result.bundle, look.pending.lease.worker, [look.first, mine], now_ms)

    def count(self, mine: Opinion, now_s: float) -> str:
        """Count an audited bundle's verdict. Return a message when two validators begin to differ, else an empty string."""
        evidence = mine.result.evidence
        is_suspicious = evidence is not None and any(
            log_e >= SUSPICIOUS_NATS for sums in evidence.sums.values() for log_e in sums.log_e
        )
        return self._pairs.count(
            mine.validator, self.others(mine.validator, now_s), convicts=mine.convicts, is_suspicious=is_suspicious
        )

    def as_row(self) -> dict[str, Any]:
        """Return the row for the status."""
        return {
            "num_contradictions": self.num_contradictions,
            "contradictions": [
                {"bundle": one.bundle, "worker": one.worker, "said": dict(one.said), "at_ms": one.at_ms}
                for one in self.contradictions
            ],
            "differing": self._pairs.differing(),
            "unanswered": [
                {
                    "validator": validator,
                    "total": silence.total,
                    "in_a_row": silence.in_a_row,
                    "waited_for": silence.in_a_row < UNANSWERED_MAX,
                }
                for validator, silence in self._silent.items()
            ],
        }

    def _to_confirm(self, first: str, now_s: float) -> list[str]:
        """Return the validators that a conviction by this one waits for. Start the next interval for one whose retry is due."""
        found = []
        expected = self._expected if now_s < self._expected_until_s else ()
        expected = tuple(one for one in expected if one != first and self._is_like(one, first))
        for validator in dict.fromkeys((*self.others(first, now_s), *expected)):
            silence = self._silent.get(validator)
            if silence is None or silence.in_a_row < UNANSWERED_MAX:
                found.append(validator)
            elif silence.retry_s <= now_s:
                silence.retry_s = now_s + RETRY_CHECKS * self.check_s
                found.append(validator)
        return found

    def _answered(self, validator: str) -> None:
        if validator in self._silent:
            self._silent[validator].in_a_row = 0

    def _left(self, validator: str, now_s: float) -> None:
        """Record that a validator left a held bundle unanswered."""
        silence = self._silent.setdefault(validator, Silence())
        silence.total += 1
        silence.in_a_row += 1
        silence.retry_s = now_s + RETRY_CHECKS * self.check_s
        if silence.in_a_row == UNANSWERED_MAX:
            log.warning(
                "validator %s left %d held bundles in a row unanswered: strikes no longer wait for it; read its log",
                validator,
                silence.in_a_row,
            )

    def _is_like(self, validator: str, other: str) -> bool:
        mine, theirs = self._classes.get(validator, ""), self._classes.get(other, "")
        return mine == theirs or mine not in self.known_classes or theirs not in self.known_classes

    def _note(self, bundle: str, worker: str, opinions: Collection[Opinion], at_ms: int) -> Contradiction:
        found = Contradiction(bundle, worker, tuple((one.validator, one.says) for one in opinions), at_ms)
        if not any(one.bundle == bundle for one in self.contradictions):
            self.num_contradictions += 1
            self.contradictions.append(found)
        return found
