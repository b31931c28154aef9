"""Cost of proving a rollout: seeded sampling, hidden-state proofs, and a validator's forward pass.

    python scripts/bench/check_cost.py [--quick] [--only sampling|demo|longer] [--vllm] [--json]

Sampling: a batch of 64 rows over 151,936 tokens, compared with the plain sampler (softmax, exponential noise, argmax) on the same
logits. Proofs: the transformers engine with and without them, in the demo's shape (short completions: one proof each) and in a
longer one; --vllm measures vLLM instead, in another shape. Validator: the forward pass and all its checks, compared with the
generation of the same tokens. The benchmark measures processor time of this process and, where vLLM samples, of vLLM's processes:
other load changes it far less than elapsed time. Validation counts this process alone, because vLLM's processes wait busily for a
while after they have sampled. Rounds of the two sides alternate, and so does their order. The figure is the median of the rounds'
ratios, with its standard error and the quartiles. One thread.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import Check, Output, at_most

from prime_node.adapters.engines import transformers_engine
from prime_node.adapters.engines.hidden_rows import HiddenRows
from prime_node.adapters.engines.token_scores import score_tokens
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights, tiny_model_files
from prime_node.ports.engine import Engine, GenerateRequest, ScoreRequest
from prime_protocol import verify
from prime_protocol.assignment import Sampling
from prime_protocol.proof import PROOF_BYTES
from prime_protocol.rollout import Completion, Rollouts

VOCAB, BATCH = 151_936, 64


@dataclass(frozen=True)
class Shape:
    name: str
    hidden_size: int
    num_layers: int
    completions: int
    tokens: int


DEMO = Shape("demo", 128, 2, 128, 7)
LONGER = Shape("longer", 256, 4, 64, 96)
IN_VLLM = Shape("vllm", 256, 4, 64, 40)
PIECES = ("sampling", "demo", "longer")


@dataclass(frozen=True)
class Timing:
    """Processor seconds of both sides in each round."""

    ours: list[float]
    base: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / base for ours, base in zip(self.ours, self.base, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def error(self) -> float:
        """Standard error of the median, as if ratios were normal."""
        return 1.2533 * statistics.stdev(self.ratios) / math.sqrt(len(self.ratios))

    def show(self, what: str) -> str:
        quarters = statistics.quantiles(self.ratios, n=4)
        milliseconds = [1e3 * statistics.median(side) for side in (self.ours, self.base)]
        return (
            f"{what:58} {milliseconds[0]:8.1f} ms {milliseconds[1]:8.1f} ms "
            f"{self.ratio:6.3f} +- {self.error:.3f} ({quarters[0]:.3f} to {quarters[2]:.3f}, {len(self.ratios)} rounds)"
        )


def here_s() -> float:
    """Processor time of this process."""
    return time.process_time()


def everywhere_s() -> float:
    """The same and that of the processes below it, which Linux counts in hundredths of a second."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        number = int(stat.parent.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    below = {os.getpid()}
    while found := {number for number, parent in parents.items() if parent in below} - below:
        below |= found
    return here_s() + sum(ticks[number] for number in below - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


async def alternating(
    ours: Callable[[], Awaitable[object]],
    base: Callable[[], Awaitable[object]],
    rounds: int,
    *,
    ours_s: Callable[[], float] = everywhere_s,
) -> Timing:
    taken: tuple[list[float], list[float]] = ([], [])
    sides = list(zip(taken, (ours, base), (ours_s, everywhere_s), strict=True))
    for round_ in range(rounds + 1):
        for side, work, clock_s in sides[:: 1 if round_ % 2 else -1]:
            began_s = clock_s()
            await work()
            if round_:  # the first one warms up
                side.append(clock_s() - began_s)
    return Timing(*taken)


class TimedRows(HiddenRows):
    """Counts the processor time of its thread in everything that proofs add to generating."""

    spent_s = 0.0

    def add(self, *args: Any) -> None:
        began_s = time.thread_time()
        super().add(*args)
        TimedRows.spent_s += time.thread_time() - began_s

    def take(self, *args: Any) -> Any:
        began_s = time.thread_time()
        found = super().take(*args)
        TimedRows.spent_s += time.thread_time() - began_s
        return found


async def counted_inside(generate: Callable[[], Awaitable[object]], rounds: int) -> Timing:
    """Return the time with proofs, and the same without the time of the proofs' code, so without noise of another round."""
    taken: tuple[list[float], list[float]] = ([], [])
    vars(transformers_engine)["HiddenRows"] = TimedRows
    try:
        for _ in range(rounds):
            began_s, before_s = here_s(), TimedRows.spent_s
            await generate()
            taken[0].append(here_s() - began_s)
            taken[1].append(taken[0][-1] - (TimedRows.spent_s - before_s))
    finally:
        vars(transformers_engine)["HiddenRows"] = HiddenRows
    return Timing(*taken)


async def sampling(rounds: int) -> dict[str, Timing]:
    ranks = torch.argsort(torch.rand(BATCH, VOCAB, generator=torch.Generator().manual_seed(0)), dim=1)
    logits = -1.8 * (ranks + 1.0).log()  # as steep as a language model's
    seeds, positions = list(range(BATCH)), [5] * BATCH

    async def plain() -> None:
        probabilities = logits.softmax(dim=1)
        probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(dim=1)

    async def plain_top_p() -> None:
        values, places = logits.sort(dim=1, descending=True)
        mass = values.softmax(dim=1)
        mass[mass.cumsum(dim=1) - mass >= 0.9] = 0
        best = mass.div_(torch.empty_like(mass).exponential_()).argmax(dim=1, keepdim=True)
        places.gather(1, best)

    def seeded(**filters: Any) -> Callable[[], Awaitable[None]]:
        asked = Sampling(completion_tokens_max=1, stop_token_ids=(), **filters)

        async def choose() -> None:
            score_tokens(logits, seeds, positions, asked).choice()

        return choose

    return {
        "seeded / plain sampling, 64 x 151,936": await alternating(seeded(), plain, rounds),
        "seeded / plain sampling with top-p 0.9": await alternating(seeded(top_p=0.9), plain_top_p, rounds),
    }


async def engines(shape: Shape, rounds: int, folder: Path, engine: Engine) -> dict[str, Timing]:
    """Proofs and the validator, by one engine."""
    weights = initial_weights(folder, 0)
    await engine.load(weights, policy_version=0)
    prompts = [tuple(range(60, 68 + group)) for group in range(-(-shape.completions // 8))]
    plain = [GenerateRequest(prompts[n // 8], seed=n) for n in range(shape.completions)]
    asked = [replace(request, proofs=True) for request in plain]
    how = Sampling(completion_tokens_max=shape.tokens, stop_token_ids=())
    name = f"{engine.info.name}, {shape.name} shape"
    proofs = await alternating(lambda: engine.generate(asked, how), lambda: engine.generate(plain, how), rounds)
    inside = {}
    if isinstance(engine, TransformersEngine):
        timing = await counted_inside(lambda: engine.generate(asked, how), rounds // 2)
        inside[f"generating with / less proofs' code, {name}"] = timing
    completions = await engine.generate(asked, how)
    scorer = TransformersEngine(folder)
    await scorer.load(weights, policy_version=0)
    rollouts = rollouts_of(asked, completions)

    def judging(*, hidden: bool) -> Callable[[], Awaitable[None]]:
        to_score = [
            ScoreRequest(r.prompt_token_ids, c.token_ids, r.seed, hidden=hidden)
            for r, c in zip(asked, completions, strict=True)
        ]

        async def judge() -> None:
            found = verify.summary(verify.statistics(rollouts, await scorer.prefill(to_score, how)))
            assert found.seed_flips_share < 0.01, "these are honest rollouts"

        return judge

    validator = await alternating(judging(hidden=True), lambda: engine.generate(asked, how), rounds, ours_s=here_s)
    comparing = await alternating(judging(hidden=True), judging(hidden=False), rounds)
    await scorer.close()
    return {
        f"generating with / without proofs, {name}": proofs,
        **inside,
        f"validating / generating, {name}": validator,
        f"validating with / without proofs, {name}": comparing,
    }


def rollouts_of(asked: list[GenerateRequest], completions: list[Completion]) -> Rollouts:
    """Return the rollouts that the checks on numbers read."""
    lengths = [len(completion.token_ids) for completion in completions]
    proofs = np.frombuffer(b"".join(completion.proofs for completion in completions), np.uint8)
    return Rollouts(
        token_ids_T=np.array([token for c in completions for token in c.token_ids], np.int32),
        logprobs_T=np.array([nats for c in completions for nats in c.logprobs], np.float32),
        lengths_N=np.array(lengths, np.int32),
        finish_N=np.array([completion.finish for completion in completions], np.uint8),
        slots_N=np.arange(len(completions)) // 8,
        seeds_N=np.array([request.seed for request in asked]),
        spans_S3=np.array([(index, 0, length) for index, length in enumerate(lengths)], np.int32),
        proofs_CB=proofs.reshape(-1, PROOF_BYTES),
    )


def model_folder(shape: Shape, parent: Path) -> Path:
    folder = parent / shape.name
    folder.mkdir()
    files = tiny_model_files(
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=4,
        intermediate_size=3 * shape.hidden_size,
    )
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


async def measured(arguments: argparse.Namespace) -> dict[str, Timing]:
    rounds = 4 if arguments.quick else 16
    with tempfile.TemporaryDirectory() as place:
        if arguments.vllm:
            from prime_node.adapters.engines.vllm_engine import VllmEngine

            folder = model_folder(IN_VLLM, Path(place))
            vllm = VllmEngine(folder, context_tokens_max=256)
            found = await engines(IN_VLLM, rounds, folder, vllm)
            await vllm.close()
            return found
        wanted = (arguments.only,) if arguments.only else PIECES
        found = await sampling(2 if arguments.quick else rounds // 2) if "sampling" in wanted else {}
        for shape in (DEMO, replace(LONGER, completions=32, tokens=40) if arguments.quick else LONGER):
            if shape.name not in wanted:
                continue
            folder = model_folder(shape, Path(place))
            engine = TransformersEngine(folder)
            found |= await engines(shape, 2 * rounds if shape is DEMO else rounds, folder, engine)
            await engine.close()
    return found


def checks(found: dict[str, Timing], *, quick: bool) -> list[Check]:
    """Check that a validator costs less than generating, and proofs a few hundredths.

    A quick run leaves proofs out, because a few rounds spread by more than that bar. The bar of the sampler needs a GPU.
    """
    bars = {"validating /": 1.0} if quick else {"validating /": 1.0, "generating": 1.05}
    return [
        at_most(name, timing.ratio, bar)
        for name, timing in found.items()
        for begin, bar in bars.items()
        if name.startswith(begin)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and shorter completions")
    parser.add_argument("--only", choices=PIECES, help="one piece of the whole")
    parser.add_argument("--vllm", action="store_true", help="vLLM; it needs half a minute to start")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    arguments = parser.parse_args()
    output = Output(as_json=arguments.json)
    torch.set_num_threads(1)
    found = asyncio.run(measured(arguments))
    print(f"{'processor time':58} {'ours':>11} {'base':>11} {'ratio':>6} (quartiles)")
    for name, timing in found.items():
        print(timing.show(name))
    return output.finish(checks(found, quick=arguments.quick))


if __name__ == "__main__":
    raise SystemExit(main())
