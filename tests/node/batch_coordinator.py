"""A trainer's coordinator in memory: with real keys, envelopes, bundles, blobs and manifests, and without a network.

`BatchCoordinator` makes the same batch for the same step, accepts only publications that verify, and can be unreachable. A
`Fuse` ends the program at the n-th passage of a named place, as kill -9 would: nothing after that place happens.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from tests.builder import build_header, build_lease, build_spec, pinned, role_keys
from tests.time_world import turns

from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.ports.transport import Unreachable
from prime_protocol.adapters import AdapterSpec
from prime_protocol.assignment import GroupAssignment, Problem, Sampling
from prime_protocol.chain import check_link, check_manifest
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import open_index
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.limits import Limits
from prime_protocol.manifest import SignedManifest, open_manifest
from prime_protocol.parcel import pack_parcel
from prime_protocol.replay import ReplayPolicy
from prime_protocol.replies import BatchGroup, NotYet, TrainBatch
from prime_protocol.requests import BatchRequest, BundleRequest
from prime_protocol.rollout import Completion, FinishReason, pack_body, rollouts_for
from prime_protocol.run_spec import EnvironmentSpec, PinnedRun
from prime_protocol.schedule import Schedule
from prime_protocol.telemetry import HeldOutFigures
from prime_protocol.weights import Weights

ROOT, COORDINATOR, TRAINER, VALIDATOR, WORKER, STRANGER = (SigningKey(bytes([n]) * 32) for n in range(1, 7))
STOP_TOKEN = 256
GROUPS, ROLLOUTS = 3, 4


@lru_cache
def tiny_files() -> Mapping[str, bytes]:
    return tiny_model_files(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)


def write_model(folder: Path, **changes: object) -> Path:
    """Write the tiny model's files; `changes` are for its config.json. Example: tie_word_embeddings=True."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tiny_files().items():
        (folder / name).write_bytes(data)
    if changes:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


def make_run(
    *,
    max_steps: int = 5,
    async_level: int = 2,
    adapters: AdapterSpec | None = None,
    replay: ReplayPolicy | None = None,
    files: Mapping[str, bytes] | None = None,
    **schedule: object,
) -> PinnedRun:
    """Return a run of the tiny model, or of the model that has these files."""
    files = files or tiny_files()
    spec = build_spec(
        role_keys(ROOT, COORDINATOR, TRAINER, VALIDATOR),
        files,
        vocab_size=json.loads(files["config.json"])["vocab_size"],
        environments=(EnvironmentSpec(name="echo", id="echo"),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(STOP_TOKEN,)),
        async_level=async_level,
        schedule=Schedule.model_validate(schedule),
        max_steps=max_steps,
        groups_per_step=GROUPS,
        rollouts_per_group=ROLLOUTS,
        adapters=adapters,
        replay=replay,
        limits=Limits(prompt_tokens_max=1_024),
    )
    return pinned(spec, ROOT)


class KilledError(Exception):
    """Error in place of kill -9; no code catches it on purpose."""


class Fuse:
    """Fuse that blows at the n-th passage of one place. Example: Fuse("after publish", 2)."""

    def __init__(self, place: str = "", at: int = 1) -> None:
        self._place, self._at = place, at
        self.passed: Counter[str] = Counter()

    def passes(self, place: str) -> None:
        self.passed[place] += 1
        if place == self._place and self.passed[place] == self._at:
            raise KilledError(place)


class BatchCoordinator:
    """Fake coordinator that implements ports.transport.PublishPort and BatchPort."""

    def __init__(self, run: PinnedRun) -> None:
        self.run = run
        self.fuse = Fuse()
        self.blobs: dict[str, bytes] = {}
        self.bundles: dict[str, bytes] = {}
        self.manifests: list[SignedManifest] = []
        self.durable_step = 0
        self.away = 0
        """Number of requests that get no answer."""
        self.refused = 0
        """Number of requests that have got none."""
        self.refusals: list[RemoteError] = []
        """Errors that the next requests get."""
        self.forgets = 0
        """Number of publications that are refused because a blob is missing."""
        self.spoil: Callable[[bytes], bytes | None] | None = None
        """What the disk makes of each bundle's bytes; None: they are lost."""
        self._decoded: dict[str, Weights] = {}
        self.gate = asyncio.Event()
        """Event for which publications wait."""
        self.gate.set()
        self.takes_in_max = 10**9
        """Number of publications that are accepted; further ones never get an answer."""
        self.asked: list[int] = []
        """Steps for which a batch was requested."""
        self.held_out: list[HeldOutFigures] = []
        self._moved = asyncio.Event()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait for a change that only a request can cause."""
        while not happened():
            self._moved.clear()
            await self._moved.wait()

    async def run_spec(self) -> Envelope:
        return self.run.envelope

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        self._answer()
        return self.manifests[-1].envelope if self.manifests else None

    async def manifest(self, policy_version: int) -> Envelope:
        self._answer()
        if policy_version >= len(self.manifests):
            raise RemoteError(ErrorCode.NOT_FOUND, f"no manifest {policy_version}")
        return self.manifests[policy_version].envelope

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        if digest not in self.blobs:
            raise RemoteError(ErrorCode.NOT_FOUND, f"no blob {digest}")
        return self.blobs[digest][start:end]

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        self.asked.append(request.step)
        if request.held_out is not None and not self.away:
            self.held_out.append(request.held_out)
        self._answer()
        self.fuse.passes("batch")
        spec = self.run.spec
        if request.step >= spec.max_steps or request.part >= spec.schedule.batches_per_step:
            raise RemoteError(ErrorCode.NOT_FOUND, "the run has no such batch")
        self.durable_step = max(self.durable_step, min(request.durable_step, request.step))
        if request.step < self.durable_step:
            raise RemoteError(ErrorCode.NOT_FOUND, f"batch {request.step} is forgotten")
        policy_version = max(0, request.step - self.run.spec.async_level)
        if policy_version >= len(self.manifests):
            await turns()
            return NotYet(reason=f"policy {policy_version} is not published", retry_after_s=0.1)
        bundle, groups = make_bundle(self.run, request.step, self.manifests[policy_version])
        self.bundles[digest_of(bundle)] = bundle
        size = len(groups) // self.run.spec.schedule.batches_per_step
        previous: Envelope | None = None
        for part in range(request.part + 1):
            batch = TrainBatch(
                run=self.run.digest,
                step=request.step,
                groups=groups[part * size : (part + 1) * size],
                part=part,
                previous=None if previous is None else previous.digest,
            )
            previous = seal(batch, PayloadType.BATCH, COORDINATOR)
        assert previous is not None
        return previous

    async def bundle(self, request: BundleRequest) -> bytes:
        self._answer()
        self.fuse.passes("bundle")
        found = self.bundles.get(request.bundle)
        if found is not None and self.spoil is not None:
            found = self.spoil(found)
        if found is None:
            raise RemoteError(ErrorCode.NOT_FOUND, f"no bundle {request.bundle}")
        if digest_of(found) != request.bundle:
            raise RemoteError(ErrorCode.DIGEST_MISMATCH, "another bundle was sent")
        return found

    async def put_blob(self, data: bytes, *, seeded: bool = True) -> str:
        self._answer()
        self.fuse.passes("put_blob")
        self.blobs[digest_of(data)] = data
        return digest_of(data)

    async def publish(self, manifest: Envelope) -> None:
        self._answer()
        await self.gate.wait()
        if len(self.manifests) >= self.takes_in_max:
            await asyncio.Event().wait()
        self.fuse.passes("before publish")
        if not any(one.key_id in self.run.keys.current.trainer for one in manifest.signatures):
            raise RemoteError(ErrorCode.WRONG_ROLE, "only trainer keys of the run may send this request")
        signed = open_manifest(manifest, self.run)
        if self.forgets:
            self.forgets -= 1
            raise RemoteError(ErrorCode.NOT_FOUND, "a blob is not here; upload it first")
        if signed.digest not in {known.digest for known in self.manifests}:
            check_manifest(signed.manifest, self.run)
            check_link(signed.manifest, self.manifests[-1] if self.manifests else None)
            if lost := {blob.digest for blob in signed.manifest.blobs} - self.blobs.keys():
                raise RemoteError(ErrorCode.NOT_FOUND, f"no blob {min(lost)}; upload it first")
            self.decode(signed)
            self.manifests.append(signed)
            self._moved.set()
        self.fuse.passes("after publish")

    def decode(self, signed: SignedManifest) -> Weights:
        """Return the weights behind a manifest after one check of every byte of every encoding."""
        if signed.digest in self._decoded:
            return self._decoded[signed.digest]
        manifest = signed.manifest
        for encoding in manifest.encodings:
            base = None if encoding.base is None else self.decode(self.manifests[encoding.base.policy_version])
            index = open_index(self.blobs[encoding.index.digest], encoding, manifest.tensors)
            decoder = CheckpointDecoder(manifest, encoding, index, base)
            for number, part in enumerate(encoding.parts):
                decoder.feed_part(number, self.blobs[part.digest])
            self._decoded[signed.digest] = decoder.finish()
        return self._decoded[signed.digest]

    @property
    def roots(self) -> list[str]:
        return [signed.manifest.state_root for signed in self.manifests]

    def _answer(self) -> None:
        self._moved.set()
        if self.away:
            self.away -= 1
            self.refused += 1
            raise Unreachable("connection refused")
        if self.refusals:
            raise self.refusals.pop()


def make_bundle(run: PinnedRun, step: int, policy: SignedManifest) -> tuple[bytes, tuple[BatchGroup, ...]]:
    """Return one step's rollouts by WORKER, a pure function of the arguments. Every third group has equal rewards."""
    rng = random.Random(step)
    slots = range(step * GROUPS, (step + 1) * GROUPS)
    groups = [
        GroupAssignment(
            slot=slot,
            problem=Problem(environment="echo", index=slot),
            prompt_token_ids=(258, 97 + slot % 26, 98, 259),
            seeds=tuple(rng.randrange(2**62) for _ in range(ROLLOUTS)),
        )
        for slot in slots
    ]
    lease = build_lease(
        run,
        WORKER,
        groups,
        lease_id=digest_of(b"%d" % step),
        step=step,
        policy_version=policy.manifest.policy_version,
        policy_digest=policy.digest,
    )
    completions = [_completion(rng) for _ in range(lease.num_rollouts)]
    body, raw_bytes = pack_body(rollouts_for(lease, completions))
    parcel = pack_parcel(build_header(lease, body, raw_bytes), body, PayloadType.ROLLOUT, WORKER)
    filled = tuple(
        BatchGroup(
            slot=group.slot,
            problem=group.problem,
            prompt_token_ids=group.prompt_token_ids,
            worker=WORKER.key_id,
            policy_version=lease.policy_version,
            bundle=digest_of(parcel),
            first=index * ROLLOUTS,
            rewards=(0.5,) * ROLLOUTS if index == 2 else tuple(rng.random() for _ in range(ROLLOUTS)),
        )
        for index, group in enumerate(lease.groups)
    )
    return parcel, filled


def _completion(rng: random.Random) -> Completion:
    tokens = [rng.randrange(97, 123) for _ in range(rng.randrange(1, 4))] + [STOP_TOKEN]
    return Completion(tuple(tokens), tuple(-5.6 + rng.random() / 10 for _ in tokens), FinishReason.STOP)
