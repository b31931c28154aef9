"""Cheats as real workers against the real daemon: a run in memory with cheats, honest workers, a validator and a trainer.

Concurrency: workers and the validator run the product's loops, over HTTP on loopback. The trainer takes each step's batch and
publishes the next of the policies that were trained in advance. So it learns nothing, but all its training data is known. The run
ends when every cheat is banned or has had `rollouts_max` judged, when a test's own condition holds, or with the last step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from tests.adversaries.policies import ENVIRONMENT, Policies, logits_of
from tests.adversaries.watching import Judged, Noting, Outcome, Part, Watched
from tests.node.coordinator_world import World, memory_parts, running
from tests.node.table_engine import equipped
from tests.node.worker_world import COORDINATOR, TRAINER, MemorySource, make_run

from prime_lab.adversaries.engine import Means
from prime_lab.adversaries.table import ACCOMPLICES, ADVERSARIES
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.cli.shipped import shipped_calibration
from prime_node.ports.transport import ValidatorPort, WorkerPort
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.loop import run_validator as run_validator
from prime_node.validator.scoring_workers import ScoringWorkers
from prime_node.validator.validator import Validator
from prime_node.worker.config import WorkerConfig
from prime_node.worker.generating import requests_for
from prime_node.worker.loop import run_worker as run_worker
from prime_node.worker.worker import Worker
from prime_protocol.assignment import Lease
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, open_envelope, parse_json
from prime_protocol.identity import SigningKey
from prime_protocol.replies import TrainBatch
from prime_protocol.requests import BatchRequest
from prime_protocol.rollout import Completion
from prime_protocol.run_spec import ModelFile, PinnedRun
from prime_protocol.verdict import Receipt
from prime_protocol.weights import Weights

SEEN = 8
"""Policies of the chain that come before the run: a cheat may be eight steps behind from the first lease on."""


STEPS_MAX = 1_000
"""Steps of a run that ends by a condition. All steps after the last policy have that policy."""
Until = Callable[[Sequence[Part], Sequence[TrainBatch]], bool]
"""Condition on the parts and the trained batches that ends a run."""


class Arena:
    """Holds what all runs share: engines, which take a while to build."""

    def __init__(self, policies: Policies, folder: Path) -> None:
        self.policies = policies
        self._folder = folder
        self._engines: list[TransformersEngine] = []
        self._small: TransformersEngine | None = None
        self._small_logits = logits_of(policies.small_folder, policies.small)
        self._runs = 0

    async def close(self) -> None:
        for engine in (*self._engines, *([self._small] if self._small else [])):
            await engine.close()

    async def fight(
        self,
        *names: str,
        honest: int = 1,
        rollouts_max: int = 64,
        until: Until | None = None,
        groups_per_step: int = 8,
        rollouts_per_group: int = 4,
        seed: int = 0,
        seconds_max: float = 120.0,
        audits_first: int = 0,
        **spec: object,
    ) -> Outcome:
        """Run these cheats with `honest` honest workers until the condition holds, however long that takes the machine.

        Without a condition, the run ends when each cheat is banned or had `rollouts_max`. The cheats begin after
        `audits_first` passed audits, which they see in their receipts.
        """
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        if until is not None:
            spec.setdefault("max_steps", STEPS_MAX)
        run = self._make_run(groups_per_step, rollouts_per_group, seed, **spec)
        cast_of = [ADVERSARIES[name] for name in names]
        partners = [ACCOMPLICES[one.partner] for one in cast_of if one.partner is not None]
        keys = iter(SigningKey(bytes([50 + number]) * 32) for number in range(100))
        await self._load_small()
        shared = Means()
        parts = [
            Part(next(keys), one, self._means(shared, seed=seed + number))
            for number, one in enumerate((*cast_of, *partners, *[None] * honest))
        ]
        judged: list[Judged] = []
        passed = Counter[str]()
        for part in parts:
            part.means.is_trusted = lambda key=part.key.key_id: passed[key] >= audits_first
        news = asyncio.Event()
        await self._grow(len(parts) + 1)
        async with running(await self._parts(run)) as world, asyncio.TaskGroup() as tasks:
            stop = asyncio.Event()
            batches: list[TrainBatch] = []
            training = tasks.create_task(self._train(world, run, batches, news))
            watched = Watched(world.client(COORDINATOR), judged, passed, news)
            tasks.create_task(run_validator(self._validator(world, run, watched), stop))
            working = [
                tasks.create_task(self._work(world, run, part, engine, folder / str(number), stop, news))
                for number, (part, engine) in enumerate(zip(parts, self._engines[1:], strict=False))
            ]
            cheats = [(part, task) for part, task in zip(parts, working, strict=True) if part.adversary in cast_of]

            def is_over() -> bool:
                had = Counter[str]()
                for one in judged:
                    had[one.worker] += one.lease.num_rollouts
                if until is not None or training.done():
                    return training.done() or (until is not None and until(parts, batches))
                return all(
                    task.done() or had[part.key.key_id] + rollouts_per_group * part.replies.total() >= rollouts_max
                    for part, task in cheats
                )

            for task in (training, *working):
                task.add_done_callback(lambda _: news.set())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_max):
                    while not is_over():
                        news.clear()
                        await news.wait()
            status = {worker["worker"]: worker for worker in (await world.status())["workers"]}
            training.cancel()
            stop.set()
            receipts = {part.key.key_id: await _receipts(world, part.key) for part in parts}
        return Outcome(parts, judged, batches, status, receipts)

    async def honest(self, lease: Lease) -> list[Completion]:
        """Return an honest worker's completions for a lease."""
        await self._grow(1)
        await self._engines[0].load(self._policy(lease.policy_version), policy_version=lease.policy_version)
        return await self._engines[0].generate(requests_for(lease), lease.sampling)

    # The parts of a run

    def _policy(self, version: int) -> Weights:
        return self.policies.chain[min(SEEN + version, len(self.policies.chain) - 1)]

    def _make_run(self, groups: int, rollouts: int, seed: int, **spec: object) -> PinnedRun:
        files = {path.name: path.read_bytes() for path in sorted(self.policies.folder.iterdir())}
        fields: dict[str, object] = {
            "created_at_ms": seed,  # another run, with other problems and seeds
            "model_files": tuple(
                ModelFile(name=name, digest=digest_of(data), size=len(data)) for name, data in files.items()
            ),
            "vocab_size": self.policies.tokenizer.vocab_size,
            "environments": (ENVIRONMENT,),
            "sampling": self.policies.sampling,
            "max_steps": len(self.policies.chain) - SEEN - 1,
            "groups_per_step": groups,
            "rollouts_per_group": rollouts,
            "lease_seconds": 60.0,
            "heartbeat_seconds": 1.0,
            "checks": CheckPolicy(
                proofs=True,
                calibration=shipped_calibration(),
                flips_explained=True,
                close_flips_seen=True,
                shading_seen=True,
                logprobs_judged=True,
            ),
        }
        return make_run(**fields | spec)

    async def _parts(self, run: PinnedRun) -> Any:
        parts = dataclasses.replace(
            memory_parts(run, tick_seconds=0.02),
            key=COORDINATOR,
            environments={"spell": self.policies.environment},
            tokenizer=self.policies.tokenizer,
        )
        for path in self.policies.folder.iterdir():
            await parts.public.put(path.read_bytes())
        return parts

    async def _load_small(self) -> None:
        if self._small is None:
            self._small = TransformersEngine(self.policies.small_folder, threads=1)
            await self._small.load(self.policies.small, policy_version=0)

    def _means(self, shared: Means, *, seed: int) -> Means:
        """Return the means of one worker; accomplices share their boxes."""
        policies, tokenizer = self.policies, self.policies.tokenizer

        def score(prompt: tuple[int, ...], completion: tuple[int, ...]) -> float:
            """Return the number of letters in their right places: every cheat can compute it for this task."""
            word = tokenizer.decode([token for token in prompt if token < 256]).split()[-1]
            text = tokenizer.decode(list(completion))
            return float(sum(a == b for a, b in zip(word[::-1], text, strict=False)))

        means = Means(
            seen=list(policies.chain[:SEEN]),
            base=policies.base,
            small=self._small,
            small_logits=self._small_logits,
            vocab_size=tokenizer.vocab_size,
            score=score,
            mailbox=shared.mailbox,
            overheard=shared.overheard,
            rng=np.random.default_rng(seed),
        )
        held: dict[int, Any] = {}

        def logits(sequences: Sequence[tuple[int, ...]]) -> Any:
            weights = means.seen[-1]
            if id(weights) not in held:
                held[id(weights)] = logits_of(policies.folder, weights)
            return held[id(weights)](sequences)

        means.logits = logits
        return means

    async def _grow(self, num: int) -> None:
        while len(self._engines) < num:
            self._engines.append(TransformersEngine(self.policies.folder, threads=1))

    def _validator(self, world: World, run: PinnedRun, port: Watched) -> Validator:
        async def policy(version: int) -> Weights:
            return self._policy(version)

        return Validator(
            run=run,
            config=ValidatorConfig(),
            coordinator=cast("ValidatorPort", port),
            scorer=self._engines[0],
            scoring_workers=ScoringWorkers(lambda: {"spell": self.policies.environment}, workers_max=1),
            tokenizer=self.policies.tokenizer,
            policy=policy,
            policy_versions=lambda: (),
            clock=world.parts.clock,
        )

    async def _work(
        self,
        world: World,
        run: PinnedRun,
        part: Part,
        engine: TransformersEngine,
        folder: Path,
        stop: asyncio.Event,
        news: asyncio.Event,
    ) -> None:
        client, clock, rng, adversary = world.client(part.key), world.parts.clock, random.Random(1), part.adversary
        pinned = PinnedRun(run.digest, run.spec, run.envelope)
        sources = [("http", client)]
        pool = SourcePool(sources, clock=clock, rng=rng)
        port = cast("WorkerPort", Noting(client, part, news))
        trust = Trust(pinned, sources, folder / "trust", clock=clock, rng=rng)
        await trust.refresh()
        sampler = engine if adversary is None else adversary.engine_around(engine, means=part.means)
        part.worker = Worker(
            run=pinned,
            config=WorkerConfig.model_validate(
                {"rollouts_max": 8, "receipts_seconds": 3_600.0, "grace_seconds": 1.0, "name": folder.name}
            ),
            key=part.key,
            coordinator=port if adversary is None else adversary.port_around(port, part.key, part.means),
            engine_info=sampler.info,
            equip=equipped(sampler),
            follower=Follower(pinned, pool, folder / "checkpoints", clock=clock, poll_s=0.02, rng=rng),
            trust=trust,
            folder=folder,
            clock=clock,
            rng=rng,
        )
        await run_worker(part.worker, stop)

    async def _train(self, world: World, run: PinnedRun, batches: list[TrainBatch], news: asyncio.Event) -> None:
        source, client = MemorySource(run), world.client(TRAINER)
        config_digest = run.spec.model_config_digest
        batch: str | None = None
        base = None
        for version in range(run.spec.max_steps + 1):
            weights = self._policy(version)
            provenance = {"step": version - 1, "optimizer_steps": version, "batch": batch, "software": "test"}
            signed = source.publish(weights, base=base, produced_by=provenance, model_config_digest=config_digest)
            base = signed, weights
            for blob in signed.manifest.blobs:
                await client.put_blob(source.blobs[blob.digest])
            await client.publish(signed.envelope)
            if version == run.spec.max_steps:
                return
            request = BatchRequest(step=version, durable_step=version, wait_s=1.0)
            while not isinstance(answer := await client.batch(request), Envelope):
                pass
            batch = answer.digest
            batches.append(parse_json(answer.payload, TrainBatch))
            news.set()


async def _receipts(world: World, key: SigningKey) -> list[Receipt]:
    stored, _ = await world.parts.store.receipts_of(key.key_id, after=0, limit=10_000, chars_max=2**30)
    return [parse_json(open_envelope(one.envelope.encode()).payload, Receipt) for one in stored]
