"""The shared parts of the coordinator's handlers, and the one way in which they change the state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from prime_node.coordinator.agreement import Agreement
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.checks import CheckQueue
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.evaluating import Evaluations
from prime_node.coordinator.journal import Journal
from prime_node.coordinator.listed_peers import Peers
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Evaluated, Settled, Woken, WorkerWasBanned
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.scheduler import is_work_left
from prime_node.coordinator.waiting import Notifications
from prime_node.ports.blobs import Blobs
from prime_node.ports.clock import Clock
from prime_node.ports.documents import Documents
from prime_node.ports.metrics import Metrics
from prime_node.ports.store import Store
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.ledger import LedgerHead
from prime_protocol.manifest import SignedManifest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import Timestamp
from prime_protocol.verdict import BundleStatus, Receipt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchDigests:
    """The digests of a batch that was handed out."""

    payload: str
    """Digest that the next batch of the same step names."""
    envelope: str
    """Digest that the manifest of the resulting policy names."""


@dataclass(slots=True)
class Core:
    """The parts of a running coordinator."""

    run: PinnedRun
    key: SigningKey
    config: CoordinatorConfig
    clock: Clock
    journal: Journal
    assigner: Assigner
    store: Store
    bundles: Blobs
    """Uploaded bundles. Only validators and the trainer can read them."""
    public: Blobs
    """Model files and checkpoint parts. Public."""
    published: Documents
    """The documents run.json, head.json and manifests/. Mirrors copy them with the public blobs."""
    private: Documents
    """Evidence, for the operator."""
    metrics: Metrics
    observer: Observer
    news: Notifications
    presence: Presence
    checks: CheckQueue
    agreement: Agreement
    evaluations: Evaluations
    blobs_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while a publication's blobs are checked and while blobs are deleted, so that checked blobs stay.

    Also held while a key ring is accepted, so that no manifest comes between."""
    head: SignedManifest | None = None
    """Newest published manifest."""
    timestamp: tuple[Timestamp, Envelope] | None = None
    """Last signed timestamp."""
    revoked: asyncio.Event = field(default_factory=asyncio.Event)
    """Event set when a key ring has revoked our own key: all later signatures are rejected."""
    ledger_head: tuple[LedgerHead, Envelope] | None = None
    """Last signed ledger head."""
    ledger_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while a ledger head is signed and stored."""
    batch_digests: dict[tuple[int, int], BatchDigests] = field(default_factory=dict)
    """Digests by step and part, so that publishing a policy does not make and sign its batches again."""
    peers: Peers = field(default_factory=Peers)
    """Peers that serve checkpoints to others."""
    banned: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """Workers whose ban dossier has to be written (cases.py)."""
    environment_fault: str = ""
    """Error of the last attempt to make a problem into a prompt; empty if it succeeded."""
    hints: dict[str, str] = field(default_factory=dict)
    """Worker -> why its last request for work got nothing, for its screen and for the operator."""

    @property
    def state(self) -> State:
        """The state. Read only; `decide` changes it."""
        return self.journal.state

    def decide(self, event: ev.Event) -> None:
        """Apply an event. It is durable once `journal.synced` returns, which every answer waits for."""
        effects = self.journal.record(event)
        self.observer.note(event, effects, self.state, self.clock.now_ms())
        for effect in effects:
            if isinstance(effect, Woken) and effect.is_offer:
                self.news.offer(effect.topic, self._is_work_left)
            elif isinstance(effect, Woken):
                self.news.publish(effect.topic)
            elif isinstance(effect, Settled) and not isinstance(event, ev.SuretyReleased):  # those were counted before
                self._follow_bundle(effect)
            elif isinstance(effect, Evaluated):
                row = self.evaluations.row_of(self.state.results[effect.policy_version])
                self.observer.rows.record(policy_version=effect.policy_version, **row)
            elif isinstance(effect, WorkerWasBanned):
                log.warning("worker %s is banned: %s", effect.worker, effect.ban.reason)
                self.banned.put_nowait(effect.worker)

    def _is_work_left(self) -> bool:
        return is_work_left(self.state)

    def _follow_bundle(self, effect: Settled) -> None:
        if effect.status is BundleStatus.PENDING:
            self.checks.add(effect.bundle, effect.lease.policy_version)
            return
        self.checks.settled([effect.bundle])
        outcome = str(effect.reason or "accepted")
        self.metrics.add("prime_rollouts_total", effect.num_rollouts, outcome=outcome)
        if effect.reason is not None:
            worker, step = effect.lease.worker, effect.lease.step
            log.info(
                "bundle %s of %s for step %d refused: %s %s",
                effect.bundle[:12],
                worker,
                step,
                effect.reason,
                effect.detail,
            )


def receipt_signer(run: PinnedRun, key: SigningKey, assigner: Assigner) -> Callable[[Settled, int], Envelope]:
    """Return the function that makes a receipt from a settled bundle."""

    def sign(settled: Settled, at_ms: int) -> Envelope:
        lease = settled.lease
        receipt = Receipt(
            run=run.digest,
            worker=lease.worker,
            lease_id=lease.lease_id,
            bundle=settled.bundle,
            step=lease.step,
            policy_version=lease.policy_version,
            num_rollouts=settled.num_rollouts,
            num_tokens=settled.num_tokens,
            status=settled.status,
            reason=settled.reason,
            detail=settled.detail,
            at_ms=at_ms,
            evidence=settled.weighed,
            assigned=assigner.assigned(lease) if settled.newly_accepted else None,
        )
        return seal(receipt, PayloadType.RECEIPT, key)

    return sign
