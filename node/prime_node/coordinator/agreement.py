"""Whether validators say the same of the same bundle. Soft state: after a restart what waited is judged from the start.

A verdict that would be a strike, or whose evidence would ban its worker, is held while another validator of the same class of
engine is at work, and the bundle goes to that one: another arithmetic may see less and contradict nobody. Where both say so,
the verdict stands. Where they contradict each other, a third validator decides; without one the bundle is unverifiable, which
is no strike, and the operator is told who said what. So nobody is banned by the word of one validator that another one denies.

A held bundle that no other validator judges in time, or that all others call unverifiable, is refused as unverifiable too, which
is no strike: its worker gains nothing and loses nothing by the word of one. Each validator that was asked and gave no word is
counted. After UNANSWERED_MAX times in a row, strikes no longer wait for that validator, but for one try in each RETRY_CHECKS
check times, until it gives its word on a held bundle or on a second look. So a validator that is broken, or sides with cheats,
shields few of them. Where one validator of a class is at work, its word is enough.

A share of the accepted bundles is judged by a second validator as well, after the verdict, which it does not change: a validator
that accepts what another refuses is found so.

Validators take bundles from one queue, so what two of one class find is alike but for chance. For each pair, the coordinator
counts how often either convicts, and how often either finds evidence of 10 to 1, while both are at work. They differ where two
shares explain the counts DIFFER_FACTOR times as well as one does (both uniform beforehand).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from prime_node.coordinator.state import copies, suspicion
from prime_node.coordinator.state.records import PendingBundle, State
from prime_protocol.messages import CheckResultRequest
from prime_protocol.verdict import RejectReason, Verdict

log = logging.getLogger(__name__)

TOLD_MAX = 32
"""Contradictions that are remembered."""
LOOKS_MAX = 64
"""Accepted bundles that wait for a second look."""
PAIRS_MAX = 256
"""Pairs of validators whose verdicts are counted."""
UNANSWERED_MAX = 3
"""A validator that left so many held bundles in a row without a word is no longer waited for."""
RETRY_CHECKS = 20
"""In check times: how often one held bundle waits for such a validator all the same."""
UNCONFIRMED = "one validator found a fault, and another one that was asked gave no word; the operator is told"
CONTRADICTED = "two validators contradict each other on it; the operator is told"
DIFFER_FACTOR = 1e4
SUSPICIOUS_NATS = math.log(10.0)


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one validator says of a bundle."""

    validator: str
    result: CheckResultRequest
    convicts: bool
    """It would be a strike or a ban."""

    @property
    def says(self) -> str:
        verdict = self.result.verdict
        return str(verdict.reason or ("accepted, with evidence for a ban" if self.convicts else "accepted"))


@dataclass(slots=True)
class Look:
    """An accepted bundle that a second validator is to judge."""

    pending: PendingBundle
    first: Opinion
    until_s: float


@dataclass(frozen=True, slots=True)
class Contradiction:
    bundle: str
    worker: str
    said: tuple[tuple[str, str], ...]
    """Validator and what it says."""
    at_ms: int


@dataclass(slots=True)
class HeldVerdict:
    """A bundle whose verdict waits for another validator's word."""

    until_s: float
    waited_for: list[str]
    """Validators whose word is waited for; one that has answered is removed."""
    opinions: list[Opinion] = field(default_factory=list)
    handed: set[str] = field(default_factory=set)
    """Validators that were given the bundle because it is held."""


@dataclass(slots=True)
class Silence:
    """Held bundles that one validator left without a word."""

    total: int = 0
    in_a_row: int = 0
    retry_s: float = 0.0
    """When a bundle waits for this validator again, where `in_a_row` is UNANSWERED_MAX or more."""


@dataclass(slots=True)
class VerdictCounts:
    """What one validator of a pair found while the other was at work."""

    judged: int = 0
    convicted: int = 0
    suspicious: int = 0


@dataclass(slots=True)
class Agreement:
    """`check_s`: how long a validator has for a bundle."""

    check_s: float
    looks: dict[str, Look] = field(default_factory=dict)
    """By bundle."""
    contradictions: deque[Contradiction] = field(default_factory=lambda: deque(maxlen=TOLD_MAX))
    num_contradictions: int = 0
    _held: dict[str, HeldVerdict] = field(default_factory=dict)
    """By bundle."""
    _silent: dict[str, Silence] = field(default_factory=dict)
    """By validator."""
    _heard: dict[str, float] = field(default_factory=dict)
    """Validator -> when it last asked or answered."""
    _classes: dict[str, str] = field(default_factory=dict)
    """Validator -> class of its engine, by its last evidence."""
    _pairs: dict[tuple[str, str], dict[str, VerdictCounts]] = field(default_factory=dict)

    def heard(self, validator: str, now_s: float, result: CheckResultRequest | None = None) -> None:
        """A validator asked for work, or answered with this."""
        self._heard[validator] = now_s
        if result is not None and result.evidence is not None:
            self._classes[validator] = result.evidence.validator

    def may_judge(self, bundle: str, validator: str) -> bool:
        """Whether a bundle waits for this validator's word too. A validator is given a held one once."""
        if (held := self._held.get(bundle)) is not None:
            return validator in held.waited_for and validator not in held.handed
        look = self.looks.get(bundle)
        return look is None or (validator != look.first.validator and self._is_like(validator, look.first.validator))

    def handed(self, bundle: str, validator: str) -> None:
        """A validator was given a bundle."""
        if (held := self._held.get(bundle)) is not None:
            held.handed.add(validator)

    def others(self, than: str, now_s: float) -> list[str]:
        """Other validators that are at work, of the same class as this one."""
        recent_s = now_s - 2 * self.check_s
        return [
            one for one, at_s in self._heard.items() if one != than and at_s >= recent_s and self._is_like(one, than)
        ]

    def opinion(self, state: State, worker: str, validator: str, result: CheckResultRequest) -> Opinion:
        reason, pending = result.verdict.reason, state.bundles.get(result.bundle)
        known = state.workers.get(worker)
        convicts = known is not None and suspicion.would_ban(state.rules, known, result.evidence)
        if reason is not None:
            convicts |= reason.is_dishonest
        elif pending is not None and result.fingerprints:  # it names a copy, of this bundle or of another one
            earlier = copies.found_earlier(state, pending, result.fingerprints)
            convicts |= earlier is not None or bool(copies.found_later(state, pending, result.fingerprints))
        return Opinion(validator, result, convicts)

    def conclude(self, mine: Opinion, worker: str, now_s: float, now_ms: int) -> Opinion | None:
        """By which opinion a waiting bundle is decided. None: another validator is to be asked first."""
        bundle = mine.result.bundle
        if (held := self._held.get(bundle)) is None:
            waited_for = self._to_confirm(mine.validator, now_s) if mine.convicts else []
            if not waited_for:
                return mine
            self._held[bundle] = HeldVerdict(now_s + 2 * self.check_s, waited_for, [mine])
            return None
        if mine.validator not in held.waited_for:  # it said so before
            return None
        held.waited_for.remove(mine.validator)
        if mine.result.verdict.reason is RejectReason.UNVERIFIABLE:
            self._left(mine.validator, now_s)
        else:
            self._answered(mine.validator)
            held.opinions.append(mine)
            convicting = [one for one in held.opinions if one.convicts]
            denying = [one for one in held.opinions if not one.convicts]
            if denying:
                self._note(bundle, worker, held.opinions, now_ms)
            if max(len(convicting), len(denying)) > 1:
                del self._held[bundle]
                return max(convicting, denying, key=len)[0]
        held.until_s = now_s + 2 * self.check_s
        return None if held.waited_for else self.settle(bundle, now_s)

    def settle(self, bundle: str, now_s: float) -> Opinion:
        """By which opinion a held bundle is decided where nobody else answers: it is nobody's fault."""
        held = self._held.pop(bundle)
        for validator in [one for one in held.waited_for if one in held.handed] or held.waited_for:
            self._left(validator, now_s)
        detail = UNCONFIRMED if len(held.opinions) == 1 else CONTRADICTED
        unverifiable = Verdict.refuse(RejectReason.UNVERIFIABLE, detail)
        return Opinion("", CheckResultRequest(bundle=bundle, verdict=unverifiable, rewards=()), False)

    def is_held(self, bundle: str) -> bool:
        return bundle in self._held

    def overdue(self, now_s: float) -> list[str]:
        """Held bundles that nobody else has judged in time. Forgets second looks that nobody takes."""
        for bundle in [bundle for bundle, look in self.looks.items() if look.until_s < now_s]:
            del self.looks[bundle]
        return [bundle for bundle, held in self._held.items() if held.until_s < now_s]

    def look_again(self, pending: PendingBundle, first: Opinion, now_s: float) -> bool:
        """Whether an accepted bundle is to be judged once more."""
        if len(self.looks) >= LOOKS_MAX or not self.others(first.validator, now_s):
            return False
        self.looks[pending.bundle] = Look(pending, first, now_s + 4 * self.check_s)
        return True

    def looked(self, mine: Opinion, *, exact_rewards: bool, now_ms: int) -> Contradiction | None:
        """Compare a second validator's word on an accepted bundle with the first one's."""
        look = self.looks.pop(mine.result.bundle)
        theirs, reason = look.first.result, mine.result.verdict.reason
        if reason is RejectReason.UNVERIFIABLE or mine.validator == look.first.validator:
            return None
        self._answered(mine.validator)
        if not mine.convicts and (not exact_rewards or reason is not None or mine.result.rewards == theirs.rewards):
            return None
        return self._note(mine.result.bundle, look.pending.lease.worker, [look.first, mine], now_ms)

    def count(self, mine: Opinion, now_s: float) -> str:
        """Count an audited bundle's verdict; says once of two validators that they differ, else nothing."""
        evidence = mine.result.evidence
        is_suspicious = evidence is not None and any(
            log_e >= SUSPICIOUS_NATS for sums in evidence.sums.values() for log_e in sums.log_e
        )
        said = ""
        for other in self.others(mine.validator, now_s):
            key = (min(mine.validator, other), max(mine.validator, other))
            if key not in self._pairs and len(self._pairs) >= PAIRS_MAX:
                continue
            pair = self._pairs.setdefault(key, {key[0]: VerdictCounts(), key[1]: VerdictCounts()})
            before = _differ(*pair.values())
            counts = pair[mine.validator]
            counts.judged += 1
            counts.convicted += mine.convicts
            counts.suspicious += is_suspicious
            if not before and (how := _differ(*pair.values())):
                said = f"validators {key[0]} and {key[1]} differ: {how}"
        return said

    def as_row(self) -> dict[str, Any]:
        """For the status."""
        return {
            "num_contradictions": self.num_contradictions,
            "contradictions": [
                {"bundle": one.bundle, "worker": one.worker, "said": dict(one.said), "at_ms": one.at_ms}
                for one in self.contradictions
            ],
            "differing": [
                {"validators": list(key), "how": how}
                for key, pair in self._pairs.items()
                if (how := _differ(*pair.values()))
            ],
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
        """Validators that a conviction by this one waits for. Notes that a try that is due takes place now."""
        found = []
        for validator in self.others(first, now_s):
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
        """A validator left a held bundle without a word."""
        silence = self._silent.setdefault(validator, Silence())
        silence.total += 1
        silence.in_a_row += 1
        silence.retry_s = now_s + RETRY_CHECKS * self.check_s
        if silence.in_a_row == UNANSWERED_MAX:
            log.warning(
                "validator %s left %d held bundles in a row without a word: strikes no longer wait for it; read its log",
                validator,
                silence.in_a_row,
            )

    def _is_like(self, validator: str, other: str) -> bool:
        return self._classes.get(validator, "") == self._classes.get(other, "")

    def _note(self, bundle: str, worker: str, opinions: Collection[Opinion], at_ms: int) -> Contradiction:
        found = Contradiction(bundle, worker, tuple((one.validator, one.says) for one in opinions), at_ms)
        if not any(one.bundle == bundle for one in self.contradictions):
            self.num_contradictions += 1
            self.contradictions.append(found)
        return found


def _differ(first: VerdictCounts, second: VerdictCounts) -> str:
    """How the shares of two validators differ; empty where chance explains it."""
    for name in ("convicted", "suspicious"):
        mine, theirs = getattr(first, name), getattr(second, name)
        apart = _log_beta(mine, first.judged - mine) + _log_beta(theirs, second.judged - theirs)
        together = _log_beta(mine + theirs, first.judged + second.judged - mine - theirs)
        if apart - together >= math.log(DIFFER_FACTOR):
            return f"{name} {mine} of {first.judged} and {theirs} of {second.judged}"
    return ""


def _log_beta(hits: int, misses: int) -> float:
    """Log of the chance of this sequence where each share is as likely as any."""
    return math.lgamma(hits + 1) + math.lgamma(misses + 1) - math.lgamma(hits + misses + 2)
