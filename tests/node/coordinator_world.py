"""A real coordinator daemon on loopback, and its peers: honest clients, and senders of arbitrary bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tests.builder import build_header, build_manifest, build_spec, pinned, provenance, role_keys

from prime_lab.memory_blobs import MemoryBlobs, MemoryDocuments
from prime_lab.memory_store import MemoryStore
from prime_node.adapters.prometheus_metrics import PrometheusMetrics
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.http_client import HttpClient
from prime_node.cli.wire_store import open_blobs, open_direct, open_storage
from prime_node.coordinator.api.cached_response import OLD_S_MAX
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.assignments import secret_of
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.daemon import serve_coordinator
from prime_node.ports.environment import HeldOutProblem
from prime_protocol import limits
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import HTTP_STATUS, ErrorCode
from prime_protocol.evidence import BundleEvidence
from prime_protocol.identity import SigningKey
from prime_protocol.manifest import SignedManifest, sign_manifest
from prime_protocol.parcel import pack_parcel
from prime_protocol.replies import CheckTask, TrainBatch
from prime_protocol.requests import (
    BatchRequest,
    CheckRequest,
    CheckResultRequest,
    HeartbeatRequest,
    JoinRequest,
    LeaseRequest,
    Request,
    WorkerState,
)
from prime_protocol.rollout import Completion, EngineInfo, FinishReason, pack_body, rollouts_for
from prime_protocol.run_spec import EnvironmentSpec, PinnedRun
from prime_protocol.verdict import RejectReason, Verdict
from prime_protocol.weights import Weights, WeightTensor

ROOT, COORDINATOR, TRAINER, VALIDATOR, ANNA, BEN = (SigningKey(bytes([number]) * 32) for number in range(11, 17))
CONFIG_JSON = b'{"model_type": "toy"}'
ENGINE = EngineInfo(name="toy", version="1", dtype="fp32", device="cpu")
STOP_TOKEN = 0


class Letters:
    """Environment (ports.environment.Environment) that asks to repeat a number."""

    def prompt(self, index: int) -> str:
        return f"repeat {index}"

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        return float(completion == str(index) and finished)

    def answer(self, index: int) -> str:
        return str(index)

    def held_out(self, count: int) -> list[HeldOutProblem]:
        return []


class LongTexts(Letters):
    """Environment whose prompts are almost as long as a run allows."""

    def prompt(self, index: int) -> str:
        return str(index).ljust(limits.Limits().prompt_tokens_max, "x")


class Bytes:
    """Tokenizer (ports.environment.Tokenizer) with one token per byte."""

    vocab_size = 256
    stop_token_id = STOP_TOKEN

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token for token in token_ids if token).decode(errors="replace")


def make_run(**changes: object) -> PinnedRun:
    fields: dict[str, object] = {
        "vocab_size": 256,
        "environments": (EnvironmentSpec(name="letters", id="letters"),),
        "sampling": Sampling(completion_tokens_max=4, stop_token_ids=(STOP_TOKEN,)),
        "max_steps": 100,
        "groups_per_step": 4,
        "rollouts_per_group": 2,
        "lease_seconds": 60.0,
    }
    keys = role_keys(ROOT, COORDINATOR, TRAINER, VALIDATOR)
    return pinned(build_spec(keys, {"config.json": CONFIG_JSON}, **fields | changes), ROOT)


def make_policy(version: int) -> Weights:
    return {"w": WeightTensor("bf16", (64,), np.arange(64, dtype=np.uint16) + np.uint16(version % 2**16))}


def make_manifest(
    run: PinnedRun, after: SignedManifest | None, /, *, batch: str | None = None, **changes: object
) -> tuple[SignedManifest, tuple[bytes, ...]]:
    """Return the policy after `after`, with its blobs."""
    version = 0 if after is None else after.manifest.policy_version + 1
    weights = make_policy(version)
    encoded = encode_checkpoint(weights)
    fields = {"produced_by": provenance(version, batch=batch)} | changes
    return sign_manifest(build_manifest(run, after, weights, encoded, **fields), TRAINER), encoded.blobs


def memory_parts(run: PinnedRun, **settings: object) -> Parts:
    """Return the parts of a coordinator that keeps everything in memory."""
    return Parts(
        run=run,
        key=COORDINATOR,
        secret=secret_of(COORDINATOR),
        config=CoordinatorConfig.load(
            {"coordinator": {"port": 0, "tick_seconds": 0.05, "grace_seconds": 1.0, "lag_ms_max": 0.0, **settings}}
        ),
        clock=SystemClock(),
        store=MemoryStore(),
        bundles=MemoryBlobs(),
        archived=MemoryBlobs(),
        public=MemoryBlobs(),
        published=MemoryDocuments(),
        private=MemoryDocuments(),
        web=AiohttpServer(),
        metrics=PrometheusMetrics(),
        environments={"letters": Letters()},
        tokenizer=Bytes(),
    )


async def folder_parts(run: PinnedRun, folder: Path, **settings: object) -> Parts:
    """Return the parts of a coordinator as in production: the store and blobs of its settings, by default SQLite and folders."""
    memory = memory_parts(run, **settings)
    storage = await open_storage(memory.config, run, folder, public=folder / "public")
    return Parts(
        run=run,
        key=COORDINATOR,
        secret=memory.secret,
        config=memory.config,
        clock=memory.clock,
        store=storage.store,
        bundles=await open_blobs(memory.config.blobs, run, folder / "bundles"),
        archived=await open_blobs(memory.config.blobs, run, folder / "archived"),
        direct=await open_direct(memory.config, run),
        public=await open_blobs(memory.config.blobs, run, folder / "public" / "blobs"),
        published=storage.published,
        private=storage.private,
        leadership=storage.leadership,
        web=memory.web,
        metrics=memory.metrics,
        environments=memory.environments,
        tokenizer=memory.tokenizer,
    )


@dataclass
class World:
    """A running daemon with its peers."""

    run: PinnedRun
    parts: Parts
    url: str
    session: aiohttp.ClientSession
    clients: dict[str, HttpClient] = field(default_factory=dict)
    head: SignedManifest | None = None
    batch: str | None = None
    """Digest of the last batch."""
    epoch: str = ""
    """Epoch of the coordinator, for requests that a test signs itself."""
    clock_ahead_ms: int = 0
    """Lead of the coordinator's clock over the one of `parts`."""

    def client(self, key: SigningKey) -> HttpClient:
        if key.key_id not in self.clients:
            client = HttpClient(self.url, run=self.run.digest, clock=self.parts.clock, key=key)
            self.clients[key.key_id] = client
        return self.clients[key.key_id]

    async def join(self, *keys: SigningKey) -> None:
        for key in keys:
            request = JoinRequest(name=f"node {key.key_id[-4:]}", software="1", engine=ENGINE, rollouts_max=64)
            await self.client(key).join(request)

    async def publish(self) -> SignedManifest:
        """Publish the next policy."""
        self.head, parts = make_manifest(self.run, self.head, batch=self.batch)
        for part in parts:
            await self.client(TRAINER).put_blob(part)
        await self.client(TRAINER).publish(self.head.envelope)
        return self.head

    async def lease(
        self,
        key: SigningKey,
        *,
        rollouts_max: int = 64,
        wait_s: float = 0.0,
        holding: tuple[str, ...] | None = None,
    ) -> Lease:
        assert self.head is not None
        request = LeaseRequest(
            policy_version=self.head.manifest.policy_version,
            policy_digest=self.head.digest,
            rollouts_max=rollouts_max,
            wait_s=wait_s,
            holding=holding,
        )
        answer = await self.client(key).lease(request)
        assert isinstance(answer, Envelope), answer
        return parse_json(answer.verify(PayloadType.LEASE, trusted=(COORDINATOR.key_id,)), Lease)

    async def judge(self, *, reason: RejectReason | None = None, unscored: tuple[int, ...] = ()) -> CheckTask:
        """Take a bundle and return a verdict on it."""
        task = await self.take_task(VALIDATOR)
        await self.give_verdict(task, reason=reason, unscored=unscored)
        return task

    async def take_task(self, validator: SigningKey) -> CheckTask:
        task = await self.client(validator).check(CheckRequest(policy_versions=(), wait_s=5.0))
        assert isinstance(task, CheckTask), task
        return task

    async def give_verdict(
        self,
        task: CheckTask,
        *,
        reason: RejectReason | None = None,
        validator: SigningKey = VALIDATOR,
        unscored: tuple[int, ...] = (),
        evidence: BundleEvidence | None = None,
    ) -> None:
        verdict = Verdict.refuse(reason) if reason else Verdict.accept()
        rewards = () if reason else tuple(float(index % 2) for index in range(task.lease.num_rollouts))
        await self.client(validator).check_result(
            CheckResultRequest(
                bundle=task.bundle,
                verdict=verdict,
                rewards=rewards,
                num_tokens=len(rewards),
                unscored=unscored,
                evidence=evidence,
            )
        )

    async def fill(self, step: int, key: SigningKey = ANNA) -> TrainBatch:
        """Generate, judge and hand over one whole step."""
        while True:
            answer = await self.client(TRAINER).batch(BatchRequest(step=step, durable_step=step))
            if isinstance(answer, Envelope):
                self.batch = answer.digest
                return parse_json(answer.verify(PayloadType.BATCH, trusted=(COORDINATOR.key_id,)), TrainBatch)
            lease = await self.lease(key)
            await self.client(key).upload(make_parcel(lease, key))
            await self.judge()

    async def post(self, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        """Send any bytes. Return the status and the JSON of the answer."""
        async with self.session.post(self.url + path, data=body, headers=headers) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if text else {}

    async def get(self, path: str, **headers: str) -> tuple[int, bytes, Mapping[str, str]]:
        async with self.session.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.read(), answer.headers

    async def learn_epoch(self) -> None:
        self.epoch = json.loads((await self.get("/healthz"))[1])["epoch"]

    async def status(self) -> dict[str, Any]:
        """Return a status that was made after this call. Under load, the coordinator answers from its cache for a while."""
        asked_ms, found = self.parts.clock.now_ms() + self.clock_ahead_ms, dict[str, Any]()

        async def is_new() -> bool:
            found.update(json.loads((await self.get("/v1/status"))[1]))
            return bool(found["server_time_ms"] >= asked_ms)

        await self.until(is_new, seconds=2 * OLD_S_MAX)
        return found

    async def until(self, condition: Callable[[], Awaitable[bool]], *, seconds: float = 30.0) -> None:
        """Poll until a condition holds that only time can cause."""
        for _ in range(round(100 * seconds)):
            if await condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never happened")

    async def until_status(self, name: str, value: object) -> None:
        async def holds() -> bool:
            return bool((await self.status())[name] == value)

        await self.until(holds)

    def stamped(self, message: Request, /, **changes: object) -> bytes:
        """Return the payload of a valid request, with `changes`."""
        fields: dict[str, object] = {
            "run": self.run.digest,
            "nonce": secrets.token_hex(16),
            "issued_at_ms": self.parts.clock.now_ms(),
            "epoch": self.epoch,
            "request": message.model_dump(mode="json"),
        }
        return json.dumps(fields | changes).encode()

    def signed(self, message: Request, key: SigningKey, /, **changes: object) -> bytes:
        return seal(self.stamped(message, **changes), PayloadType.REQUEST, key).to_bytes()


HEARTBEAT = HeartbeatRequest(state=WorkerState.IDLE, policy_version=0, bundles_spooled=0)


def make_parcel(lease: Lease, key: SigningKey, *, body: bytes | None = None, **changes: object) -> bytes:
    """Return what an honest worker uploads for a lease, with `changes` to its header."""
    completion = Completion((7, 7, STOP_TOKEN), (-0.1, -0.2, -0.3), FinishReason.STOP)
    packed, size = pack_body(rollouts_for(lease, [completion] * lease.num_rollouts))
    body = packed if body is None else body
    header = build_header(lease, body, size, **{"worker": key.key_id, "engine": ENGINE} | changes)
    return pack_parcel(header, body, PayloadType.ROLLOUT, key)


async def refused(world: World, code: ErrorCode, path: str, body: bytes, **headers: str) -> str:
    """Check that the answer is this error, with its status, as an ErrorBody without internals.

    Returns the detail.
    """
    status, answer = await world.post(path, body, **headers)
    assert (answer.get("code"), status) == (code, HTTP_STATUS[code]), answer
    assert answer.keys() <= {"code", "detail", "retry_after_s", "epoch"}
    assert "Traceback" not in answer["detail"]
    return str(answer["detail"])


@contextlib.asynccontextmanager
async def running(parts: Parts, *workers: SigningKey, at: str = "127.0.0.1") -> AsyncIterator[World]:
    """Start a daemon, stop it at the end, and fail if it failed. Its clients ask it by the name or IP address `at`.

    With workers it has a policy, and they have joined.
    """
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    daemon = asyncio.create_task(serve_coordinator(parts, stop, ready=port.set_result))
    await asyncio.wait({daemon, port}, return_when=asyncio.FIRST_COMPLETED)
    if daemon.done():
        daemon.result()
    async with aiohttp.ClientSession() as session:
        world = World(parts.run, parts, f"http://{at}:{port.result()}", session)
        try:
            await world.learn_epoch()
            if workers:
                await world.publish()
                await world.join(*workers)
            yield world
        finally:
            for client in world.clients.values():
                await client.close()
            stop.set()
            await daemon


@contextlib.asynccontextmanager
async def running_with_anna() -> AsyncIterator[World]:
    """Start a daemon with policy 0 and one worker."""
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await world.join(ANNA)
        yield world
