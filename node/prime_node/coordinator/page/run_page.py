"""What the page shows of a run, as JSON values. Each look goes over the workers once and builds no row for any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.dossiers import dossier_name
from prime_node.coordinator.listed_peers import Peers
from prime_node.coordinator.measure.history import RunHistory
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.measure.standings import Standings
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state.blockers import Blockers
from prime_node.coordinator.state.records import WorkerRecord
from prime_node.ports.clock import Clock
from prime_protocol.ledger import LedgerChain
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import DownloadReport
from prime_protocol.visible import printable

BANS_SHOWN_MAX = 100
CONTRIBUTORS_SHOWN_MAX = 12
BEHIND_SHOWN_MAX = 4
"""Policies behind the newest one that are counted apart; more are one number."""
POLICIES_SHOWN_MAX = 6
ROUTES_SHOWN_MAX = 8
DOWNLOADS_SHOWN_MAX = 12
NAME_CHARS_MAX, TEXT_CHARS_MAX = 64, 240


@dataclass(slots=True)
class RunPage:
    """The run as its visitors see it."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    observer: Observer
    presence: Presence
    peers: Peers
    blockers: Blockers
    history: RunHistory
    standings: Standings
    chain: LedgerChain
    """The ledger's end."""

    def facts(self) -> dict[str, Any]:
        """Return what does not change. Example: {"name": "demo", "digest": "a3...", "max_steps": 400, ...}."""
        spec = self.run.spec
        return {
            "name": spec.name,
            "title": spec.title or spec.name,
            "description": spec.description,
            "digest": self.run.digest,
            "created_at": spec.created_at_ms,
            "environments": [{"name": one.name, "id": one.id} for one in spec.environments],
            "k": spec.async_level,
            "max_steps": spec.max_steps,
            "groups_per_step": spec.groups_per_step,
            "rollouts_per_group": spec.rollouts_per_group,
            "temperature": spec.sampling.temperature,
            "completion_tokens_max": spec.sampling.completion_tokens_max,
        }

    def now(self) -> dict[str, Any]:
        """Return what changes, small enough to send often."""
        state = self.decisions.state
        states, holders, downloads = self._presence_counts()
        left = max(0, state.rules.max_steps - state.current_step)
        return {
            "phase": self._phase(),
            "step": state.current_step,
            "head": state.head,
            "waiting_for": [printable(one, TEXT_CHARS_MAX) for one in self.blockers.reasons()],
            "accepted": state.accepted,
            "refused": {str(reason): count for reason, count in state.refused.items()},
            "tokens": self.history.tokens.total(),
            "states": states,
            "active": state.num_active,
            "holders": holders,
            "downloads": downloads,
            "peers": len(self.peers),
            "swarm": self.peers.counts(),
            "routes": self._routes(),
            "ledger": {"entries": self.chain.num_entries, "digest": self.chain.digest},
            "bytes_published": state.bytes_published,
            "open_leases": len(state.leases),
            "pending_bundles": len(state.bundles),
            "step_s": round(state.step_ms / 1_000, 3),
            "left_s": round(left * state.step_ms / 1_000, 1),
            "window": [
                {
                    "step": number,
                    "open": len(step.open),
                    "held": len(step.held),
                    "accepted": len(step.accepted),
                    "trained": len(step.taken),
                }
                for number, step in list(state.steps.items())[-8:]
            ],
            "usable": self.observer.availability.as_rows(POLICIES_SHOWN_MAX),
        }

    def bans(self) -> list[dict[str, Any]]:
        """Return the newest bans, with the name of each dossier."""
        banned = [worker for worker in self.decisions.state.workers.values() if worker.banned is not None]
        banned.sort(key=lambda worker: -(worker.banned.at_ms if worker.banned else 0))
        return [
            {
                "key": worker.worker,
                "name": printable(worker.name, NAME_CHARS_MAX),
                "at": worker.banned.at_ms,
                "step": worker.banned.step,
                "kind": str(worker.banned.kind),
                "reason": printable(worker.banned.reason, TEXT_CHARS_MAX),
                "dossier": dossier_name(worker.worker, worker.banned),
            }
            for worker in banned[:BANS_SHOWN_MAX]
            if worker.banned is not None
        ]

    def contributors(self) -> list[list[Any]]:
        """Return the contributors with the most accepted tokens: key, name, tokens, number of machines."""
        return self.standings.top(CONTRIBUTORS_SHOWN_MAX)

    def _presence_counts(self) -> tuple[dict[str, int], list[int], dict[str, Any]]:
        """Return how many workers do what, how many have a policy that is so far behind the newest one, and their downloads.

        This is all of a look that grows with the number of workers, so it calls little.
        """
        state, last_seen = self.decisions.state, self.presence.get
        head, states, versions = state.head, dict[str, int](), dict[int, int]()
        num_reports, links, operator_share = 0, 0, 0.0
        fetching: list[tuple[WorkerRecord, DownloadReport]] = []
        for key, worker in state.workers.items():
            if worker.banned is not None:
                doing = "banned"
            elif not worker.active:
                doing = "away"
            elif (seen := last_seen(key)) is None:
                doing = "idle"
            else:
                doing, version = seen.state, seen.policy_version
                versions[version] = versions.get(version, 0) + 1
                if (has := seen.downloads) is not None:
                    if num_bytes := has.operator_bytes + has.peer_bytes:
                        num_reports, links = num_reports + 1, links + has.links
                        operator_share += has.operator_bytes / num_bytes
                    if has.done_bytes < has.all_bytes:
                        fetching.append((worker, has))
            states[doing] = states.get(doing, 0) + 1
        holders = [0] * (BEHIND_SHOWN_MAX + 1)
        for version, num_workers in versions.items():
            if version >= 0:
                holders[min(BEHIND_SHOWN_MAX, max(0, head - version))] += num_workers
        downloads = {  # means: a false report moves them by one worker's part
            "workers": num_reports,
            "links": round(links / max(1, num_reports), 1),
            "operator_share": round(operator_share / max(1, num_reports), 3),
            "fetching": len(fetching),
            "shown": [
                [printable(worker.name, NAME_CHARS_MAX), has.done_bytes, has.all_bytes]
                for worker, has in fetching[:DOWNLOADS_SHOWN_MAX]
            ],
        }
        return {str(doing): num_workers for doing, num_workers in states.items()}, holders, downloads

    def _routes(self) -> list[list[int | None]]:
        """Return how many bytes the newest policy takes from each older one: base and bytes, the whole (base None) first."""
        state = self.decisions.state
        found = state.published.get(state.head)
        routes = (
            ()
            if found is None
            else sorted(found.routes, key=lambda one: -1 if one.base_version is None else one.base_version)
        )
        return [[one.base_version, one.sent_bytes] for one in routes[:ROUTES_SHOWN_MAX]]

    def _phase(self) -> str:
        state = self.decisions.state
        if state.head >= state.rules.max_steps:
            return "complete"
        if state.draining:
            return "draining"
        if state.paused_at_ms:
            return "paused"
        return "starting" if state.head < 0 else "learning" if state.num_active else "waiting"
