"""Signed statements other than leases and receipts: key rings, timestamps, batches, and the ledger.

Anyone may upload a key ring: its signatures count. It is on disk before it is used, so that no restart goes back to revoked
keys. A timestamp is renewed every `timestamp_seconds` (30) and after each publication. The last one is stored with the
manifests, for mirrors. The content of a batch is the same each time, so it is signed again on request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from prime_node.coordinator.api.limiter import StoreReads
from prime_node.coordinator.api.requests import RequestGate
from prime_node.coordinator.api.shown_dates import ShownDates
from prime_node.coordinator.assignments import Assigner, newest_open
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.journal import Journal
from prime_node.coordinator.manifests import PublishedManifests
from prime_node.ports.clock import Clock
from prime_node.ports.documents import TIMESTAMP_NAME, Documents, key_ring_name
from prime_node.ports.store import Store
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyRing, Role
from prime_protocol.ledger import LedgerHead
from prime_protocol.replies import BatchGroup, TrainBatch
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import Timestamp

log = logging.getLogger(__name__)

DATES_NAME = "shown_dates"
LEDGER_HEAD_NAME = "ledger_head.json"
Statement = TypeVar("Statement")


async def restore_keys(run: PinnedRun, published: Documents, key: SigningKey) -> None:
    """Read every accepted key ring after a restart. Raise LocalError if our own key has been revoked."""
    for version in range(run.keys.version + 1, limits.KEY_RINGS_MAX + 1):
        try:
            run.keys.add(open_envelope(await published.read(key_ring_name(version))))
        except KeyError:
            break
        except RemoteError as error:
            raise LocalError(
                f"{key_ring_name(version)} in the published folder: {error}; restore it from a copy"
            ) from None
    require_own_key(run, key)


def require_own_key(run: PinnedRun, key: SigningKey) -> None:
    """Raise LocalError if the coordinator's key is not in the current key ring, so that its signatures would be rejected."""
    if key.key_id not in run.keys.current.coordinator:
        raise LocalError(
            f"{key.key_id} is no coordinator key of this run by key ring {run.keys.version}: start with the current key"
        )


@dataclass(slots=True)
class KeyRings:
    """The accepted key rings, and the intake of new ones."""

    run: PinnedRun
    key: SigningKey
    clock: Clock
    decisions: Decisions
    gate: RequestGate
    manifests: PublishedManifests
    timestamps: TimestampSigner
    published: Documents
    revoked: asyncio.Event = field(default_factory=asyncio.Event)
    """Event set when a key ring has revoked our own key: all later signatures are rejected."""

    async def take_key_ring(self, body: bytes, *, address: str) -> None:
        """Accept the next key ring, signed by the root. Idempotent for the newest one. Raise RemoteError."""
        now_s = self.clock.monotonic_s()
        with self.gate.blame(address, now_s):
            envelope = open_envelope(body)
            if not any(one.key_id in self.run.keys.current.root for one in envelope.signatures):
                self.gate.limiter.by_address.require(address, now_s)
            async with self.manifests.turn:  # no manifest is accepted meanwhile
                if envelope.digest == self.run.keys.digest:
                    return
                ring = self.run.keys.check(envelope)
                await check_published(ring, self.decisions.state.head, self.manifests.read)
                await self.published.write(key_ring_name(ring.version), envelope.to_bytes())
                self.run.keys.add(envelope)
        log.warning("key ring %d is in force: %s", ring.version, ring.reason or "no reason given")
        await self.timestamps.renew_timestamp()
        if self.key.key_id not in ring.keys.coordinator:
            self.revoked.set()

    def read_key_ring(self, version: int) -> Envelope:
        """Return an accepted key ring. Raise RemoteError(NOT_FOUND)."""
        if not 1 <= version <= self.run.keys.version:
            raise RemoteError(
                ErrorCode.NOT_FOUND, f"the newest key ring is {self.run.keys.version}; version 0 is the RunSpec"
            )
        return self.run.keys.rings[version - 1][1]


async def check_published(ring: KeyRing, head: int, read: Callable[[int], Awaitable[Envelope]]) -> None:
    """Check that a ring keeps the published manifests valid, up to policy `head`.

    The ring names one of these manifests, and keys that it keeps have signed those after it. Raise RemoteError.
    """
    first = 0
    if ring.published is not None:
        envelope = await read(ring.published.policy_version)
        if envelope.digest != ring.published.manifest:
            raise RemoteError(
                ErrorCode.FORK, f"the key ring names another manifest for policy {ring.published.policy_version}"
            )
        first = ring.published.policy_version + 1
    trainers = ring.keys.of(Role.TRAINER)
    for version in range(first, head + 1):
        envelope = await read(version)
        try:
            envelope.verify(PayloadType.MANIFEST, trusted=trainers, threshold=ring.keys.threshold(Role.TRAINER))
        except RemoteError:
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN,
                f"policy {version} is not signed by this key ring's trainers; make the key ring again at the head",
            ) from None


@dataclass(slots=True)
class TimestampSigner:
    """The newest timestamp, which says that the head is fresh."""

    run: PinnedRun
    key: SigningKey
    clock: Clock
    manifests: PublishedManifests
    published: Documents
    private: Documents
    interval_s: float
    lifetime_s: float
    newest: tuple[Timestamp, Envelope] | None = None
    """Last signed timestamp."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while a timestamp is signed and stored."""
    _shown: ShownDates = field(init=False)
    """Dates that may have been shown, also before a restart."""
    _is_warned: bool = False

    def __post_init__(self) -> None:
        self._shown = ShownDates(round(1_000 * (self.lifetime_s + 2.0 * limits.REQUEST_AGE_S_MAX)))

    async def restore_time(self) -> None:
        """Read after a restart which dates were shown."""
        if (stored := await stored_timestamp(self.run, self.published, self.key)) is None:
            return
        last_ms, now_ms, ran_ms = stored.issued_at_ms, self.clock.now_ms(), self._ran_ms()
        with contextlib.suppress(KeyError):
            self._shown.restore(await self.private.read(DATES_NAME), last_ms, now_ms, ran_ms)
        self._shown.add(last_ms, ran_ms)

    async def timestamp(self) -> Envelope:
        """Return a fresh timestamp."""
        await self.renew_timestamp()
        assert self.newest is not None
        return self.newest[1]

    async def renew_timestamp(self) -> None:
        """Sign a new timestamp if the last one is old or outdated. Cheap otherwise.

        Of two that differ, clients take the later one for the newer state. So it is dated after the last one even if the clock
        was set back, until the clock has caught up. If the clock was set back so far that no client can hold both (`ShownDates`),
        it follows the clock. It is stored before it is shown, for a restart.
        """
        async with self.turn:
            now_ms, head = self.clock.now_ms(), None if self.manifests.head is None else self.manifests.head.point
            issued_ms, known = self._shown.next_ms(now_ms, self._ran_ms()), self.run.calibrations
            if self.newest is not None:
                last = self.newest[0]
                is_new = now_ms - last.issued_at_ms < self.interval_s * 1_000 and last.issued_at_ms < issued_ms
                said = (last.head, last.key_ring, last.calibration)
                if is_new and said == (head, self.run.keys.version, known.version):
                    self._shown.add(last.issued_at_ms, self._ran_ms())
                    return
            self._say_if_back(now_ms, issued_ms)
            stamp = Timestamp(
                run=self.run.digest,
                head=head,
                key_ring=self.run.keys.version,
                calibration=known.version,
                amendment=known.digest if known.version else None,
                issued_at_ms=issued_ms,
                expires_at_ms=issued_ms + round(self.lifetime_s * 1_000),
            )
            signed = seal(stamp, PayloadType.TIMESTAMP, self.key)
            if self._shown.is_leap(issued_ms, self._ran_ms()):
                await self.private.write(DATES_NAME, self._shown.to_bytes(issued_ms, self._ran_ms()))
            await self.published.write(TIMESTAMP_NAME, signed.to_bytes())
            self.newest = (stamp, signed)
            self._shown.add(issued_ms, self._ran_ms())

    def _say_if_back(self, now_ms: int, issued_ms: int) -> None:
        """Say it if the clock was set back by more than clients tolerate: once until it has caught up."""
        ahead_s, back_s = (issued_ms - now_ms) / 1_000, (self._shown.last_ms - issued_ms) / 1_000
        is_ahead = ahead_s > limits.REQUEST_AGE_S_MAX
        if is_ahead and not self._is_warned:
            log.warning(
                "the last timestamp is %.0f s ahead of the clock, which was set back or was ahead before. For %.0f s at most "
                "timestamps are dated after that one, and clients whose clocks are right may wait",
                ahead_s,
                ahead_s,
            )
        elif back_s > 0.0:
            log.warning(
                "timestamps follow the clock, which is %.0f s before the last one; no client takes both", back_s
            )
        self._is_warned = is_ahead

    def _ran_ms(self) -> int:
        return round(1_000 * self.clock.monotonic_s())


@dataclass(slots=True)
class LedgerSigner:
    """The ledger's signed head, and its lines."""

    run: PinnedRun
    key: SigningKey
    decisions: Decisions
    journal: Journal
    assigner: Assigner
    store: Store
    reads: StoreReads
    private: Documents
    interval_s: float
    newest: tuple[LedgerHead, Envelope] | None = None
    """Last signed head."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while a head is signed and stored."""

    async def ledger_head(self) -> Envelope:
        """Return the ledger's length and last line, signed. Sign again if it has grown or the last head is old.

        The head is stored before it is shown. Otherwise a restart with a clock that was set back could sign a contradicting one.
        """
        async with self.turn:
            now_ms, chain = self.journal.said_ms(), self.journal.ledger
            if self.newest is not None:
                last, envelope = self.newest
                if last.num_entries == chain.num_entries and now_ms - last.at_ms < self.interval_s * 1_000:
                    return envelope
            secret = newest_open(self.run, self.assigner.secrets, self.decisions.state.steps_over)
            head = chain.head(self.journal.next_ms(), secret)
            signed = seal(head, PayloadType.LEDGER_HEAD, self.key)
            await self.decisions.synced()  # a head on the disk whose lines a crash lost would look like a damaged store
            await self.private.write(LEDGER_HEAD_NAME, signed.to_bytes())
            self.newest = (head, signed)
            return signed

    async def ledger_lines(self, start: int) -> bytes:
        """Return the ledger's lines from line `start` on, each with its newline."""
        await self.decisions.synced()  # the store must have caught up with the head that was shown
        async with self.reads.place(None):  # nothing is signed here
            lines = await self.store.ledger(start=start, limit=limits.LEDGER_LINES_MAX)
        return "".join(f"{line}\n" for line in lines).encode()


async def stored_head(run: PinnedRun, private: Documents, key: SigningKey) -> LedgerHead | None:
    """Return the last ledger head that may have been shown before a restart, if there is a whole one."""
    kind, own = PayloadType.LEDGER_HEAD, own_key_ids(run, key)
    return await stored_statement(
        private, LEDGER_HEAD_NAME, lambda envelope: parse_json(envelope.verify(kind, trusted=own), LedgerHead)
    )


async def stored_timestamp(run: PinnedRun, published: Documents, key: SigningKey) -> Timestamp | None:
    """Return the last timestamp that may have been shown before a restart, if there is a whole one."""
    kind, own = PayloadType.TIMESTAMP, own_key_ids(run, key)
    return await stored_statement(
        published, TIMESTAMP_NAME, lambda envelope: parse_json(envelope.verify(kind, trusted=own), Timestamp)
    )


def own_key_ids(run: PinnedRun, key: SigningKey) -> set[str]:
    """Return the keys that have signed this coordinator's statements. `run` may lack the key ring that names `key`."""
    return {key.key_id, *run.keys.ever(Role.COORDINATOR)}


async def stored_statement(
    documents: Documents, name: str, verified: Callable[[Envelope], Statement]
) -> Statement | None:
    """Return what `verified` reads from a document; None if that is missing, or damaged, which the log says.

    The signature tells damage from an old statement: a document with a flipped bit may still parse.
    """
    try:
        return verified(open_envelope(await documents.read(name)))
    except KeyError:
        return None
    except RemoteError as error:
        log.warning("%s is damaged and is written again: %s", name, error)
        return None


@dataclass(frozen=True, slots=True)
class BatchDigests:
    """The digests of a batch that was handed out."""

    payload: str
    """Digest that the next batch of the same step names."""
    envelope: str
    """Digest that the manifest of the resulting policy names."""


@dataclass(slots=True)
class BatchSeals:
    """The batches that are fixed, signed on request."""

    run: PinnedRun
    key: SigningKey
    decisions: Decisions
    assigner: Assigner
    known: dict[tuple[int, int], BatchDigests] = field(default_factory=dict)
    """Digests by step and part, so that publishing a policy does not make and sign its batches again."""

    def seal(self, step: int, part: int) -> Envelope:
        """Return the signed batch, and remember its digests until the trainer is durable past the step."""
        envelope = seal(self._make(step, part), PayloadType.BATCH, self.key)
        known, durable = self.known, self.decisions.state.durable_step
        known[step, part] = BatchDigests(payload=digest_of(envelope.payload), envelope=envelope.digest)
        for old in [key for key in known if key[0] < min(durable, step)]:
            del known[old]
        return envelope

    def digests(self, step: int, part: int) -> BatchDigests:
        """Return the digests of a fixed batch. Only after a restart the batch is made again."""
        if (step, part) not in self.known:
            self.seal(step, part)
        return self.known[step, part]

    def _make(self, step: int, part: int) -> TrainBatch:
        """Return the batch to sign. It contains only settled facts, so its bytes are the same each time."""
        state, groups = self.decisions.state, []
        for slot in state.batches[step][part]:
            group = state.steps[slot // state.rules.groups_per_step].accepted[slot]
            problem, prompt = self.assigner.problem(slot)
            groups.append(
                BatchGroup.model_construct(
                    slot=slot,
                    problem=problem,
                    prompt_token_ids=prompt,
                    worker=group.worker,
                    policy_version=group.policy_version,
                    bundle=group.bundle,
                    first=group.first,
                    rewards=group.rewards,
                    unscored=group.unscored,
                    logprobs=group.logprobs or None,
                )
            )
        return TrainBatch.model_construct(
            run=self.run.digest,
            step=step,
            groups=tuple(groups),
            part=part,
            previous=self.digests(step, part - 1).payload if part else None,
        )
