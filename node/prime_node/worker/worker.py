"""A worker: its parts, and what it is doing at the moment. The loop and its tasks all work on one of these."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from prime_node import __version__
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import Trust
from prime_node.folder_lock import FolderLock
from prime_node.observe import Recorder, Recorders
from prime_node.patience import Switch
from prime_node.ports.clock import Clock
from prime_node.ports.engine import Engine
from prime_node.ports.environment import TurnEnvironment
from prime_node.ports.transport import WorkerPort
from prime_node.worker.config import WorkerConfig
from prime_node.worker.leases import GenerationPace
from prime_node.worker.receipts import ReceiptBook
from prime_node.worker.session import Session
from prime_node.worker.spool import Spool
from prime_protocol.assignment import Lease
from prime_protocol.identity import SigningKey
from prime_protocol.messages import JoinRequest, WorkerState
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import Hardware, Speed

log = logging.getLogger(__name__)


class Ending(StrEnum):
    """How a worker ended. The exit codes are part of the command line's documentation."""

    STOPPED = "stopped"
    """We were asked to stop, and did in order."""
    DRAINED = "drained"
    """The run is over, or its operator drains it."""
    BANNED = "banned"
    """The coordinator has banned this key."""

    @property
    def told(self) -> str:
        """To the owner. A ban is told with its reason, elsewhere."""
        return "left as asked" if self is Ending.STOPPED else "the run is over, or its operator lets it drain"

    @property
    def exit_code(self) -> int:
        return 4 if self is Ending.BANNED else 0


@dataclass
class Worker:
    """What the loop works with. `folder` is this worker's own, and of this run."""

    run: PinnedRun
    config: WorkerConfig
    key: SigningKey
    coordinator: WorkerPort
    engine: Engine
    follower: Follower
    trust: Trust
    """Made before the worker: what is in the folder may be signed by keys that only it knows."""
    folder: Path
    clock: Clock
    environments: Mapping[str, TurnEnvironment] = field(default_factory=dict)
    """Those that answer, by name."""
    rng: random.Random = field(default_factory=random.Random)
    hardware: Hardware | None = None
    """What the operator is told about this machine."""
    swarm: Callable[[], str] = lambda: ""
    """What the owner is told about the exchange with other workers."""
    say: Callable[[str], None] = log.info
    """Where the line for the owner goes."""
    timeline: Recorder = field(default_factory=Recorders)
    """Gets a line for each swap and each lease generated."""
    in_hand: set[str] = field(default_factory=set)
    """Leases that wait, are being generated or are being written to the spool."""
    held: int = -1
    """The policy that the engine holds."""
    newest_held: int = -1
    """The newest policy that the engine has held."""
    usable_after_ms: int | None = None
    """From the publication of the held policy until the engine had it, where that says something about its way to us."""
    swap_ms: int | None = None
    """Of that, what the engine took."""
    state: WorkerState = WorkerState.FETCHING
    waiting_for: str = ""
    rollouts_generated: int = 0
    leases_dropped: int = 0
    pace: GenerationPace = field(default_factory=GenerationPace)
    speed: Speed | None = None
    """What the rehearsal showed, for the coordinator."""
    accepted: Switch = field(default_factory=Switch)
    """On while the coordinator counts this machine as the one that uses our key: the swarm host runs only then."""
    quit: asyncio.Event = field(default_factory=asyncio.Event)
    """Take no new work: we were asked to stop, or the coordinator drains us."""
    grace_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Leave now, whatever is unfinished."""

    def __post_init__(self) -> None:
        """Raises LocalError where the folder is unusable."""
        self.lock = FolderLock(self.folder)
        # On-policy everybody waits for the last group of a step: it must not lie in the line of a busy worker.
        ahead = self.config.leases_ahead if self.run.spec.admission.lag_leased else 0
        self.room = asyncio.Semaphore(ahead + 1)
        self.spool = Spool(self.folder / "spool", bytes_max=self.config.spool_bytes_max, clock=self.clock, rng=self.rng)
        self.receipts = ReceiptBook(self.folder, run=self.run, worker=self.key.key_id)
        request = JoinRequest(
            name=self.config.name,
            software=f"prime-node {__version__}",
            engine=self.engine.info,
            rollouts_max=self.config.rollouts_max,
            invite=self.config.invite,
            hardware=self.hardware,
            session=secrets.token_hex(16),
        )
        self.session = Session(
            self.run, self.coordinator, request, clock=self.clock, rng=self.rng, accepted=self.accepted
        )

    def seconds_left(self, lease: Lease) -> float:
        """Until the lease expires by the coordinator's clock; below 0 once it has."""
        return (lease.expires_at_ms - self.session.server_now_ms()) / 1_000

    @contextlib.contextmanager
    def timed(self, kind: str, **fields: int) -> Iterator[None]:
        """A line of the timeline for what is done inside, by the coordinator's clock."""
        begin_ms = self.session.server_now_ms()
        try:
            yield
        finally:
            self.timeline.record(kind=kind, begin_ms=begin_ms, end_ms=self.session.server_now_ms(), **fields)
