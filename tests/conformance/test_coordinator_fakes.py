"""The coordinators in memory that tests of roles use answer as a real one does to its client over HTTP: results and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from tests.node import batch_coordinator, validator_world, worker_world
from tests.node.batch_coordinator import BatchCoordinator
from tests.node.coordinator_world import make_parcel, memory_parts, running
from tests.node.memory_coordinator import MemoryCoordinator
from tests.node.publisher_world import weights
from tests.node.table_engine import TableEngine, table_weights
from tests.node.validator_world import LengthEnvironment, LetterTokenizer, MemoryCheckQueue
from tests.time_world import VirtualClock

from prime_node.adapters.web.http_client import HttpClient
from prime_node.ports.environment import Environment, Tokenizer
from prime_node.worker.generating import open_lease
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.replies import CheckTask, UploadReply
from prime_protocol.requests import (
    BatchRequest,
    BundleRequest,
    CheckRequest,
    CheckResultRequest,
    HeartbeatRequest,
    HoldingRequest,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    ReceiptsRequest,
    ReturnLeaseRequest,
    WorkerState,
)
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason, Verdict

NONE = "0" * 64
Call = Callable[[], Awaitable[object]]


class Prompts(LengthEnvironment):
    """The same environment, whose prompts are in the vocabulary whatever their number."""

    def prompt(self, index: int) -> str:
        return super().prompt(index % 8)


async def outcome(call: Call) -> str:
    """Return what a caller sees: an error with its code, or the kind of an answer."""
    try:
        found = await call()
    except RemoteError as error:
        return f"error {error.code}"
    if isinstance(found, UploadReply):
        return "pending" if found.verdict is None else f"verdict {found.verdict.reason}"
    return repr(found) if isinstance(found, bytes | str) else type(found).__name__


async def coordinator_of(
    stack: AsyncExitStack,
    run: PinnedRun,
    key: SigningKey,
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    **settings: object,
) -> Callable[[SigningKey], HttpClient]:
    """Run a real coordinator, and return a function that makes a client of it."""
    parts = replace(memory_parts(run, **settings), key=key, environments=environments, tokenizer=tokenizer)
    world = await stack.enter_async_context(running(parts))
    return world.client


async def worker_outcomes(port: Any, policy: str, join: JoinRequest) -> dict[str, str]:
    """Return a worker's answers, in the order of the calls."""
    beat = HeartbeatRequest(state=WorkerState.IDLE, policy_version=0, bundles_spooled=0)
    asked = LeaseRequest(policy_version=0, policy_digest=policy, rollouts_max=4)
    found: dict[str, str] = {}

    async def note(name: str, call: Call) -> None:
        found[name] = await outcome(call)

    async def lease() -> Lease:
        answer = await port.lease(asked)
        assert isinstance(answer, Envelope)
        return open_lease(answer, asked, run=port_run, worker=worker_world.WORKER.key_id)

    port_run = worker_world.make_run(lease_seconds=600.0)
    await note("a heartbeat before joining", lambda: port.heartbeat(beat))
    await note("a lease before joining", lambda: port.lease(asked))
    await note("receipts before joining", lambda: port.receipts(ReceiptsRequest()))
    await note("to leave before joining", lambda: port.leave(LeaveRequest()))
    await note("to join", lambda: port.join(join))
    await note("the standing of a stranger", lambda: port.standing(worker_world.STRANGER.key_id))
    await note("a lease of an unknown policy", lambda: port.lease(asked.model_copy(update={"policy_version": 7})))
    await note("a lease of another policy", lambda: port.lease(asked.model_copy(update={"policy_digest": NONE})))
    await note("to return no lease", lambda: port.return_lease(ReturnLeaseRequest(lease_id=NONE)))
    returned, kept = await lease(), await lease()
    back = ReturnLeaseRequest(lease_id=returned.lease_id)
    await note("to return a lease", lambda: port.return_lease(back))
    await note("to return it again", lambda: port.return_lease(back))
    parcel = partial(make_parcel, key=worker_world.WORKER, engine=TableEngine().info)
    await note("a bundle of a lease that was returned", lambda: port.upload(parcel(returned)))
    await note("a bundle of no lease", lambda: port.upload(parcel(kept, lease_id=NONE)))
    await note("another body", lambda: port.upload(parcel(kept)[:-1] + b"?"))
    await note("a bundle", lambda: port.upload(parcel(kept)))
    await note("the same bundle", lambda: port.upload(parcel(kept)))
    await note("receipts", lambda: port.receipts(ReceiptsRequest()))
    await note("a heartbeat", lambda: port.heartbeat(beat))
    await note("to leave", lambda: port.leave(LeaveRequest()))
    await note("a lease after leaving", lambda: port.lease(asked))
    await note("receipts after leaving", lambda: port.receipts(ReceiptsRequest()))
    return found


async def test_a_workers_coordinator_in_memory_answers_as_a_real_one() -> None:
    run = worker_world.make_run(lease_seconds=600.0)
    fake = MemoryCoordinator(run, VirtualClock())
    signed = fake.publish_policy(table_weights(0))
    join = JoinRequest(name="a", software="1", engine=TableEngine().info, rollouts_max=64)
    async with AsyncExitStack() as stack:
        client = await coordinator_of(stack, run, worker_world.COORDINATOR, {"toy": Prompts()}, LetterTokenizer())
        for blob in signed.manifest.blobs:
            await client(worker_world.TRAINER).put_blob(fake.blobs[blob.digest])
        await client(worker_world.TRAINER).publish(signed.envelope)
        real = await worker_outcomes(client(worker_world.WORKER), signed.digest, join)
    assert await worker_outcomes(fake, signed.digest, join) == real


async def public_outcomes(port: Any, blob: str, size: int) -> dict[str, str]:
    """Return what anyone gets who reads."""
    calls: dict[str, Call] = {
        "the run": port.run_spec,
        "the head": port.head,
        "a policy": lambda: port.manifest(0),
        "no policy": lambda: port.manifest(1),
        "no key ring": lambda: port.key_ring(1),
        "no amendment": lambda: port.calibration(1),
        "the timestamp": port.timestamp,
        "a blob": lambda: port.blob(blob),
        "no blob": lambda: port.blob(NONE),
        "a part of it": lambda: port.blob(blob, start=2, end=5),
        "no bytes of it": lambda: port.blob(blob, start=5, end=5),
        "its end": lambda: port.blob(blob, start=size - 1),
        "more than it has": lambda: port.blob(blob, start=1, end=size + 9),
        "a part behind its end": lambda: port.blob(blob, start=size, end=size + 9),
    }
    return {name: await outcome(call) for name, call in calls.items()}


async def test_a_source_in_memory_answers_as_a_real_coordinator() -> None:
    run = worker_world.make_run()
    fake = worker_world.MemorySource(run)
    async with AsyncExitStack() as stack:
        client = await coordinator_of(stack, run, worker_world.COORDINATOR, {"toy": Prompts()}, LetterTokenizer())
        trainer = client(worker_world.TRAINER)
        assert await outcome(trainer.head) == await outcome(fake.head)
        assert await outcome(trainer.timestamp) == await outcome(fake.timestamp)
        signed = fake.publish(table_weights(0))
        for blob in signed.manifest.blobs:
            await trainer.put_blob(fake.blobs[blob.digest])
        await trainer.publish(signed.envelope)
        part = signed.manifest.encodings[0].parts[0]
        real = await public_outcomes(client(worker_world.STRANGER), part.digest, part.size)
    assert await public_outcomes(fake, part.digest, part.size) == real


async def validator_outcomes(port: Any) -> dict[str, str]:
    """Return a validator's answers about one bundle, in the order of the calls."""
    found: dict[str, str] = {}
    nats = np.zeros(3, np.float32)

    async def note(name: str, call: Call) -> None:
        found[name] = await outcome(call)

    def result(bundle: str, verdict: Verdict, num_rewards: int) -> CheckResultRequest:
        return CheckResultRequest(bundle=bundle, verdict=verdict, rewards=(0.0,) * num_rewards, num_tokens=num_rewards)

    accepted, late = Verdict.accept(), Verdict.refuse(RejectReason.LEASE_EXPIRED)
    await note("no bundle", lambda: port.bundle(BundleRequest(bundle=NONE)))
    await note("a verdict on no bundle", lambda: port.check_result(result(NONE, accepted, 1)))
    await note("logprobs of no bundle", lambda: port.put_logprobs(NONE, nats))
    await note("a list of no bundles", lambda: port.holding(HoldingRequest(session="a" * 32, bundles=())))
    lost = await port.holding(HoldingRequest(session="a" * 32, bundles=(NONE,)))
    found["a list of an unknown bundle"] = repr(lost.lost)
    task = await port.check(CheckRequest(policy_versions=(), session="a" * 32, names_bundles=True))
    assert isinstance(task, CheckTask)
    kept = await port.holding(HoldingRequest(session="a" * 32, bundles=(task.bundle,)))
    found["a list of a bundle"] = repr(kept.lost)
    await note("nothing more", lambda: port.check(CheckRequest(policy_versions=(), session="a" * 32)))
    assert digest_of(await port.bundle(BundleRequest(bundle=task.bundle))) == task.bundle
    count = task.lease.num_rollouts
    await note("a reason of the coordinator's", lambda: port.check_result(result(task.bundle, late, 0)))
    await note("too few rewards", lambda: port.check_result(result(task.bundle, accepted, count - 1)))
    await note("a verdict", lambda: port.check_result(result(task.bundle, accepted, count)))
    await note("the same verdict", lambda: port.check_result(result(task.bundle, accepted, count)))
    await note("a bundle that has a verdict", lambda: port.bundle(BundleRequest(bundle=task.bundle)))
    return found


async def test_a_validators_queue_in_memory_answers_as_a_real_coordinator() -> None:
    run = validator_world.RUN
    source = worker_world.MemorySource(run)
    signed = source.publish(table_weights(0))
    join = JoinRequest(name="a", software="1", engine=TableEngine().info, rollouts_max=64)
    asked = LeaseRequest(policy_version=0, policy_digest=signed.digest, rollouts_max=16)
    async with AsyncExitStack() as stack:
        client = await coordinator_of(
            stack, run, worker_world.COORDINATOR, {"toy": Prompts()}, LetterTokenizer(), second_look_share=0.0
        )
        for blob in signed.manifest.blobs:
            await client(worker_world.TRAINER).put_blob(source.blobs[blob.digest])
        await client(worker_world.TRAINER).publish(signed.envelope)
        worker = client(worker_world.WORKER)
        await worker.join(join)
        answer = await worker.lease(asked)
        assert isinstance(answer, Envelope)
        lease = open_lease(answer, asked, run=run, worker=worker_world.WORKER.key_id)
        parcel = make_parcel(lease, worker_world.WORKER, engine=TableEngine().info)
        await worker.upload(parcel)
        real = await validator_outcomes(client(worker_world.COORDINATOR))
    assert await validator_outcomes(MemoryCheckQueue([(lease, parcel)], asyncio.Event())) == real


async def trainer_outcomes(port: Any, run: PinnedRun) -> dict[str, str]:
    """Return a trainer's answers before any batch, in the order of the calls."""
    found: dict[str, str] = {}
    source = worker_world.MemorySource(run)

    async def note(name: str, call: Call) -> None:
        found[name] = await outcome(call)

    async def put(*signed: Any) -> None:
        for blob in (blob for one in signed for blob in one.manifest.blobs):
            await port.put_blob(source.blobs[blob.digest])

    def batch(*, step: int = 0, part: int = 0) -> Call:
        return lambda: port.batch(BatchRequest(step=step, part=part, durable_step=0))

    first, key = source.publish(weights(0), key=batch_coordinator.TRAINER), batch_coordinator.TRAINER
    second = source.publish(weights(1), key=key)
    other = source.publish(weights(0, other=True), previous=None, key=key, policy_version=0)
    foreign = source.publish(weights(2), previous=second, key=batch_coordinator.STRANGER)
    await note("the head before the first", port.head)
    await note("a policy without its blobs", lambda: port.publish(first.envelope))
    await put(first, second, other, foreign)
    await note("a policy after none", lambda: port.publish(second.envelope))
    await note("a policy of a stranger", lambda: port.publish(foreign.envelope))
    await note("a policy", lambda: port.publish(first.envelope))
    await note("the same policy", lambda: port.publish(first.envelope))
    await note("another one of its version", lambda: port.publish(other.envelope))
    await note("the head", port.head)
    await note("a known policy", lambda: port.manifest(0))
    await note("no policy", lambda: port.manifest(1))
    await note("no blob", lambda: port.blob(NONE))
    await note("a blob", lambda: port.put_blob(b"a blob"))
    await note("no bundle", lambda: port.bundle(BundleRequest(bundle=NONE)))
    await note("a batch after the last one", batch(step=run.spec.max_steps))
    await note("a batch of no part", batch(part=run.spec.schedule.batches_per_step))
    await note("a batch of a policy that is not published", batch(step=run.spec.max_steps - 1))
    return found


async def test_a_trainers_coordinator_in_memory_answers_as_a_real_one() -> None:
    run = batch_coordinator.make_run()
    async with AsyncExitStack() as stack:
        client = await coordinator_of(stack, run, batch_coordinator.COORDINATOR, {"echo": Prompts()}, LetterTokenizer())
        real = await trainer_outcomes(client(batch_coordinator.TRAINER), run)
    assert await trainer_outcomes(BatchCoordinator(run), run) == real
