"""The coordinator daemon: assembles the parts, serves, and runs the timer.

Handlers wait for notifications (waiting.py, each with a deadline) and for the journal's writer. The writer waits for events.
The ticker waits for the clock and handles everything that depends on time alone: expired leases, silent workers, overdue
checks. If the writer or the ticker fails, the daemon ends with its error. All confirmed events are in the store, and a restart
continues from there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prime_node.coordinator import curation
from prime_node.coordinator.agreement import Agreement
from prime_node.coordinator.api import judging
from prime_node.coordinator.api.limiter import Limiter
from prime_node.coordinator.api.nonces import Nonces
from prime_node.coordinator.api.publishing import restore_head
from prime_node.coordinator.api.receipts import release_sureties
from prime_node.coordinator.api.requests import RequestGate
from prime_node.coordinator.api.routes import make_routes
from prime_node.coordinator.api.statements import ledger_head_ms, renew_timestamp, require_own_key, restore_keys
from prime_node.coordinator.api.walls import caller_bounds_of
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.cases import keep_cases
from prime_node.coordinator.checks import COMPARED_FACTOR, CheckQueue
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.core import Core, receipt_signer
from prime_node.coordinator.evaluating import Evaluations
from prime_node.coordinator.journal import open_journal, restore_state
from prime_node.coordinator.listed_peers import Peers
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.measure.tracker import Tracker
from prime_node.coordinator.metrics import METRICS
from prime_node.coordinator.peering import keep_host, open_host
from prime_node.coordinator.presence import HEARTBEATS_MISSED_MAX, Presence
from prime_node.coordinator.retention import forget_old_encodings, sweep_blobs
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state.scheduler import expired_leases
from prime_node.coordinator.waiting import Notifications
from prime_node.coordinator.watchdog import Watchdog
from prime_node.observe import Gauges, Recorder, Recorders
from prime_node.patience import first_of
from prime_node.ports.blobs import Blobs
from prime_node.ports.clock import Clock
from prime_node.ports.documents import Documents
from prime_node.ports.environment import Environment, Tokenizer
from prime_node.ports.metrics import Metrics
from prime_node.ports.peer_network import PeerNetwork
from prime_node.ports.store import Store
from prime_node.ports.swarm import DialBack
from prime_node.ports.web import WebServer
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a coordinator. Core explains the storage."""

    run: PinnedRun
    key: SigningKey
    secret: bytes = field(repr=False)
    """Secret of the assignments (assignments.py). It stays when the key is replaced, and the run's seed chain derives from it."""
    config: CoordinatorConfig
    clock: Clock
    store: Store
    bundles: Blobs
    public: Blobs
    published: Documents
    private: Documents
    web: WebServer
    metrics: Metrics
    environments: Mapping[str, Environment]
    """Environments by their names in the RunSpec."""
    tokenizer: Tokenizer
    dial_back: DialBack | None = None
    """Check of the HTTP addresses that peers announce; without it, none is listed."""
    dial_back_libp2p: DialBack | None = None
    """The same check for libp2p."""
    network: PeerNetwork | None = None
    """A libp2p host of the coordinator's own, if its operator wants one."""
    rows: Recorder = field(default_factory=Recorders)
    """Recorder of the numbers of each step."""
    timeline: Recorder = field(default_factory=Recorders)
    """Recorder of a line for each lease, verdict, batch and policy."""


async def serve_coordinator(
    parts: Parts, stop: asyncio.Event, *, ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serve until `stop` is set, then make all events durable and close the store. Call `ready` with the port."""
    try:
        core = await open_core(parts)
        await _serve(core, parts, stop, ready)
    finally:
        for dial_back in (parts.dial_back, parts.dial_back_libp2p):
            if dial_back is not None:
                await dial_back.close()
        parts.rows.close()
        parts.timeline.close()
        await parts.store.close()
    log.info("stopped at event %d", core.journal.number)


async def _serve(core: Core, parts: Parts, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
    trash: asyncio.Queue[Sequence[str]] = asyncio.Queue()
    gate = RequestGate(
        run=parts.run,
        limiter=Limiter(
            requests_per_second=parts.config.requests_per_second,
            faults_per_second=parts.config.faults_per_second,
        ),
        nonces=Nonces(nonces_max=parts.config.nonces_max),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(core.journal.write(trash.put_nowait))
        ticker = tasks.create_task(_keep_time(core))
        emptier = tasks.create_task(_empty(trash, core))
        clerk = tasks.create_task(keep_cases(core))
        announcer: asyncio.Task[None] | None = None
        try:
            routes = make_routes(core, gate)
            port = await parts.web.start(
                routes, host=parts.config.host, port=parts.config.port or 0, walls=caller_bounds_of(parts.config)
            )
            log.info("serving run %s on port %d", parts.run.digest[:12], port)
            if parts.config.unlimited:
                log.warning(
                    "workers from %s count as your own and have no limits by network: behind a reverse proxy or a container's "
                    "bridge, where everybody seems to come from there, set coordinator.proxies or trusted_networks",
                    ", ".join(parts.config.unlimited),
                )
            if parts.network is not None:
                await open_host(parts.network, routes)
                announcer = tasks.create_task(keep_host(parts.network, core))
            ready(port)
            await first_of(stop.wait(), core.revoked.wait())
            require_own_key(core.run, core.key)
        finally:
            if announcer is not None:
                announcer.cancel()
            core.news.close()
            await parts.web.stop(grace_s=parts.config.grace_seconds)
            ticker.cancel()
            emptier.cancel()
            clerk.cancel()
            if parts.network is not None:
                await parts.network.close()
            core.journal.close()


async def open_core(parts: Parts) -> Core:
    """Restore the state and everything that depends on it."""
    config, run = parts.config, parts.run
    parts.metrics.declare(*METRICS)
    await restore_keys(run, parts.published, parts.key)
    restored = await restore_state(parts.store, rules_of(run))
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
        shown_ms=await ledger_head_ms(parts.private),
    )
    check_s = config.check_seconds * (COMPARED_FACTOR if run.spec.checks.compares_rewards else 1)
    core = Core(
        run=run,
        key=parts.key,
        config=config,
        clock=parts.clock,
        journal=journal,
        assigner=assigner,
        store=parts.store,
        bundles=parts.bundles,
        public=parts.public,
        published=parts.published,
        private=parts.private,
        metrics=parts.metrics,
        observer=Observer(
            Tracker(journal.state),
            parts.metrics,
            rows=Recorders(parts.rows, Gauges(parts.metrics, prefix="prime_coordinator_")),
            timeline=parts.timeline,
        ),
        news=Notifications(parts.clock),
        presence=Presence(heartbeat_s=run.spec.heartbeat_seconds),
        checks=CheckQueue(check_s=check_s, attempts_max=config.check_attempts_max),
        agreement=Agreement(check_s, run.spec.checks.validator_classes),
        evaluations=Evaluations(config.evaluation, assigner, rollouts_per_group=run.spec.rollouts_per_group),
        peers=Peers(parts.dial_back, parts.dial_back_libp2p, parts.network),
    )
    await parts.published.write("run.json", run.envelope.to_bytes())
    await restore_head(core)
    for pending in core.state.bundles.values():
        core.checks.add(pending.bundle, pending.lease.policy_version)
    await curation.restore_pools(core, random.Random())
    await _sweep(core)
    await sweep_blobs(core)
    return core


async def _sweep(core: Core) -> None:
    """Delete unreferenced bundles: uploads whose event was not written before a crash, and interrupted deletions."""
    state = core.state
    kept = {*state.evidence, *state.bundles, *state.step_bundles()}
    orphans = [digest async for digest in core.bundles.digests() if digest not in kept]
    for digest in orphans:
        await core.bundles.delete(digest)
    if orphans:
        log.info("deleted %d bundles that nothing refers to", len(orphans))


async def _keep_time(core: Core) -> None:
    """Handle everything that only the passing of time decides."""
    # Workers may have failed to reach the daemon while it was down: their leases get a grace period before they expire.
    grace_s = min(HEARTBEATS_MISSED_MAX * core.run.spec.heartbeat_seconds, core.run.spec.lease_seconds)
    expire_from_s = core.clock.monotonic_s() + grace_s
    saved_step = core.state.durable_step
    watchdog = Watchdog(core.config.watchdog_seconds)
    while True:
        await core.clock.sleep(core.config.tick_seconds)
        if core.config.curriculum.is_on and core.state.durable_step > saved_step:
            saved_step = core.state.durable_step
            await curation.save(core)
        now_s = core.clock.monotonic_s()
        if now_s >= expire_from_s and (expired := expired_leases(core.state, core.clock.now_ms())):
            log.info("%d leases expired", len(expired))
            core.decide(ev.LeasesExpired(expired))
        active = (key for key, worker in core.state.workers.items() if worker.active)
        if lost := core.presence.silent(active, now_s):
            names = ", ".join(core.state.workers[worker].name for worker in lost)
            log.info("no sign of life from %s", names)
            core.decide(ev.WorkersLost(lost))
        core.hints = {worker: hint for worker, hint in core.hints.items() if core.presence.get(worker) is not None}
        judging.expire_checks(core)
        await judging.settle_held(core)
        if core.state.is_ending:
            release_sureties(core)
        if bark := watchdog.look(core, now_s):
            log.warning("%s", bark)
        await forget_old_encodings(core)
        await renew_timestamp(core)


async def _empty(trash: asyncio.Queue[Sequence[str]], core: Core) -> None:
    while True:
        for bundle in await trash.get():
            await core.bundles.delete(bundle)
