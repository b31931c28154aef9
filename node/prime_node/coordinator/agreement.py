"""Whether validators say the same of the same bundle. Soft state: after a restart what waited is judged from the start.

A verdict that would be a strike, or whose evidence would ban its worker, is held while another validator of the same class of
engine is at work, and the bundle goes to that one: another arithmetic may see less and contradict nobody. Where both say so,
the verdict stands. Where they contradict each other, a third validator decides; without one the bundle is unverifiable, which
is no strike, and the operator is told who said what. So nobody is banned by the word of one validator that another one denies.
Where no other one answers in time, the verdict stands unconfirmed.

A share of the accepted bundles is judged by a second validator as well, after the verdict, which it does not change: a validator
that accepts what another refuses is found so.

Validators take bundles from one queue, so what two of one class find is alike but for chance. For each pair, the coordinator
counts how often either convicts, and how often either finds evidence of 10 to 1, while both are at work. They differ where two
shares explain the counts DIFFER_FACTOR times as well as one does (both uniform beforehand).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_node.coordinator.state import suspicion
from prime_node.coordinator.state.records import PendingBundle, State
from prime_protocol.messages import CheckResultRequest
from prime_protocol.verdict import RejectReason, Verdict

TOLD_MAX = 32
"""Contradictions that are remembered."""
LOOKS_MAX = 64
"""Accepted bundles that wait for a second look."""
PAIRS_MAX = 256
"""Pairs of validators whose verdicts are counted."""
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
class Counts:
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
    _held: dict[str, tuple[list[Opinion], float]] = field(default_factory=dict)
    """Bundle -> opinions, and until when another one is waited for."""
    _heard: dict[str, float] = field(default_factory=dict)
    """Validator -> when it last asked or answered."""
    _classes: dict[str, str] = field(default_factory=dict)
    """Validator -> class of its engine, by its last evidence."""
    _pairs: dict[tuple[str, str], dict[str, Counts]] = field(default_factory=dict)

    def heard(self, validator: str, now_s: float, result: CheckResultRequest | None = None) -> None:
        """A validator asked for work, or answered with this."""
        self._heard[validator] = now_s
        if result is not None and result.evidence is not None:
            self._classes[validator] = result.evidence.validator

    def may_judge(self, bundle: str, validator: str) -> bool:
        """Whether a bundle waits for this validator's word too."""
        asked = self.asked(bundle)
        return not asked or (validator not in asked and self._is_like(validator, asked[0]))

    def others(self, than: Sequence[str], now_s: float) -> list[str]:
        """Other validators that are at work, of the class of the first of these."""
        recent_s = now_s - 2 * self.check_s
        return [
            one
            for one, at_s in self._heard.items()
            if one not in than and at_s >= recent_s and self._is_like(one, than[0])
        ]

    def opinion(self, state: State, worker: str, validator: str, result: CheckResultRequest) -> Opinion:
        reason = result.verdict.reason
        known = state.workers.get(worker)
        bans = known is not None and suspicion.would_ban(state.rules, known, result.evidence)
        return Opinion(validator, result, (reason is not None and reason.is_dishonest) or bans)

    def conclude(self, mine: Opinion, worker: str, now_s: float, now_ms: int) -> Opinion | None:
        """By which opinion a waiting bundle is decided. None: another validator is to be asked first (`asked`)."""
        bundle = mine.result.bundle
        opinions, _ = self._held.get(bundle, ([], 0.0))
        if any(one.validator == mine.validator for one in opinions):
            return None
        if opinions and mine.result.verdict.reason is RejectReason.UNVERIFIABLE:
            return self.settle(bundle)
        opinions = [*opinions, mine]
        convicting = [one for one in opinions if one.convicts]
        if not convicting:
            return self._decided(bundle, mine)
        if len(opinions) > 1 and len(convicting) == len(opinions):
            return self._decided(bundle, opinions[0])
        if len(opinions) > 1:
            self._note(bundle, worker, opinions, now_ms)
        if len(opinions) > 2:
            majority = convicting if len(convicting) > 1 else [one for one in opinions if not one.convicts]
            return self._decided(bundle, majority[0])
        self._held[bundle] = opinions, now_s + 2 * self.check_s
        return None if self.others(self.asked(bundle), now_s) else self.settle(bundle)

    def asked(self, bundle: str) -> tuple[str, ...]:
        """Validators that have judged a held bundle, or one that is looked at again."""
        if bundle in self.looks:
            return (self.looks[bundle].first.validator,)
        return tuple(one.validator for one in self._held.get(bundle, ([], 0.0))[0])

    def settle(self, bundle: str) -> Opinion:
        """By which opinion a held bundle is decided where nobody else answers."""
        opinions, _ = self._held.pop(bundle)
        if len(opinions) == 1:
            return opinions[0]
        detail = "two validators contradict each other on it; the operator is told"
        unverifiable = Verdict.refuse(RejectReason.UNVERIFIABLE, detail)
        return Opinion("", CheckResultRequest(bundle=bundle, verdict=unverifiable, rewards=()), False)

    def is_held(self, bundle: str) -> bool:
        return bundle in self._held

    def overdue(self, now_s: float) -> list[str]:
        """Held bundles that nobody else has judged in time. Forgets second looks that nobody takes."""
        for bundle in [bundle for bundle, look in self.looks.items() if look.until_s < now_s]:
            del self.looks[bundle]
        return [bundle for bundle, (_, until_s) in self._held.items() if until_s < now_s]

    def look_again(self, pending: PendingBundle, first: Opinion, now_s: float) -> bool:
        """Whether an accepted bundle is to be judged once more."""
        if len(self.looks) >= LOOKS_MAX or not self.others((first.validator,), now_s):
            return False
        self.looks[pending.bundle] = Look(pending, first, now_s + 4 * self.check_s)
        return True

    def looked(self, mine: Opinion, *, exact_rewards: bool, now_ms: int) -> Contradiction | None:
        """Compare a second validator's word on an accepted bundle with the first one's."""
        look = self.looks.pop(mine.result.bundle)
        theirs, reason = look.first.result, mine.result.verdict.reason
        if reason is RejectReason.UNVERIFIABLE or mine.validator == look.first.validator:
            return None
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
        for other in self.others((mine.validator,), now_s):
            key = (min(mine.validator, other), max(mine.validator, other))
            if key not in self._pairs and len(self._pairs) >= PAIRS_MAX:
                continue
            pair = self._pairs.setdefault(key, {key[0]: Counts(), key[1]: Counts()})
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
        }

    def _is_like(self, validator: str, other: str) -> bool:
        return self._classes.get(validator, "") == self._classes.get(other, "")

    def _decided(self, bundle: str, opinion: Opinion) -> Opinion:
        self._held.pop(bundle, None)
        return opinion

    def _note(self, bundle: str, worker: str, opinions: Collection[Opinion], at_ms: int) -> Contradiction:
        found = Contradiction(bundle, worker, tuple((one.validator, one.says) for one in opinions), at_ms)
        if not any(one.bundle == bundle for one in self.contradictions):
            self.num_contradictions += 1
            self.contradictions.append(found)
        return found


def _differ(first: Counts, second: Counts) -> str:
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
