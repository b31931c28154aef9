"""Leases side by side: a worker's engine against one plain `LLM.generate`, and 256 slots of a worker in simulation.

    .venv/bin/python scripts/bench/side_by_side.py [--model FOLDER] [--quick] [--json]

The engine: SmolLM2-135M in bf16 on one thread, 32 slots, groups of 8 completions with long-tailed lengths. vLLM's own `LLM`
generates in one call; a worker's engine generates lease by lease and signs a bundle for each lease as it is finished: with
assigned seeds and proofs, and without both. After each pass of a worker's engine, plain vLLM generates as many tokens for each
prompt as that pass did. All engines are warm. The bars compare tokens per second of wall clock in the best pass of each, so run
it on a quiet machine. Processor seconds are printed and have no bar: a waiting `LLM` may poll.

The simulation (prime_lab): workers with 256 slots, a coordinator's own scheduler, log-normal lengths. Utilisation is slot seconds
used over slot seconds between the second policy and the fourth last. Lag is compared with that of workers of the same speed in
all, each of which generates one group at a time. --quick simulates fewer steps and samples fewer completions.

Letters: C completions.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

import numpy as np
import psutil  # type: ignore[import-untyped]
from checks import Check, Output, at_least, at_most

from prime_lab.scenario import Costs, Scenario
from prime_lab.world import SimulatedRun
from prime_node.worker.generating import bundle_for, generate
from prime_node.worker.loaded_policy import LoadedPolicy
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.digest import digest_of
from prime_protocol.identity import SigningKey
from prime_protocol.noise import SEED_MAX
from prime_protocol.schedule import Schedule, SwapPolicy

SLOTS, GROUP, CONTEXT = 32, 8, 256
TOKENS_MAX = 160
STOPS = (30, 198)
"""Tokens that end a completion, "." and a line break: lengths are then long-tailed."""


@dataclass(frozen=True)
class Size:
    leases: int
    passes: int
    steps: int


FULL, QUICK = Size(leases=24, passes=4, steps=24), Size(leases=8, passes=1, steps=10)


# The engine


@dataclass
class Pass:
    """Tokens and processor seconds of one pass."""

    tokens: int
    cpu_s: float
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def children() -> set[psutil.Process]:
    """Return the processes that this one started, with theirs."""
    return set(psutil.Process().children(recursive=True))


def processor_seconds(engine: set[psutil.Process]) -> float:
    """Return the processor time of this process and an engine's."""
    total = 0.0
    for process in (psutil.Process(), *engine):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def timed(work: Callable[[], Awaitable[int]], engine: set[psutil.Process]) -> Pass:
    cpu_s, wall_s = processor_seconds(engine), time.perf_counter()
    tokens = await work()
    return Pass(tokens, processor_seconds(engine) - cpu_s, time.perf_counter() - wall_s)


def leases_of(num: int, sampling: Sampling) -> list[Lease]:
    rng = np.random.default_rng(1)
    found = []
    for slot in range(num):
        prompt = tuple(rng.integers(1_000, 20_000, rng.integers(8, 40)).tolist())
        seeds = tuple(rng.integers(0, SEED_MAX, GROUP, endpoint=True).tolist())
        problem = Problem(environment="text", index=slot)
        group = GroupAssignment(slot=slot, problem=problem, prompt_token_ids=prompt, seeds=seeds)
        found.append(_lease(slot, (group,), sampling))
    return found


def _lease(slot: int, groups: tuple[GroupAssignment, ...], sampling: Sampling) -> Lease:
    return Lease.model_construct(
        run="0" * 64,
        lease_id=f"{slot:064d}",
        worker=KEY.key_id,
        step=0,
        policy_version=0,
        policy_digest="0" * 64,
        groups=groups,
        sampling=sampling,
        issued_at_ms=0,
        expires_at_ms=0,
    )


KEY = SigningKey(b"\1" * 32)


async def side_by_side(engine: Any, leases: Sequence[Lease], *, proofs: bool, lengths: list[int]) -> int:
    """Generate leases as worker/loop.py does, a task for each. Return the number of tokens, and fill in each completion's."""
    loaded, tokens = LoadedPolicy(0), 0

    async def never(version: int) -> Any:
        await asyncio.Event().wait()

    async def fulfil(lease: Lease, begun: asyncio.Event) -> None:
        nonlocal tokens
        made = await generate(
            engine, lease, SwapPolicy.DRAIN, loaded=loaded, proofs=proofs, wait_newer=never, begun=begun.set
        )
        assert made.rollouts is not None
        tokens += made.rollouts.num_tokens
        each = [len(completion.token_ids) for completion in made.rollouts.completions()]
        lengths[GROUP * lease.groups[0].slot : GROUP * (lease.groups[0].slot + 1)] = each
        digest = digest_of(lease.model_dump_json().encode())
        await asyncio.to_thread(
            bundle_for, lease, made.rollouts, key=KEY, engine=engine.info, created_at_ms=0, lease_digest=digest
        )

    async with asyncio.TaskGroup() as tasks:
        for lease in leases:
            begun = asyncio.Event()
            tasks.create_task(fulfil(lease, begun))
            await begun.wait()
            await engine.wait_for_room()
    return tokens


async def engine_checks(model: Path, size: Size) -> list[Check]:
    from vllm import LLM, SamplingParams

    from prime_node.adapters.engines.vllm_engine import VllmEngine
    from prime_node.cli import wire

    weights = wire.plain_weights(model, random_seed=None)
    known = children()
    plain = LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=SLOTS,
        enforce_eager=True,
        async_scheduling=False,
        skip_tokenizer_init=True,
    )
    plain_processes = children() - known
    leases = leases_of(size.leases, Sampling(completion_tokens_max=TOKENS_MAX, stop_token_ids=STOPS))
    prompts = [{"prompt_token_ids": list(lease.groups[0].prompt_token_ids)} for lease in leases for _ in range(GROUP)]
    lengths = [TOKENS_MAX] * len(prompts)

    async def at_once() -> int:
        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
            for length in lengths
        ]
        made = await asyncio.to_thread(plain.generate, prompts, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in made)

    await at_once()  # warm-up
    found = []
    for name, seeded, bar in (("unseeded", False, 0.95), ("seeded with proofs", True, 0.92)):
        known = children()
        engine = VllmEngine(model, dtype="bf16", context_tokens_max=CONTEXT, sequences_max=SLOTS, seeded=seeded)
        await engine.load(weights, policy_version=0)
        processes = children() - known

        async def by_lease(engine: VllmEngine = engine, proofs: bool = seeded) -> int:
            return await side_by_side(engine, leases, proofs=proofs, lengths=lengths)

        await by_lease()  # warm-up
        print(f"{name}: lengths mean {mean(lengths):.0f}, max {max(lengths)}", flush=True)
        pairs = []
        for _ in range(size.passes):
            pairs.append((await timed(by_lease, processes), await timed(at_once, plain_processes)))
            print(f"{name}: {pairs[-1][0]}, plain: {pairs[-1][1]}", flush=True)
        await engine.close()
        ours, plains = zip(*pairs, strict=True)
        ratio = max(one.tokens_per_s for one in ours) / max(one.tokens_per_s for one in plains)
        found.append(at_least(f"{name}, side by side / plain LLM.generate, tokens per second", ratio, bar))
    return found


# The simulation


WORKERS, WORKER_SLOTS, GROUPS = 2, 256, 512
SECONDS_MEAN, SPREAD = 30.0, 1.0
"""Mean seconds of a completion in a slot, and the sigma of their log-normal distribution."""


def seconds_of(slot: int, number: int) -> float:
    rng = np.random.default_rng((slot, number))
    return float(min(rng.lognormal(np.log(SECONDS_MEAN) - SPREAD**2 / 2, SPREAD), 8 * SECONDS_MEAN))


def simulated(size: Size, *, workers: int = WORKERS, slots: int, swap: SwapPolicy) -> SimulatedRun:
    busy_s = GROUPS * GROUP * SECONDS_MEAN / (WORKERS * WORKER_SLOTS)
    made = SimulatedRun(
        Scenario(
            Schedule(swap=swap),
            async_level=2,
            groups_per_step=GROUPS,
            num_steps=size.steps,
            num_workers=workers,
            group_seconds=lambda slot: max(seconds_of(slot, number) for number in range(GROUP)),
            completion_seconds=seconds_of,
            train_seconds=lambda step, chosen: 0.5 * busy_s,
            costs=Costs(swap=0.5),
            groups_per_lease=16 if slots else 1,
            slots=slots,
        )
    )
    made.run()
    return made


def used_share(run: SimulatedRun, begin_s: float, end_s: float) -> float:
    """Return the share of all slots' time between two moments in which a completion was generated."""
    used_s = sum(engine.used_s(begin_s, end_s) for engine in run.engines)
    return used_s / (WORKERS * WORKER_SLOTS * (end_s - begin_s))


def lag_of(run: SimulatedRun) -> float:
    lags = [lag for step in run.steps for lag, count in step.lags.items() for _ in range(count)]
    return mean(lags)


def simulation_checks(size: Size) -> list[Check]:
    found = []
    longest_s = mean(max(seconds_of(slot, number) for number in range(GROUP)) for slot in range(GROUPS))
    alike = round(WORKERS * WORKER_SLOTS / GROUP * longest_s / SECONDS_MEAN)
    in_turn = simulated(size, workers=alike, slots=0, swap=SwapPolicy.KEEP_KV)
    for swap, bar in ((SwapPolicy.KEEP_KV, 0.97), (SwapPolicy.DRAIN, None)):
        run = simulated(size, slots=WORKER_SLOTS, swap=swap)
        begin_s, end_s = run.published_s[1], run.published_s[-4]
        used = used_share(run, begin_s, end_s)
        print(f"{swap.value}: {used:.4f} of the slots are used; lag {lag_of(run):.3f}, in turn {lag_of(in_turn):.3f}")
        if bar is not None:
            found.append(at_least(f"simulation, {WORKER_SLOTS} slots, {swap.value}: share of a full engine", used, bar))
            found.append(at_most("simulation: mean lag side by side - in turn", lag_of(run) - lag_of(in_turn), 0.05))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("~/.cache/prime-node/models/smollm2").expanduser())
    parser.add_argument("--quick", action="store_true", help="fewer completions and steps")
    parser.add_argument("--json", action="store_true", help="print only the checks, as JSON")
    parser.add_argument("--simulation-only", action="store_true", help="leave the engine out")
    args = parser.parse_args()
    output, size = Output(as_json=args.json), QUICK if args.quick else FULL
    checks = simulation_checks(size)
    if not args.simulation_only:
        checks += asyncio.run(engine_checks(args.model, size))
    return output.finish(checks)


if __name__ == "__main__":
    sys.exit(main())
