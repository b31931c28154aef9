"""Assembly of a coordinator: restores the state, and gives each part only what it uses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from prime_node.coordinator.agreement import Agreement
from prime_node.coordinator.api.admission import WorkerAdmission
from prime_node.coordinator.api.amendments import CalibrationIntake, restore_amendments
from prime_node.coordinator.api.blobs import BlobReader
from prime_node.coordinator.api.body_checks import BodyChecks
from prime_node.coordinator.api.bundles import BundleStorage
from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.api.direct_uploads import DirectBucket, DirectUploads
from prime_node.coordinator.api.documents import PublicDocuments
from prime_node.coordinator.api.intake import BundleIntake
from prime_node.coordinator.api.judging import CheckTasks, Judging
from prime_node.coordinator.api.leasing import Leasing
from prime_node.coordinator.api.limiter import Limiter, StoreReads
from prime_node.coordinator.api.nonces import Nonces
from prime_node.coordinator.api.operating import OperatorActions
from prime_node.coordinator.api.page import PagePages
from prime_node.coordinator.api.peer_discovery import PeerDiscovery
from prime_node.coordinator.api.persons import PersonRules
from prime_node.coordinator.api.publishing import BlobIntake, ManifestIntake
from prime_node.coordinator.api.receipts import ReceiptLists, receipt_signer
from prime_node.coordinator.api.requests import RequestGate
from prime_node.coordinator.api.routes import Handlers
from prime_node.coordinator.api.statements import (
    BatchSeals,
    KeyRings,
    LedgerSigner,
    TimestampSigner,
    restore_keys,
)
from prime_node.coordinator.api.status import StatusPages, StatusReport
from prime_node.coordinator.api.training import TrainerBatches
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.calibrated_pairs import CalibratedPairs
from prime_node.coordinator.check_queue import COMPARED_FACTOR, CheckQueue
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.curation import Curation
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.dossiers import BanDossiers
from prime_node.coordinator.evaluating import Evaluations
from prime_node.coordinator.journal import Journal, open_journal
from prime_node.coordinator.listed_peers import Peers
from prime_node.coordinator.manifests import PublishedManifests, Retention
from prime_node.coordinator.measure.history import RunHistory
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.measure.standings import Standings
from prime_node.coordinator.measure.tracker import Tracker
from prime_node.coordinator.metrics import METRICS
from prime_node.coordinator.own_statements import require_own_statements
from prime_node.coordinator.page.live_feed import LiveFeed
from prime_node.coordinator.page.run_page import RunPage
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.replay_archive import ReplayArchive
from prime_node.coordinator.state.blockers import Blockers
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state_follower import restore_state
from prime_node.coordinator.waiting import Notifications
from prime_node.observe import Gauges, Recorder, Recorders
from prime_node.ports.blobs import Blobs
from prime_node.ports.clock import Clock
from prime_node.ports.documents import RUN_NAME, Documents
from prime_node.ports.environment import Environment, Tokenizer
from prime_node.ports.leadership import Leadership
from prime_node.ports.metrics import Metrics
from prime_node.ports.peer_network import PeerNetwork
from prime_node.ports.store import Store
from prime_node.ports.swarm import DialBack
from prime_node.ports.web import WebServer
from prime_node.ports.writer_link import GatewayListener
from prime_protocol import limits
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun

PUBLIC_AGE_S = 7 * 86_400.0
"""Age at which unreferenced bytes of a policy are deleted: its trainer may be away, and has signed its manifest."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a coordinator: settings, storage and adapters."""

    run: PinnedRun
    key: SigningKey
    secret: bytes = field(repr=False)
    """Secret of the assignments (assignments.py). It stays when the key is replaced, and the run's seed chain derives from it."""
    config: CoordinatorConfig
    clock: Clock
    store: Store
    bundles: Blobs
    """Uploaded bundles. Only validators and the trainer can read them."""
    archived: Blobs
    """Those that were trained on, for the run's auditors."""
    direct: DirectBucket | None = field(default=None, kw_only=True)
    """Bucket into which workers put bodies themselves, if they may."""
    public: Blobs
    """Model files and checkpoint parts. Public."""
    published: Documents
    """The documents run.json, head.json and manifests/. Mirrors copy them with the public blobs."""
    private: Documents
    """Evidence, for the operator."""
    web: WebServer
    metrics: Metrics
    environments: Mapping[str, Environment]
    """Environments by their names in the RunSpec."""
    tokenizer: Tokenizer
    dial_back: DialBack | None = None
    """Check of the HTTP addresses that peers announce; without it, none is listed."""
    dial_back_libp2p: DialBack | None = None
    """The same check for libp2p."""
    gateways: GatewayListener | None = None
    """Place at which gateways are heard; None: the run has none."""
    gateway_secret: bytes = field(default=b"", repr=False)
    """Secret that gateways share with this coordinator."""
    leadership: Leadership | None = None
    """Place among the coordinators of the run, where the store can have several."""
    network: PeerNetwork | None = None
    """A libp2p host of the coordinator's own, if its operator wants one."""
    rows: Recorder = field(default_factory=Recorders)
    """Recorder of the numbers of each step."""
    timeline: Recorder = field(default_factory=Recorders)
    """Recorder of a line for each lease, verdict, batch and policy."""


class Coordinator:
    """An assembled coordinator. The daemon runs it; no part of it knows this object."""

    def __init__(self, parts: Parts, journal: Journal, assigner: Assigner) -> None:
        run, key, config, clock, store = parts.run, parts.key, parts.config, parts.clock, parts.store
        metrics, bundles, public, private = parts.metrics, parts.bundles, parts.public, parts.private
        check_s = config.check_seconds * (COMPARED_FACTOR if run.spec.checks.compares_rewards else 1)
        history = RunHistory(private, clock)
        rows = Recorders(parts.rows, Gauges(metrics, prefix="prime_coordinator_"), history)
        timeline = Recorders(parts.timeline, history)
        observer = Observer(
            Tracker(journal.state),
            metrics,
            rows=rows,
            timeline=timeline,
            history=history,
            curriculum=config.curriculum,
        )
        notifications, presence = Notifications(clock), Presence(heartbeat_s=run.spec.heartbeat_seconds)
        checks = CheckQueue(check_s=check_s, attempts_max=config.check_attempts_max)
        agreement = Agreement(check_s, run.checks.validator_classes)
        if journal.number:  # a restart, or another coordinator's successor
            agreement.expect(run.keys.current.validator, clock.monotonic_s())
        pairs = CalibratedPairs(run, agreement)
        evaluations = Evaluations(config.evaluation, assigner, rollouts_per_group=run.spec.rollouts_per_group)
        decisions = Decisions(
            journal, clock, observer, notifications, checks, evaluations, metrics, leadership=parts.leadership
        )
        limiter = Limiter(requests_per_second=config.requests_per_second, faults_per_second=config.faults_per_second)
        gate = RequestGate(run=run, limiter=limiter, nonces=Nonces(nonces_max=config.nonces_max))
        peers = Peers(parts.dial_back, parts.dial_back_libp2p, parts.network)
        blockers = Blockers(journal.state)
        curation = Curation(config.curriculum, decisions, assigner, private, metrics)
        manifests = PublishedManifests(run, decisions, parts.published)
        seals = BatchSeals(run, key, decisions, assigner)
        archive = ReplayArchive(
            run, clock, decisions, seals, manifests, parts.published, private, public, bundles, parts.archived
        )
        reads = StoreReads()
        receipts = ReceiptLists(run, key, decisions, store, reads)
        storage = BundleStorage(run, clock, decisions, gate, checks, agreement, bundles, parts.archived)
        timestamps = TimestampSigner(
            run,
            key,
            clock,
            manifests,
            parts.published,
            private,
            interval_s=config.timestamp_seconds,
            lifetime_s=config.timestamp_lifetime_seconds,
        )
        keys = KeyRings(run, key, clock, decisions, gate, manifests, timestamps, parts.published)
        calibrations = CalibrationIntake(run, clock, decisions, gate, timestamps, agreement, parts.published)
        head_s = min(config.timestamp_seconds, limits.LEDGER_HEAD_S_MAX)
        ledger = LedgerSigner(run, key, decisions, journal, assigner, store, reads, private, interval_s=head_s)
        standings = Standings(decisions, presence, history, clock)
        report = StatusReport(
            run,
            config,
            clock,
            decisions,
            observer,
            presence,
            peers,
            agreement,
            evaluations,
            curation,
            blockers,
            metrics,
            history,
            standings,
        )
        callers = Callers(proxies=config.behind, trusted=config.trusted)
        page = RunPage(run, clock, decisions, observer, presence, peers, blockers, history, standings, journal.ledger)
        self.feed = LiveFeed(page, clock)
        share = config.second_look_share
        tasks = CheckTasks(run, share, clock, decisions, assigner, notifications, checks, agreement, pairs)
        persons = PersonRules(run, config, clock, decisions, presence)
        self.direct = DirectUploads(run, clock, decisions, parts.direct)
        self.handlers = Handlers(
            leasing=Leasing(
                run, key, clock, decisions, assigner, curation, notifications, presence, observer, blockers
            ),
            admission=WorkerAdmission(run, config, clock, decisions, assigner, presence, persons),
            persons=persons,
            intake=BundleIntake(
                *(run, clock, decisions, gate, assigner, pairs, presence, receipts, storage, private, metrics),
                self.direct,
            ),
            direct=self.direct,
            receipts=receipts,
            check_tasks=tasks,
            judging=Judging(run, clock, decisions, metrics, tasks, agreement, curation, receipts, storage),
            bundles=storage,
            batches=TrainerBatches(decisions, notifications, observer, seals, blockers, storage),
            blobs_in=BlobIntake(run, clock, decisions, gate, public),
            manifests_in=ManifestIntake(
                run,
                clock,
                decisions,
                gate,
                manifests,
                seals,
                evaluations,
                observer,
                notifications,
                archive,
                public,
                private,
            ),
            keys=keys,
            calibrations=calibrations,
            timestamps=timestamps,
            ledger=ledger,
            documents=PublicDocuments(run, manifests, keys, calibrations, ledger, archive, notifications),
            blobs=BlobReader(run, public, serve_chunks=config.serve_chunks),
            discovery=PeerDiscovery(run, key, config, clock, decisions, peers),
            operator=OperatorActions(decisions, journal.save_snapshot),
            status=StatusPages(report, gate.epochs, clock),
            page=PagePages(self.feed, private, callers, clock),
            bodies=BodyChecks(clock, decisions, gate, callers),
        )
        self.retention = Retention(
            run, config.checkpoints_kept, config.public_bytes_max, decisions, public, manifests, archive.needed
        )
        self.archive, self.storage = archive, storage
        self.dossiers = BanDossiers(run, key, decisions, assigner, store, bundles, private)
        self.journal, self.decisions, self.gate, self.assigner = journal, decisions, gate, assigner
        self.notifications, self.presence, self.manifests = notifications, presence, manifests
        self.curation, self.blockers, self.report, self.history = curation, blockers, report, history

    async def sweep(self, *, is_start: bool = False) -> None:
        """Delete the bundles and public blobs that nothing refers to, unless they are young. Raise OSError or RemoteError."""
        spec, now_ms = self.storage.run.spec, self.storage.clock.now_ms()
        age_s = spec.lease_seconds + limits.REQUEST_AGE_S_MAX  # as a command of another process may be on its way
        await self.storage.delete_orphans(before_ms=now_ms - round(1_000 * age_s), is_start=is_start)
        await self.retention.sweep_blobs(before_ms=now_ms - round(1_000 * PUBLIC_AGE_S))


async def open_coordinator(parts: Parts, followed: tuple[int, State] | None = None) -> Coordinator:
    """Restore the state and everything that depends on it. `followed` is the state that a standby has read."""
    config, run = parts.config, parts.run
    parts.metrics.declare(*METRICS)
    await restore_keys(run, parts.published, parts.key)
    if followed is None:  # a standby has checked what it read, and takes over at once
        await parts.store.check()
    restored = followed or await restore_state(parts.store, rules_of(run))
    shown = await require_own_statements(run, parts.key, parts.published, parts.private, parts.store, restored[1])
    await restore_amendments(run, parts.published, restored[1])
    assigner = Assigner(
        run,
        secret=parts.secret,
        environments=parts.environments,
        tokenizer=parts.tokenizer,
        draws=restored[1].curriculum.draws,
    )
    journal = await open_journal(
        parts.store,
        restored,
        clock=parts.clock,
        sign_receipt=receipt_signer(run, parts.key, assigner),
        snapshot_events=config.snapshot_events,
        archive_days=config.journal_days,
        archive_bytes_max=config.journal_gib_max * 2**30,
        shown_ms=0 if shown is None else shown.at_ms,
    )
    coordinator = Coordinator(parts, journal, assigner)
    await parts.published.write(RUN_NAME, run.envelope.to_bytes())
    coordinator.handlers.calibrations.record_amendments()
    await coordinator.manifests.restore_head()
    await coordinator.archive.restore()
    await coordinator.handlers.timestamps.restore_time()
    if (head := coordinator.manifests.head) is not None:
        coordinator.report.observer.made(head.manifest.policy_version, head.manifest.created_at_ms)
    for pending in journal.state.bundles.values():
        coordinator.handlers.check_tasks.checks.add(pending.bundle, pending.lease.policy_version)
    await coordinator.curation.restore_pools(random.Random())
    await coordinator.history.restore()
    await coordinator.sweep(is_start=True)
    return coordinator
