"""The coordinator daemon: serves an assembled coordinator, and runs the timer.

Handlers wait for notifications (waiting.py, each with a deadline) and for the journal's writer. The writer waits for events.
The ticker waits for the clock and handles everything that depends on time alone: expired leases, silent workers, overdue
checks. If the writer or the ticker fails, the daemon ends with its error. All confirmed events are in the store, and a restart
continues from there.

The libp2p host is a bootstrap peer, and a relay for peers behind NATs. It starts after the web server and waits for nothing. No
run depends on it: if the host ends, peers continue over HTTP, and it is opened again. The log and `prime_p2p_host_faults`
report the fault.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from prime_node.broadcast.swarm.network_peer import serve_routes
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.coordinator.api.callers import caller_bounds_of
from prime_node.coordinator.api.forwarded import ForwardedCalls
from prime_node.coordinator.api.requests import claimed_sender
from prime_node.coordinator.api.routes import ENDPOINTS, serve_endpoints
from prime_node.coordinator.api.statements import require_own_key
from prime_node.coordinator.assembly import Coordinator, Parts, open_coordinator
from prime_node.coordinator.journal import Journal
from prime_node.coordinator.metrics import HOST_FAULTS, HOST_METRICS
from prime_node.coordinator.presence import HEARTBEATS_MISSED_MAX, ActiveWorkers, Presence
from prime_node.coordinator.scrubbing import scrub_blobs
from prime_node.coordinator.standby import Succession
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.blockers import Blockers
from prime_node.coordinator.state.scheduler import expired_leases
from prime_node.patience import PAUSE_S_MAX, first_of, in_a_hurry
from prime_node.ports.blobs import Blobs
from prime_node.ports.clock import Clock
from prime_node.ports.metrics import Metrics
from prime_node.ports.peer_network import PeerNetwork
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import CallerBounds, Importance, Route, Sender
from prime_protocol.errors import RemoteError

log = logging.getLogger(__name__)


async def serve_coordinator(
    parts: Parts, stop: asyncio.Event, *, ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serve until `stop` is set, then make all events durable and close the store. Call `ready` with the port."""
    number = 0
    try:
        succession = Succession(parts, ready)
        if parts.leadership is None or await succession.lead(stop):
            coordinator = await open_coordinator(parts, succession.followed)
            await _serve(coordinator, parts, stop, succession)
            number = coordinator.journal.number
    finally:
        for dial_back in (parts.dial_back, parts.dial_back_libp2p):
            if dial_back is not None:
                await dial_back.close()
        parts.rows.close()
        parts.timeline.close()
        await parts.store.close()
    log.info("stopped at event %d", number)


async def _serve(coordinator: Coordinator, parts: Parts, stop: asyncio.Event, succession: Succession) -> None:
    trash: asyncio.Queue[Sequence[str]] = asyncio.Queue()
    handlers, config, clock = coordinator.handlers, parts.config, parts.clock
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(coordinator.journal.write(trash.put_nowait))
        stalls = _stalls_of(coordinator, parts)
        ticker = tasks.create_task(_keep_time(coordinator, parts, stalls))
        emptier = tasks.create_task(_empty(trash, parts.bundles))
        clerk = tasks.create_task(coordinator.dossiers.keep_dossiers())
        cleaners = [
            tasks.create_task(each)
            for each in (coordinator.direct.sweep(), _sweep(coordinator, clock), stalls.watch(clock))
        ]
        if config.scrub_hours and config.blobs == "folder":
            cleaners.append(tasks.create_task(scrub_blobs(parts.public, clock, every_s=3_600 * config.scrub_hours)))
        if config.standby and parts.leadership is not None:
            cleaners.append(tasks.create_task(succession.cut_waiting()))
        host_keeper: asyncio.Task[None] | None = None
        try:
            served = serve_endpoints(handlers, coordinator.gate, coordinator.decisions, clock, parts.metrics)
            routes, bounds = [endpoint.route() for endpoint in served], _bounds_of(coordinator, parts)
            port = await succession.listen(routes, bounds)
            if parts.gateways is not None:
                await _hear_gateways(ForwardedCalls(served, handlers.bodies, bounds, parts.web.overload), parts)
            log.info("serving run %s on port %d", parts.run.digest[:12], port)
            if config.unlimited:
                log.warning(
                    "workers from %s count as your own, without limits by network: behind a reverse proxy or a "
                    "container's bridge, which hides the callers' addresses, set coordinator.proxies or trusted_networks",
                    ", ".join(config.unlimited),
                )
            if parts.network is not None:
                host = PeerHost(parts.network, clock=clock, metrics=parts.metrics)
                await host.open(routes)
                host_keeper = tasks.create_task(host.keep())
            succession.say_ready(port)
            lost = [] if parts.leadership is None else [parts.leadership.lost()]
            await first_of(stop.wait(), handlers.keys.revoked.wait(), *lost)
            succession.require_term()
            require_own_key(parts.run, parts.key)
        finally:
            if host_keeper is not None:
                host_keeper.cancel()
            coordinator.notifications.close()
            coordinator.feed.close()
            if parts.gateways is not None:
                await parts.gateways.stop()
            await parts.web.stop(grace_s=min(config.grace_seconds, 1.0) if in_a_hurry(stop) else config.grace_seconds)
            ticker.cancel()
            emptier.cancel()
            clerk.cancel()
            for cleaner in cleaners:
                cleaner.cancel()
            if parts.network is not None:
                await parts.network.close()
            await coordinator.history.save(at_once=True)
            coordinator.journal.close()


async def _hear_gateways(calls: ForwardedCalls, parts: Parts) -> None:
    address, leadership = parts.config.gateways_address, parts.leadership
    assert parts.gateways is not None
    assert address is not None
    port = await parts.gateways.start(
        calls.answer,
        address=address,
        secret=parts.gateway_secret,
        run=parts.run.digest,
        body_bytes_max=max(each.body_bytes_max(parts.run.spec.limits) for each in ENDPOINTS),
        may_send=None if leadership is None else leadership.may_answer,
    )
    log.info("hearing gateways at %s:%d", address[0], port)


def _bounds_of(coordinator: Coordinator, parts: Parts) -> CallerBounds:
    """Return the limits of the web server of a coordinator that leads."""

    def refused(importance: Importance, count: int) -> None:
        parts.metrics.add("prime_requests_shed_total", count, importance=importance.name.lower())
        if importance is Importance.HEARTBEATS:
            coordinator.presence.excuse(parts.clock.monotonic_s())

    def claimed(signed: bytes) -> Sender | None:
        return claimed_sender(signed, run=parts.run, state=coordinator.decisions.state)

    return replace(caller_bounds_of(parts.config), refused=refused, claimed=claimed)


@dataclass(slots=True)
class Watchdog:
    """Warns once for each `quiet_seconds` in which no bundle was settled, no batch given and no policy published."""

    blockers: Blockers
    quiet_seconds: float
    _seen: tuple[int, ...] = ()
    _since_s: float = 0.0

    def look(self, now_s: float) -> str | None:
        """Return the warning for the operator, if any."""
        state = self.blockers.state
        moved = (state.head, state.accepted, sum(state.refused.values()), sum(map(len, state.batches.values())))
        if moved != self._seen or state.paused_at_ms:
            self._seen, self._since_s = moved, now_s
            return None
        if now_s - self._since_s < self.quiet_seconds or not (waits := self.blockers.reasons()):
            return None
        self._since_s = now_s
        return f"the run has made no progress for {self.quiet_seconds:.0f} s. Waiting for: {'; '.join(waits)}"


@dataclass(slots=True)
class Stalls:
    """Notices that this process stood still, or its store. Then workers have sent what is not read, or wait for answers.

    It has a task of its own, because the ticker waits for the same disk.
    """

    journal: Journal
    presence: Presence
    tolerated_s: float
    tick_s: float
    grace_s: float
    expire_from_s: float
    """Time before which no lease expires."""
    _looked_s: float
    _durable: int = -1
    _written_s: float = 0.0
    _is_stalled: bool = False

    async def watch(self, clock: Clock) -> None:
        """Look at each tick. Run until it is cancelled."""
        while True:
            await clock.sleep(self.tick_s)
            self.look(clock.monotonic_s())

    def look(self, now_s: float) -> None:
        """Give workers and leases more time if either stood still since the last look."""
        late_s, self._looked_s = now_s - self._looked_s - self.tick_s, now_s
        if self.journal.is_synced or self.journal.durable != self._durable:
            self._durable, self._written_s = self.journal.durable, now_s
        was_stalled, stalled_s = self._is_stalled, max(late_s, now_s - self._written_s)
        self._is_stalled = stalled_s > self.tolerated_s
        if not self._is_stalled:
            return
        if not was_stalled:
            log.warning("the coordinator, or its store, stood still for %.1f s: workers get more time", stalled_s)
        self.presence.excuse(now_s, min(stalled_s, PAUSE_S_MAX))  # their pauses have grown as long
        self.expire_from_s = now_s + self.grace_s


def _stalls_of(coordinator: Coordinator, parts: Parts) -> Stalls:
    spec, now_s = parts.run.spec, parts.clock.monotonic_s()
    # Workers may have failed to reach the daemon while it was down: their leases get a grace period before they expire.
    grace_s = min(HEARTBEATS_MISSED_MAX * spec.heartbeat_seconds, spec.lease_seconds)
    return Stalls(
        *(coordinator.journal, coordinator.presence, spec.heartbeat_seconds, parts.config.tick_seconds, grace_s),
        expire_from_s=now_s + grace_s,
        _looked_s=now_s,
    )


async def _keep_time(coordinator: Coordinator, parts: Parts, stalls: Stalls) -> None:
    """Handle everything that only the passing of time decides."""
    config, clock = parts.config, parts.clock
    decisions, presence, handlers = coordinator.decisions, coordinator.presence, coordinator.handlers
    state = decisions.state
    saved_step = state.durable_step
    watchdog = Watchdog(coordinator.blockers, config.watchdog_seconds)
    active = ActiveWorkers(state)
    while True:
        await clock.sleep(config.tick_seconds)
        if config.curriculum.is_on and state.durable_step > saved_step:
            saved_step = state.durable_step
            await coordinator.curation.save()
        now_s = clock.monotonic_s()
        stalls.look(now_s)  # it may be the first to wake
        if now_s >= stalls.expire_from_s and (expired := expired_leases(state, clock.now_ms())):
            log.info("%d leases expired", len(expired))
            decisions.decide(ev.LeasesExpired(expired))
        if lost := presence.silent(active, now_s):
            names = ", ".join(state.workers[worker].name for worker in lost)
            log.info("no heartbeat in time from %s", names)
            decisions.decide(ev.WorkersLost(lost))
        handlers.check_tasks.expire_checks()
        await handlers.judging.settle_held()
        if state.is_ending:
            handlers.receipts.release_escrows()
        if bark := watchdog.look(now_s):
            log.warning("%s", bark)
        await coordinator.retention.forget_old_encodings()
        await coordinator.archive.forget_old()
        await handlers.timestamps.renew_timestamp()
        await coordinator.history.save()


SWEEP_S = 6 * 3_600.0
"""Interval at which stored bytes that nothing refers to are looked for."""


async def _sweep(coordinator: Coordinator, clock: Clock) -> None:
    while True:
        await clock.sleep(SWEEP_S)
        try:
            await coordinator.sweep()
        except (OSError, RemoteError) as error:
            log.warning("stored bytes that nothing refers to stay for now: %s", error)


async def _empty(trash: asyncio.Queue[Sequence[str]], bundles: Blobs) -> None:
    while True:
        for bundle in await trash.get():
            try:
                await bundles.delete(bundle)
            except OSError as error:
                log.warning("bundle %s stays for now: %s", bundle[:12], error)


SHOWN = (
    *("/v1/run", "/v1/head", "/v1/manifests/{policy_version}", "/v1/keys/{version}"),
    *("/v1/calibrations/{version}", "/v1/timestamp"),
)
"""Endpoints of the host: documents, no bytes of checkpoints."""


@dataclass(slots=True)
class PeerHost:
    """The coordinator's own libp2p host."""

    network: PeerNetwork
    clock: Clock
    metrics: Metrics

    async def open(self, routes: Sequence[Route]) -> None:
        """Start the host. Raise LocalError if the machine cannot."""
        serve_routes(self.network, [route for route in routes if route.path in SHOWN])
        await self.network.start()
        log.info("libp2p host for peers: %s", ", ".join(self.network.addresses()) or "no known address yet")

    async def keep(self) -> NoReturn:
        """Reopen the host whenever it has ended, until cancelled."""
        self.metrics.declare(*HOST_METRICS)
        self.metrics.set(HOST_FAULTS, 0.0)
        swarm_tasks = SwarmTasks(
            self.clock, on_fault=lambda num_faults: self.metrics.set(HOST_FAULTS, float(num_faults))
        )

        async def work() -> None:
            if self.network.has_ended():
                await self.network.start()
            await self.network.ended()
            raise Unreachable("the libp2p host has ended")

        await swarm_tasks.keep("the coordinator's libp2p host", work)
