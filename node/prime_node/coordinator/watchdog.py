"""The watchdog: warns when nothing moves, and names what the run waits for. Every wait has a deadline or a named waker."""

from __future__ import annotations

from dataclasses import dataclass

from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state.blockers import waits_for


@dataclass(slots=True)
class Blockers:
    """What the run waits for."""

    decisions: Decisions
    environment_fault: str = ""
    """Error of the last attempt to make a problem into a prompt; empty if it succeeded."""

    def reasons(self) -> list[str]:
        """Describe what the run waits for, the operator's own tasks first."""
        fault = [f"the operator: {self.environment_fault}"] if self.environment_fault else []
        return [*fault, *waits_for(self.decisions.state)]


@dataclass(slots=True)
class Watchdog:
    """Warns once for each `quiet_seconds` in which no bundle was settled, no batch given and no policy published."""

    blockers: Blockers
    quiet_seconds: float
    _seen: tuple[int, ...] = ()
    _since_s: float = 0.0

    def look(self, now_s: float) -> str | None:
        """Return the warning for the operator, if any."""
        state = self.blockers.decisions.state
        moved = (state.head, state.accepted, sum(state.refused.values()), sum(map(len, state.batches.values())))
        if moved != self._seen:
            self._seen, self._since_s = moved, now_s
            return None
        if now_s - self._since_s < self.quiet_seconds or not (waits := self.blockers.reasons()):
            return None
        self._since_s = now_s
        return f"the run has made no progress for {self.quiet_seconds:.0f} s. Waiting for: {'; '.join(waits)}"
