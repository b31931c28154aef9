"""A run in memory: real keys, envelopes and manifests, without a network.

`MemorySource` is a mirror that a test can make fail or misbehave. `VirtualClock` hardly waits: a sleep moves its time
forward.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from tests.builder import base_of, build_manifest, build_spec, pinned, role_keys
from tests.node.table_engine import STOP_TOKEN, VOCAB_SIZE
from tests.time_world import VirtualClock, until

from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.ports.transport import Unreachable
from prime_protocol.assignment import Sampling
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint, KeyChain, KeyRing
from prime_protocol.manifest import Manifest, PartEntry, SignedManifest, sign_manifest
from prime_protocol.run_spec import EnvironmentSpec, PinnedRun
from prime_protocol.timestamp import Timestamp
from prime_protocol.weights import Weights

ROOT, COORDINATOR, TRAINER, WORKER, STRANGER = (SigningKey(bytes([number]) * 32) for number in range(1, 6))
MODEL_FILES = {"config.json": b'{"model_type": "table"}', "tokenizer.json": b"{}"}


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def make_run(**changes: object) -> PinnedRun:
    """Return a signed, pinned RunSpec. Leases practically never expire by default, since VirtualClock runs fast."""
    fields: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "environments": (EnvironmentSpec(name="toy", id="toy"),),
        "sampling": Sampling(completion_tokens_max=8, stop_token_ids=(STOP_TOKEN,)),
        "max_steps": 1_000,
        "rollouts_per_group": 4,
        "lease_seconds": 1e6,
        "heartbeat_seconds": 100.0,
    }
    keys = role_keys(ROOT, COORDINATOR, TRAINER, validator=COORDINATOR)
    return pinned(build_spec(keys, MODEL_FILES, **fields | changes), ROOT)


def next_ring(
    chain: KeyChain,
    *signers: SigningKey,
    published: ChainPoint | None = None,
    trainer_threshold: int = 1,
    **keys: Any,
) -> Envelope:
    """Return the key ring after the chain's newest one, with other keys for the given roles."""
    named = {role: tuple(key.key_id for key in held) for role, held in keys.items()}
    ring = KeyRing(
        run=chain.run,
        version=chain.version + 1,
        previous=chain.digest,
        keys=chain.current.model_copy(update=named | {"trainer_threshold": trainer_threshold}),
        published=published or chain.published,
        created_at_ms=0,
    )
    return seal(ring, PayloadType.KEY_RING, *signers)


class MemorySource:
    """Source (ports.transport.PublicSource) that also publishes. A test may corrupt its public attributes."""

    def __init__(self, run: PinnedRun) -> None:
        self.run = run
        self.manifests: dict[int, Envelope] = {}
        self.blobs = {digest_of(data): data for data in MODEL_FILES.values()}
        self.shown_head: Envelope | None = None
        self.away = False
        self.num_asked = 0
        self.clock = VirtualClock()
        """Clock of its followers."""
        self.blobs_asked: list[str] = []
        self.before_blob: Callable[[str], None] = lambda _: None
        self.key_rings: list[Envelope] = []
        self.key = COORDINATOR
        self.now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self.shown_timestamp: Envelope | None = None
        """Timestamp to serve instead of a fresh one that names the head."""

    def publish(
        self,
        weights: Weights,
        *,
        base: tuple[SignedManifest, Weights] | None = None,
        bases: Sequence[tuple[SignedManifest, Weights] | None] = (),
        previous: SignedManifest | None = None,
        key: SigningKey = TRAINER,
        part_bytes: int = 2**24,
        **changes: object,
    ) -> SignedManifest:
        """Publish the next policy, after `previous` or after the newest one; an anchor unless `base` or `bases` are given."""
        if previous is None and self.manifests:
            previous = self.signed(max(self.manifests))
        encoded = [
            encode_checkpoint(weights, None if one is None else (base_of(one[0]), one[1]), part_bytes=part_bytes)
            for one in bases or [base]
        ]
        signed = sign_manifest(build_manifest(self.run, previous, weights, *encoded, **changes), key)
        self.blobs |= {digest_of(blob): blob for one in encoded for blob in one.blobs}
        self.manifests[signed.manifest.policy_version] = self.shown_head = signed.envelope
        return signed

    def publish_spoilt(self, weights: Weights, index: bytes, *parts: bytes) -> SignedManifest:
        """Publish an anchor over a custom index and optionally custom parts, signed by the trainer."""
        honest = encode_checkpoint(weights)
        blobs = (index, *(parts or honest.parts))
        entries = tuple(PartEntry(digest=digest_of(blob), size=len(blob)) for blob in blobs)
        lied = honest.encoding.model_copy(update={"index": entries[0], "parts": entries[1:]})
        signed = self.publish(weights, encodings=(lied,))
        self.blobs |= {digest_of(blob): blob for blob in blobs}
        return signed

    def signed(self, policy_version: int) -> SignedManifest:
        envelope = self.manifests[policy_version]
        return SignedManifest(parse_json(envelope.payload, Manifest), envelope.digest, envelope)

    def save(self, folder: Path) -> None:
        """Write the published layout to a disk."""
        (folder / "manifests").mkdir(parents=True)
        (folder / "run.json").write_bytes(self.run.envelope.to_bytes())
        for version, envelope in self.manifests.items():
            (folder / f"manifests/{version:08d}.json").write_bytes(envelope.to_bytes())
        if self.shown_head is not None:
            (folder / "head.json").write_bytes(self.shown_head.to_bytes())
        if self.shown_timestamp is not None:
            (folder / "timestamp.json").write_bytes(self.shown_timestamp.to_bytes())
        for version, envelope in enumerate(self.key_rings, start=1):
            (folder / "keys").mkdir(exist_ok=True)
            (folder / f"keys/{version:04d}.json").write_bytes(envelope.to_bytes())
        for digest, data in self.blobs.items():
            path = folder / "blobs" / digest[:2] / digest
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    async def run_spec(self) -> Envelope:
        self._check_reachable()
        return self.run.envelope

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        self._check_reachable()
        return self.shown_head

    async def manifest(self, policy_version: int) -> Envelope:
        self._check_reachable()
        if policy_version not in self.manifests:
            raise RemoteError(ErrorCode.NOT_FOUND, f"no manifest {policy_version}")
        return self.manifests[policy_version]

    async def key_ring(self, version: int) -> Envelope:
        self._check_reachable()
        if version > len(self.key_rings):
            raise RemoteError(ErrorCode.NOT_FOUND, f"no key ring {version}")
        return self.key_rings[version - 1]

    async def calibration(self, version: int) -> Envelope:
        self._check_reachable()
        if version > self.run.calibrations.version:
            raise RemoteError(ErrorCode.NOT_FOUND, f"no calibration {version}")
        return self.run.calibrations.amendments[version - 1][1]

    async def timestamp(self) -> Envelope:
        self._check_reachable()
        return self.shown_timestamp or self.timestamp_of(self.shown_head, key=self.key)

    def timestamp_of(
        self, head: Envelope | None, /, *, age_s: float = 0.0, key: SigningKey = COORDINATOR, **changes: object
    ) -> Envelope:
        """Sign what an honest coordinator would have signed `age_s` ago, with `changes`."""
        point = None
        if head is not None:
            point = ChainPoint(policy_version=parse_json(head.payload, Manifest).policy_version, manifest=head.digest)
        issued_at_ms = self.now_ms() - round(age_s * 1_000)
        fields: dict[str, object] = {
            "run": self.run.digest,
            "head": point,
            "key_ring": len(self.key_rings),
            "calibration": self.run.calibrations.version,
            "amendment": self.run.calibrations.digest if self.run.calibrations.version else None,
            "issued_at_ms": issued_at_ms,
            "expires_at_ms": issued_at_ms + 600_000,
        }
        return seal(Timestamp.model_validate(fields | changes), PayloadType.TIMESTAMP, key)

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        self._check_reachable()
        self.before_blob(digest)
        self.blobs_asked.append(digest)
        if digest not in self.blobs:
            raise RemoteError(ErrorCode.NOT_FOUND, f"no blob {digest}")
        if start >= max(1, len(self.blobs[digest])) and (end is None or end > start):
            raise RemoteError(ErrorCode.BAD_RANGE, "no range that can be sent")
        return self.blobs[digest][start:end]

    def _check_reachable(self) -> None:
        self.num_asked += 1
        if self.away:
            raise Unreachable("connection refused")


def make_follower(folder: Path, *sources: MemorySource, **options: Any) -> Follower:
    """Return a follower with a VirtualClock; `options` go to Follower."""
    named = [(f"source-{number}", source) for number, source in enumerate(sources)]
    clock = sources[0].clock if sources else VirtualClock()
    settings: dict[str, Any] = {"clock": clock, "poll_s": 0.1, "rng": random.Random(1)}
    run = sources[0].run if sources else make_run()
    settings |= options
    pool = SourcePool(named, clock=settings["clock"], rng=settings["rng"])
    return Follower(run, pool, folder, **settings)


@contextlib.asynccontextmanager
async def following(follower: Follower) -> AsyncIterator[Follower]:
    task = asyncio.create_task(follower.follow())
    try:
        yield follower
        assert not task.done(), "the follower must never end by itself"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def settle(source: MemorySource) -> None:
    """Let the follower of a source poll it for three virtual seconds, and at least four times: pauses grow after failures."""
    enough = source.num_asked + 4
    await source.clock.sleep(3.0)
    await until(lambda: source.num_asked >= enough)
