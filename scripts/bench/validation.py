"""Processor time of a validator over that of the worker whose bundles it judges, in the run of configs/smollm2.toml.

    .venv/bin/python scripts/bench/validation.py [--json]                    each judge, each length
    .venv/bin/python scripts/bench/validation.py --judge vllm/bf16 [--quick]  one judge; fewer leases, one round

The worker is the file's: vLLM in bf16, leases of 32 completions of the run's problems, seeded, with proofs, signed. It generates
as many leases side by side as the run allows a worker. A validator takes the bundles as its loop does: it opens them, forwards
those that it audits, at most `prefetch` + 1 together, and computes the rewards of all in the environments' process. At full
audits it forwards every bundle, at the floor the run's `share_min` of them. Each side counts this process and its own others.
Loading a policy is left out on both sides. Completions end after at most 12 tokens, as in the file, or after 48. One thread a
side.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
from checks import Check, Output, at_most
from real_model import built_model
from side_by_side import children  # sets variables that vLLM reads

from prime_node.cli import wire, wire_scorers
from prime_node.cli.new import make_run
from prime_node.cli.options import Options
from prime_node.cli.run_dir import RunDir
from prime_node.cli.shipped import config_path
from prime_node.cli.wire_environments import end_environments
from prime_node.envs.settings import EnvironmentSettings
from prime_node.envs.source import prompt_of
from prime_node.ports.engine import BatchingEngine, Engine, SamplingScorer
from prime_node.ports.environment import Environment
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.judge import Judgement, OpenedBundle, open_bundle, prove_bundles, reward_bundle
from prime_node.validator.validator import BundleAudit, batches
from prime_node.worker.config import WorkerConfig
from prime_node.worker.generating import bundle_for, generate
from prime_node.worker.loaded_policy import LoadedPolicy
from prime_protocol.assignment import GroupAssignment, Lease, Problem
from prime_protocol.digest import digest_of
from prime_protocol.identity import SigningKey
from prime_protocol.noise import SEED_MAX
from prime_protocol.replies import CheckTask
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import Verdict
from prime_protocol.weights import Weights

CONFIG = "smollm2.toml"
JUDGES = ("transformers/fp32", "vllm/bf16")
"""The file's judge, and one of the workers' build."""
LENGTHS = (12, 48)
"""Tokens after which a completion ends: the file's, and more."""
KEY = SigningKey(b"\1" * 32)
FULL_MAX, FLOOR_MAX = 0.6, 0.2
"""Bars, as shares of the processor time of generation."""


@dataclass(frozen=True)
class Size:
    leases: int
    rounds: int


FULL, QUICK = Size(leases=12, rounds=3), Size(leases=8, rounds=1)


@dataclass(frozen=True)
class Judge:
    """A validator's engine, and the other processes that work for the validator."""

    name: str
    scorer: SamplingScorer
    processes: frozenset[psutil.Process]


@dataclass(frozen=True)
class Parts:
    """A run, its worker and its validators."""

    run: PinnedRun
    model: Path
    options: Options
    environments: dict[str, Environment]
    engine: Engine
    of_worker: frozenset[psutil.Process]
    judges: Sequence[Judge]


async def spent_s(work: Callable[[], Awaitable[object]], processes: frozenset[psutil.Process]) -> float:
    """Return the processor seconds of this process and of these, with the children that they have waited for."""
    before = _processor_s(processes)
    await work()
    return _processor_s(processes) - before


def _processor_s(processes: frozenset[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:4]) for process in (psutil.Process(), *processes))


def leases_of(parts: Parts, num: int) -> list[Lease]:
    """Return leases of as many completions as the file's workers ask for."""
    spec, rng = parts.run.spec, np.random.default_rng(1)
    tokenizer, environment = wire.tokenizer(parts.model), spec.environments[0].name
    size, number = spec.rollouts_per_group, parts.options.load(WorkerConfig).rollouts_max // spec.rollouts_per_group
    found = []
    for first in range(0, num * number, number):
        groups = tuple(
            GroupAssignment(
                slot=slot,
                problem=Problem(environment=environment, index=slot),
                prompt_token_ids=prompt_of(parts.environments[environment], slot, tokenizer),
                seeds=tuple(rng.integers(0, SEED_MAX, size, endpoint=True).tolist()),
            )
            for slot in range(first, first + number)
        )
        found.append(
            Lease(
                run=parts.run.digest,
                lease_id=f"{first:064d}",
                worker=KEY.key_id,
                step=0,
                policy_version=0,
                policy_digest="0" * 64,
                groups=groups,
                sampling=spec.sampling,
                issued_at_ms=0,
                expires_at_ms=1,
            )
        )
    return found


async def generated(parts: Parts, leases: Sequence[Lease]) -> list[bytes]:
    """Generate the leases side by side, as worker/loop.py does, and return their bundles."""
    engine, loaded, spec = parts.engine, LoadedPolicy(0), parts.run.spec
    assert isinstance(engine, BatchingEngine)

    async def never(version: int) -> tuple[int, Weights]:
        await asyncio.Event().wait()
        raise AssertionError

    async def fulfil(lease: Lease, begun: asyncio.Event) -> bytes:
        made = await generate(
            engine,
            lease,
            spec.schedule.swap,
            loaded=loaded,
            proofs=spec.checks.proofs,
            wait_newer=never,
            begun=begun.set,
        )
        assert made.rollouts is not None
        digest = digest_of(lease.model_dump_json().encode())
        return await asyncio.to_thread(
            bundle_for, lease, made.rollouts, key=KEY, engine=engine.info, created_at_ms=0, lease_digest=digest
        )

    tasks: list[asyncio.Task[bytes]] = []
    async with asyncio.TaskGroup() as group:
        for lease in leases:
            while sum(not task.done() for task in tasks) >= spec.limits.leases_per_worker_max:
                await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
            begun = asyncio.Event()
            tasks.append(group.create_task(fulfil(lease, begun)))
            await begun.wait()
            await engine.wait_for_room()
    return [task.result() for task in tasks]


async def validated(
    parts: Parts, judge: Judge, leases: Sequence[Lease], bundles: Sequence[bytes], *, every: int
) -> None:
    """Judge the bundles as validator/loop.py does. Of `every` bundles one is audited. All must be accepted."""
    config, tokenizer = parts.options.load(ValidatorConfig), wire.tokenizer(parts.model)
    together = config.prefetch + 1

    async def reward(opened: OpenedBundle, proven: Judgement) -> None:
        found = await reward_bundle(
            opened, run=parts.run, environments=parts.environments, tokenizer=tokenizer, proven=proven
        )
        assert found.verdict.accepted, found.verdict

    for first in range(0, len(leases), together):
        audits = []
        for number in range(first, min(first + together, len(leases))):
            lease = leases[number]
            opened = open_bundle(bundles[number], lease, parts.run)
            assert isinstance(opened, OpenedBundle), opened
            if number % every == 0:
                task = CheckTask(bundle=digest_of(bundles[number]), lease=lease, deadline_ms=0)
                audits.append(BundleAudit(task, opened))
            else:
                await reward(opened, Judgement(Verdict.accept()))
        for batch in batches(audits, tokens_max=config.batch_tokens):
            proven = await prove_bundles([one.bundle for one in batch], judge.scorer, run=parts.run)
            for audit, judgement in zip(batch, proven, strict=True):
                assert judgement.verdict.accepted, judgement
                await reward(audit.bundle, judgement)


async def rounds_of(parts: Parts, size: Size, name: str) -> list[Check]:
    """Generate and judge the same leases in each round, and return the medians of the ratios."""
    audits = parts.run.spec.checks.audits
    assert audits is not None
    sides = {"all audited": (1, FULL_MAX), "at the floor": (round(1 / audits.share_min), FLOOR_MAX)}
    leases, bundles = leases_of(parts, size.leases), list[bytes]()
    ratios: dict[tuple[str, str], list[float]] = {}

    async def generate_all() -> None:
        bundles[:] = await generated(parts, leases)

    some = await generated(parts, leases[:2])
    for judge in parts.judges:
        await validated(parts, judge, leases[:2], some, every=1)  # warm-up
    for _ in range(size.rounds):
        base_s = await spent_s(generate_all, parts.of_worker)
        print(f"{name}: generating {num_tokens(parts, leases, bundles):,} tokens takes {base_s:.1f} s", flush=True)
        for judge in parts.judges:
            for side, (every, _) in sides.items():
                work = partial(validated, parts, judge, leases, bundles, every=every)
                found_s = await spent_s(work, judge.processes)
                ratios.setdefault((judge.name, side), []).append(found_s / base_s)
                print(f"{name}: {judge.name}, {side}, takes {found_s:.1f} s", flush=True)
    return [
        at_most(f"validating / generating, {name}, {judge}, {side}", statistics.median(found), sides[side][1])
        for (judge, side), found in ratios.items()
    ]


def num_tokens(parts: Parts, leases: Sequence[Lease], bundles: Sequence[bytes]) -> int:
    """Return the number of tokens in the bundles."""
    opened = [open_bundle(bundle, lease, parts.run) for lease, bundle in zip(leases, bundles, strict=True)]
    return sum(one.rollouts.num_tokens for one in opened if isinstance(one, OpenedBundle))


async def measured(judges: Sequence[str], size: Size, scratch: Path) -> list[Check]:
    """Start a worker and the validators, for the longest completions; measure each length in a run of its own."""
    options = {length: Options(config_path(CONFIG), [f"run.completion_tokens_max={length}"]) for length in LENGTHS}
    folders = {length: RunDir(scratch / str(length)) for length in LENGTHS}
    runs = {length: make_run(folders[length], one, config_file=config_path(CONFIG)) for length, one in options.items()}
    longest = max(LENGTHS)
    model, run = folders[longest].model, runs[longest]
    weights = wire.plain_weights(built_model(), random_seed=None)
    settings = options[longest].load(ValidatorConfig)

    before = children()
    environments = wire.environments(run.spec, model, options[longest].load(EnvironmentSettings), folder=scratch)
    of_environments, before = children() - before, children()
    engine = wire.engine(options[longest].load(WorkerConfig), model, run, cheat=None)
    await engine.load(weights, policy_version=0)
    of_worker = frozenset(children() - before)
    made = []
    for name in judges:
        kind, _, dtype = name.partition("/")
        before = children()
        scorer = wire_scorers.scorer(settings.model_copy(update={"engine": kind, "dtype": dtype}), model, run)
        await scorer.load(weights, policy_version=0)
        made.append(Judge(name, scorer, frozenset((children() - before) | of_environments)))
    found = []
    for length in LENGTHS:
        parts = Parts(runs[length], model, options[length], environments, engine, of_worker, made)
        found += await rounds_of(parts, size, f"{length} tokens")
    for one in (engine, *(judge.scorer for judge in made)):
        await one.close()
    end_environments(environments)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", choices=JUDGES, help="one judge; default: each")
    parser.add_argument("--quick", action="store_true", help="fewer leases, and one round")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    output, size = Output(as_json=options.json), QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as scratch:
        judges = (options.judge,) if options.judge else JUDGES
        return output.finish(asyncio.run(measured(judges, size, Path(scratch))))


if __name__ == "__main__":
    raise SystemExit(main())
