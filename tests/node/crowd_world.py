"""Peers that keep working while coordinators die, and a check of what they were promised."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, TRAINER, VALIDATOR, World, make_manifest, make_parcel
from tests.time_world import be_slow, until

from prime_node.ports.transport import Unreachable
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.replies import CheckTask, TrainBatch
from prime_protocol.requests import BatchRequest, CheckRequest, CheckResultRequest
from prime_protocol.verdict import RejectReason, Verdict

T = TypeVar("T")
PROGRESS_S_MAX = 120.0
"""Timeout in seconds for progress: coordinators that come back need seconds, a busy machine a minute."""


async def persist(call: Callable[[], Awaitable[T]]) -> T:
    """Call until there is an answer: the daemon is unreachable now and then."""
    while True:
        try:
            return await call()
        except Unreachable:
            await be_slow(0.02)
        except RemoteError as error:
            if not error.is_transient:
                raise
            await be_slow(error.retry_after_s or 0.02)


class Crowd:
    """Peers that keep working through failures and remember each acknowledgement."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.uploaded: dict[str, tuple[SigningKey, bytes]] = {}
        self.accepted: set[str] = set()
        self.batches: dict[int, Envelope] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Let two workers, a validator and a trainer work meanwhile; close their clients in the end."""
        try:
            self._tasks = [
                asyncio.create_task(each) for each in (self.work(ANNA), self.work(BEN), self.judge(), self.train())
            ]
            yield
        finally:
            await self.stop()
            for client in self.world.clients.values():
                await client.close()

    async def stop(self) -> None:
        """End their work. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def pause(self, seconds: float) -> None:
        """Wait while they work. Raises what ended one of them."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        assert not done, [task.result() for task in done]

    async def progress(self, steps: int, *, batches_min: int = 0, accepted_min: int = 0) -> None:
        """Wait until the trainer has this many batches more. Raises TimeoutError after PROGRESS_S_MAX."""
        batches = max(len(self.batches) + steps, batches_min)
        async with asyncio.timeout(PROGRESS_S_MAX):
            while len(self.batches) < batches or len(self.accepted) < accepted_min:
                await self.pause(0.05)

    async def work(self, key: SigningKey) -> None:
        world = self.world
        await persist(lambda: world.join(key))
        while True:
            await until(lambda: world.head is not None, seconds=60.0)
            try:
                lease = await persist(lambda: world.lease(key, rollouts_max=2, wait_s=0.2, holding=()))
            except AssertionError:  # NotYet
                continue
            parcel = make_parcel(lease, key)
            reply = await persist(lambda parcel=parcel: world.client(key).upload(parcel))
            if reply.verdict is None:
                self.uploaded[reply.bundle] = (key, parcel)

    async def judge(self) -> None:
        client = self.world.client(VALIDATOR)
        while True:
            task = await persist(lambda: client.check(CheckRequest(policy_versions=(), wait_s=0.5)))
            if isinstance(task, CheckTask):
                is_good = self.random.random() < 0.8
                verdict = Verdict.accept() if is_good else Verdict.refuse(RejectReason.UNVERIFIABLE)
                rewards = (1.0,) * task.lease.num_rollouts if is_good else ()
                result = CheckResultRequest(bundle=task.bundle, verdict=verdict, rewards=rewards)
                try:
                    await persist(lambda result=result: client.check_result(result))
                except RemoteError as error:
                    if error.code is not ErrorCode.NOT_FOUND:  # a restarted coordinator has handed it to no validator
                        raise
                    continue
                if is_good:
                    self.accepted.add(task.bundle)

    async def train(self) -> None:
        world, client = self.world, self.world.client(TRAINER)
        manifest, parts = make_manifest(world.run, None)
        for step in range(10_000):
            for part in parts:
                await persist(lambda part=part: client.put_blob(part))
            await persist(lambda manifest=manifest: client.publish(manifest.envelope))
            world.head = manifest
            # The durable step stays behind, so that every batch can be asked for again in the end.
            request = BatchRequest(step=step, durable_step=0, wait_s=1.0)
            while not isinstance(batch := await persist(lambda request=request: client.batch(request)), Envelope):
                continue
            self.batches[step] = batch
            manifest, parts = make_manifest(world.run, manifest, batch=batch.digest)


async def check_promises(crowd: Crowd) -> None:
    """Check that each acknowledged item exists exactly once."""
    world = crowd.world
    assert len(crowd.batches) > 5
    assert len(crowd.accepted) > 10
    trained: set[tuple[str, int]] = set()
    for step, promised in crowd.batches.items():
        again = await world.client(TRAINER).batch(BatchRequest(step=step, durable_step=0))
        assert isinstance(again, Envelope)
        assert again.digest == promised.digest, f"the batch of step {step} changed"
        batch = parse_json(promised.verify(PayloadType.BATCH, trusted=(COORDINATOR.key_id,)), TrainBatch)
        assert [group.slot for group in batch.groups] == list(range(4 * step, 4 * step + 4))
        for group in batch.groups:
            assert (group.bundle, group.first) not in trained, "a group is trained twice"
            trained.add((group.bundle, group.first))
            assert group.bundle in crowd.accepted | set(crowd.uploaded)
    for bundle, (key, parcel) in crowd.uploaded.items():
        reply = await world.client(key).upload(parcel)  # LEASE_UNKNOWN if it were lost
        assert reply.bundle == bundle
        if bundle in crowd.accepted:
            assert reply.verdict == Verdict.accept(), f"bundle {bundle} was accepted once"
