"""The watchdog: warns when nothing moves, and names what the run waits for. Every wait has a deadline or a named waker."""

from __future__ import annotations

from dataclasses import dataclass

from prime_node.coordinator.core import Core
from prime_node.coordinator.state.blockers import waits_for


def waiting(core: Core) -> list[str]:
    """Describe what the run waits for, the operator's own tasks first."""
    fault = [f"the operator: {core.environment_fault}"] if core.environment_fault else []
    return [*fault, *waits_for(core.state)]


@dataclass(slots=True)
class Watchdog:
    """Warns once for each `quiet_seconds` in which no bundle was settled, no batch given and no policy published."""

    quiet_seconds: float
    _seen: tuple[int, ...] = ()
    _since_s: float = 0.0

    def look(self, core: Core, now_s: float) -> str | None:
        """Return the warning for the operator, if any."""
        state = core.state
        moved = (state.head, state.accepted, sum(state.refused.values()), sum(map(len, state.batches.values())))
        if moved != self._seen:
            self._seen, self._since_s = moved, now_s
            return None
        if now_s - self._since_s < self.quiet_seconds or not (waits := waiting(core)):
            return None
        self._since_s = now_s
        return f"nothing has moved for {self.quiet_seconds:.0f} s. Waiting for: {'; '.join(waits)}"
