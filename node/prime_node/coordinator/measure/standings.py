"""Standings: the place of each contributor by the tokens that its receipts credit. A person's machines count together.

The numbers are for people. The ledger proves what receipts credit, and it names machines.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.measure.history import RunHistory
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state.persons import machines_of
from prime_node.ports.clock import Clock
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import MachineStanding, Standing
from prime_protocol.visible import printable

RANKED_S = 5.0
"""Seconds between two rankings of all contributors."""
NAME_CHARS_MAX = 64


class Standings:
    """The contributors of a run, in the order of their tokens."""

    def __init__(self, decisions: Decisions, presence: Presence, history: RunHistory, clock: Clock) -> None:
        self._decisions, self._presence, self._history, self._clock = decisions, presence, history, clock
        self._tokens: dict[str, int] = {}
        """Tokens by contributor, the most first."""
        self._ranks: dict[str, int] = {}
        self._until_s = float("-inf")

    def top(self, most: int) -> list[list[Any]]:
        """Return the contributors with the most tokens: key, name of its first machine, tokens, number of its machines."""
        state = self._decisions.state
        rows: list[list[Any]] = []
        for key, num_tokens in islice(self._ranked().items(), most):
            machines = [*machines_of(state, key)] or ([state.workers[key]] if key in state.workers else [])
            name = printable(machines[0].name, NAME_CHARS_MAX) if machines else ""
            rows.append([key, name, num_tokens, max(1, len(machines))])
        return rows

    def standing_of(self, key: str) -> Standing:
        """Return the standing of a person, or of a worker or its person. Raise RemoteError(NOT_FOUND)."""
        state, ranked = self._decisions.state, self._ranked()
        worker = state.workers.get(key)
        if worker is None and key not in state.persons:
            raise RemoteError(ErrorCode.NOT_FOUND, "no worker and no person of this run has this key")
        contributor = key if worker is None else worker.person or key
        machines = [*machines_of(state, contributor)] or ([] if worker is None else [worker])
        return Standing(
            contributor=contributor,
            rank=self._ranks.get(contributor),
            contributors=len(ranked),
            tokens=ranked.get(contributor, 0),
            all_tokens=sum(ranked.values()),
            machines=tuple(
                MachineStanding(
                    worker=one.worker,
                    name=one.name,
                    state=self._presence.doing(one),
                    accepted=one.accepted,
                    refused=sum(one.refused.values()),
                    tokens=self._history.tokens.get(one.worker, 0),
                )
                for one in machines[: limits.PERSON_MACHINES_MAX]
            ),
        )

    def _ranked(self) -> dict[str, int]:
        """Return the tokens of all contributors, a few seconds old at most."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._until_s:
            workers, found = self._decisions.state.workers, dict[str, int]()
            for key, num_tokens in self._history.tokens.items():
                worker = workers.get(key)
                contributor = key if worker is None else worker.person or key
                found[contributor] = found.get(contributor, 0) + num_tokens
            self._tokens = dict(sorted(found.items(), key=lambda one: -one[1]))
            self._ranks = {key: place for place, key in enumerate(self._tokens, 1)}
            self._until_s = now_s + RANKED_S
        return self._tokens
