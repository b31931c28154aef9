"""A worker's parts and its current state. The loop and its tasks all share one Worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from pathlib import Path

from prime_node import __version__
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import Trust
from prime_node.folder_lock import FolderLock
from prime_node.observe import Recorder, Recorders
from prime_node.patience import Switch
from prime_node.ports.clock import Clock
from prime_node.ports.engine import Engine, ThreadedEngine
from prime_node.ports.environment import TurnEnvironment
from prime_node.ports.transport import WorkerPort
from prime_node.worker.config import WorkerConfig
from prime_node.worker.control import NoSurroundings, Surroundings, Wanted, WorkLimits
from prime_node.worker.loaded_policy import LoadedPolicy
from prime_node.worker.pace import GenerationPace
from prime_node.worker.receipts import ReceiptBook
from prime_node.worker.recent import RecentWork
from prime_node.worker.session import Session
from prime_node.worker.spool import Spool
from prime_node.worker.status import Status, Traffic, write_status
from prime_protocol.assignment import Lease
from prime_protocol.identity import SigningKey
from prime_protocol.replies import Standing
from prime_protocol.requests import JoinRequest, WorkerState
from prime_protocol.rollout import EngineInfo
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import Hardware, Speed

HOLDING_MAX = 1_024
"""Maximum number of leases that a request may name."""


@dataclass(frozen=True, slots=True)
class LeaseInHand:
    """A lease that is queued, in generation or being written to the spool."""

    digest: str
    """Digest of its payload."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Event set once its bundle could no longer be used, or the contributor pauses."""


@dataclass
class LeaseActivity:
    """The work on leases: written by lease_work.py and loop.py, read for heartbeats and for the status."""

    state: WorkerState = WorkerState.FETCHING
    waiting_for: str = ""
    """Reason why no lease is requested or granted; empty if there is none."""
    paused: str = ""
    """Reason why nothing may be computed: the contributor's pause or limits; empty if there is none."""
    wanted: Wanted = Wanted.RUN
    """What the contributor wants, as far as it is read."""
    limits: WorkLimits | None = None
    """Limits that are in force; None until they are read."""
    control_at_ms: int = 0
    """Time of the contributor's last command that is followed."""
    in_hand: dict[str, LeaseInHand] = field(default_factory=dict)
    finished_s: float = 0.0
    """Monotonic time at which the engine last finished a lease."""
    rollouts_generated: int = 0
    tokens_generated: int = 0
    leases_dropped: int = 0
    pace: GenerationPace = field(default_factory=GenerationPace)
    speed: Speed | None = None
    """Speed measured by the rehearsal, for the coordinator."""

    def cancel(self, lease_ids: Iterable[str]) -> None:
        """Stop the work on leases: the coordinator can no longer use them, or the contributor pauses."""
        for lease_id in self.in_hand.keys() & set(lease_ids):
            self.in_hand[lease_id].cancelled.set()


log = logging.getLogger(__name__)

LINE_EVERY_S = 60.0
"""Seconds between two lines of status in a log while the worker's situation does not change."""


class Ending(StrEnum):
    """Outcome of a worker's run. The exit codes are part of the command line's documentation."""

    STOPPED = "stopped"
    """Stopped in order, by request."""
    DRAINED = "drained"
    """The run is over, or its operator drains it."""
    BANNED = "banned"
    """The coordinator has banned this key."""

    @property
    def message(self) -> str:
        """Return the text for the owner. A ban is reported elsewhere, with its reason."""
        return "left on request" if self is Ending.STOPPED else "the run is over, or its operator drains it"

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command line."""
        return 4 if self is Ending.BANNED else 0


@dataclass(frozen=True, slots=True)
class Equipment:
    """What a worker computes with. It takes seconds to build, so a worker joins before that."""

    engine: Engine
    environments: Mapping[str, TurnEnvironment] = field(default_factory=dict)
    """Multi-turn environments, by name."""


@dataclass
class Worker:
    """State shared by the loop's tasks. `folder` belongs to this worker and this run."""

    run: PinnedRun
    config: WorkerConfig
    key: SigningKey
    coordinator: WorkerPort
    engine_info: EngineInfo
    """Identity of the engine, which the coordinator gets before the engine is built."""
    equip: Callable[[], Awaitable[Equipment]]
    """Function that builds engine and environments, once the coordinator has admitted this worker. May raise LocalError."""
    follower: Follower
    trust: Trust
    """Trust state, made before the worker: it alone may know the keys that signed the folder's content."""
    folder: Path
    clock: Clock
    rng: InitVar[random.Random | None] = None
    hardware: InitVar[Hardware | None] = None
    """Description of this machine for the operator."""
    delegation: InitVar[str] = ""
    """Delegation by the key of this machine's owner (prime_protocol/delegation.py)."""
    accepted: InitVar[Switch | None] = None
    """Switch to turn on while the coordinator counts this machine as its key's user; the swarm host runs only then."""
    around: Surroundings = field(default_factory=NoSurroundings)
    """What else happens on this machine."""
    limit_links: Callable[[WorkLimits], None] = lambda limits: None
    """Function that limits uploads and downloads."""
    links: Callable[[], Traffic] = Traffic
    """Function that returns the present state of the links to peers."""
    say: Callable[[str], None] = log.info
    """Function that shows a line to the owner."""
    screen: Callable[[Status], None] | None = None
    """Function that shows the status to the owner in place of the status before. None: as a line, now and then."""
    timeline: Recorder = field(default_factory=Recorders)
    """Recorder of each swap and each generated lease."""
    activity: LeaseActivity = field(default_factory=LeaseActivity, init=False)
    loaded: LoadedPolicy = field(default_factory=LoadedPolicy, init=False)
    standing: Standing | None = field(default=None, init=False)
    """Place among the run's contributors as the coordinator last reported it, unsigned; None: not known yet."""
    equipment: Equipment | None = field(default=None, init=False)
    """What `equip` has built; None until then."""
    quit: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Event that ends new work: a request to stop, or the coordinator drains this worker."""
    finishing: bool = field(default=False, init=False)
    """Whether the contributor asked to finish: what is begun is completed, however long that takes."""
    permit: Switch = field(default_factory=Switch, init=False)
    """Switch that is on while the contributor's pause and limits allow work."""
    _said: tuple[tuple[str, ...], float] = field(default=((), 0.0), init=False)
    """Situation in the last line that was said, and when."""
    grace_over: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Event that ends all work, finished or not."""

    def __post_init__(
        self, rng: random.Random | None, hardware: Hardware | None, delegation: str, accepted: Switch | None
    ) -> None:
        """Open the folder. Raises LocalError if it is unusable."""
        rng = rng or random.Random()
        self.lock = FolderLock(self.folder)
        # On-policy, all workers wait for the last group of a step: it must not wait in a busy worker's queue.
        self._may_fetch_ahead = bool(self.run.spec.admission.lag_leased)
        self.room = asyncio.Semaphore(1 + (self.config.leases_ahead or 0) * self._may_fetch_ahead)
        self.open_leases = asyncio.Semaphore(self.run.spec.limits.leases_per_worker_max)
        room = self.config.spool_bytes_max
        self.spool = Spool(self.folder / "spool", bytes_max=room, clock=self.clock, rng=rng, run=self.run.digest)
        self.recent = RecentWork(self.folder)
        self.receipts = ReceiptBook(self.folder, run=self.run, worker=self.key.key_id)
        request = JoinRequest(
            name=self.config.name,
            software=f"prime-node {__version__}",
            engine=self.engine_info,
            rollouts_max=self.config.rollouts_max,
            invite=self.config.invite,
            hardware=hardware,
            session=secrets.token_hex(16),
            delegation=delegation,
        )
        self.session = Session(self.run, self.coordinator, request, clock=self.clock, rng=rng, accepted=accepted)

    @property
    def fetches_ahead(self) -> bool:
        """Whether to fetch the next lease while one is generated, beyond the configured ones."""
        return self.config.leases_ahead is None and self._may_fetch_ahead and self.activity.pace.fetches_ahead

    @property
    def engine(self) -> Engine:
        """Return the engine, once it is built."""
        assert self.equipment is not None
        return self.equipment.engine

    @property
    def environments(self) -> Mapping[str, TurnEnvironment]:
        """Return the multi-turn environments by name, once they are built."""
        assert self.equipment is not None
        return self.equipment.environments

    def show(self, status: Status) -> None:
        """Write the status, and show it to the owner."""
        write_status(self.folder / "status.json", status)
        now_s, (situation, said_s) = self.clock.monotonic_s(), self._said
        if self.screen is not None:
            self.screen(status)
        elif status.situation != situation or now_s - said_s >= LINE_EVERY_S:
            self.say(status.line())
            self._said = status.situation, now_s

    def obey(self, limits: WorkLimits) -> None:
        """Let links and engine keep to the contributor's limits. An engine that cannot change is limited at its start."""
        self.limit_links(limits)
        if self.equipment is not None and isinstance(self.engine, ThreadedEngine):
            self.engine.set_threads(limits.threads or self.config.threads)

    def seconds_left(self, lease: Lease) -> float:
        """Return seconds until the lease expires by the coordinator's clock; negative once it has."""
        return (lease.expires_at_ms - self.session.server_now_ms()) / 1_000

    @contextlib.contextmanager
    def timed(self, kind: str, **fields: int) -> Iterator[None]:
        """Record the duration of the `with` block on the timeline, by the coordinator's clock."""
        begin_ms = self.session.server_now_ms()
        try:
            yield
        finally:
            self.timeline.record(kind=kind, begin_ms=begin_ms, end_ms=self.session.server_now_ms(), **fields)
