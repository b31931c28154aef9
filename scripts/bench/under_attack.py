"""Learning while three workers in ten cheat: with the checks, without them, and without cheats. Three seeds per condition.

    python scripts/bench/under_attack.py --out DIR [--minutes M]   resumes where it stopped; no run begins after M minutes
    python scripts/bench/under_attack.py --out DIR --report        the table of the finished runs; --plot FILE draws the curves
    python scripts/bench/under_attack.py --quick [--json]          a few steps of each, under a minute

The demo's task, model, loss and learning rate in one process, by learning.py's parts. Each step's groups are leased to ten
workers; every bundle is signed, opened and judged by the functions that validators use, and rejected work is leased to an
honest worker. Three of the ten poison: half of a group stops one token early, the other half is empty, with the right
policy's logprobs for all of it, so that only the seeds show it. They return with a new key whenever they are banned, so they
poison during the whole run. Without checks is `[validator] unsafe_skip_proofs`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from checks import Check, Output, at_least, at_most
from learning import COMPLETION_TOKENS, GROUPS, ROLLOUTS, TASKS, Bench, Row, missing_of, run_each
from learning_plot import bands

from prime_lab.adversaries.engine import Means
from prime_lab.adversaries.table import ADVERSARIES
from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.coordinator.new_run import ROLES, RunConfig, build_run_spec
from prime_node.ports.engine import Engine
from prime_node.ports.train_samples import Group
from prime_node.validator.judge import Judgement, OpenedBundle, open_bundle, prove_bundle, reward_bundle
from prime_node.worker.generating import bundle_for, requests_for
from prime_protocol.assignment import GroupAssignment, Lease, Problem
from prime_protocol.digest import digest_of
from prime_protocol.identity import SigningKey
from prime_protocol.rollout import rollouts_for
from prime_protocol.weights import Weights

TASK, LOSS, ASYNC_LEVEL, LR = "spell_backward", "aipo", 2, 4e-4
SEEDS = (1, 2, 3)
WORKERS, CHEATS = 10, 3
CHEAT = "poison"
QUICK_STEPS = 4
"""Too few to learn anything, or to be taught anything wrong."""

T = TypeVar("T")


def parts_of(items: Sequence[T], size: int) -> list[tuple[T, ...]]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


class Condition(StrEnum):
    HONEST = "nobody cheats"
    CHECKED = "30 % cheat, checks on"
    UNCHECKED = "30 % cheat, unsafe_skip_proofs"


@dataclass(frozen=True)
class Attacked:
    """One run."""

    condition: Condition
    row: Row

    @property
    def name(self) -> str:
        return f"{self.condition.name.lower()}-seed{self.row.seed}-{self.row.steps}"


class AttackedBench(Bench):
    """learning.py's bench, with workers that sign and a validator between them and the trainer."""

    def __init__(self, folder: Path, out: Path, seed: int, *, evaluation: int) -> None:
        super().__init__(folder, out, TASK, seed, evaluation=evaluation)
        self._condition = Condition.HONEST
        self._keys = {role: SigningKey(bytes([number + 1]) * 32) for number, role in enumerate(ROLES)}
        config = RunConfig.model_validate(
            {
                "groups_per_step": GROUPS,
                "rollouts_per_group": ROLLOUTS,
                "completion_tokens_max": COMPLETION_TOKENS,
                "async_level": ASYNC_LEVEL,
                "environments": [{"name": TASK, "id": "reasoning_gym", "seed": seed, "options": TASKS[TASK]}],
            }
        )
        self._run = build_run_spec(
            config,
            keys=self._keys,
            model_files=tiny_model_files(),
            vocab_size=self._tokenizer.vocab_size,
            stop_token_ids=self._sampling.stop_token_ids,
            now_ms=0,
        )
        self._cheat = ADVERSARIES[CHEAT].engine_around(self._engine, means=Means())
        self._numbers = count()
        self.refused = {"cheats": 0, "honest": 0}
        self.poisoned = 0
        """Groups of cheats that were trained on."""

    async def run_attacked(self, attacked: Attacked) -> dict[str, Any]:
        self._condition = attacked.condition
        self.refused, self.poisoned = {"cheats": 0, "honest": 0}, 0
        found = await self.run(attacked.row)
        return {**found, "condition": attacked.condition, "refused": self.refused, "poisoned_groups": self.poisoned}

    async def _evaluate(self, weights: Weights, step: int) -> dict[str, float]:
        marks = await self._evaluator.evaluate(weights, step)
        return {"step": step, "greedy": round(marks["eval_greedy"], 4), "sampled": round(marks["eval_sampled"], 4)}

    async def _rollouts(self, step: int, policy: int, weights: Weights) -> list[Group]:
        """One step's groups, in the order of their slots, by ten workers."""
        await self._cheat.load(weights, policy_version=policy)  # the same engine as the honest ones': it is loaded once
        slots = range(step * GROUPS, (step + 1) * GROUPS)
        groups: list[Group] = []
        for worker, part in enumerate(parts_of(slots, -(-GROUPS // WORKERS))):
            cheats = self._condition is not Condition.HONEST and (worker + step) % WORKERS < CHEATS
            found = await self._work(part, step, policy, self._cheat if cheats else self._engine)
            if found is None:
                self.refused["cheats" if cheats else "honest"] += len(part)
                found = await self._work(part, step, policy, self._engine)
                assert found is not None, "an honest worker was refused"
            elif cheats:
                self.poisoned += len(part)
            groups += found
        return groups

    async def _work(self, slots: Sequence[int], step: int, policy: int, engine: Engine) -> list[Group] | None:
        """One lease, from its assignment to its verdict; None where it is refused."""
        key = self._keys["root"] if engine is self._cheat else self._keys["coordinator"]
        lease = self._lease(slots, step, policy, key)
        asked = [replace(one, proofs=self._run.spec.checks.proofs) for one in requests_for(lease)]
        completions = await engine.generate(asked, lease.sampling)
        digest = digest_of(lease.model_dump_json().encode())
        parcel = bundle_for(
            lease, rollouts_for(lease, completions), key=key, engine=engine.info, created_at_ms=0, lease_digest=digest
        )
        opened = open_bundle(parcel, lease, self._run)
        judgement = await self._judge(opened) if isinstance(opened, OpenedBundle) else opened
        if not judgement.verdict.accepted:
            return None
        rewards = parts_of(judgement.rewards, ROLLOUTS)
        return [
            Group(group.slot, group.prompt_token_ids, mine, won, (policy,) * ROLLOUTS, key.key_id)
            for group, mine, won in zip(lease.groups, parts_of(completions, ROLLOUTS), rewards, strict=True)
        ]

    async def _judge(self, opened: OpenedBundle) -> Judgement:
        worlds = {TASK: self._environment}
        if self._condition is not Condition.CHECKED:
            return await reward_bundle(opened, run=self._run, environments=worlds, tokenizer=self._tokenizer)
        proven = await prove_bundle(opened, self._engine, run=self._run)
        if not proven.verdict.accepted:
            return proven
        return await reward_bundle(opened, run=self._run, environments=worlds, tokenizer=self._tokenizer, proven=proven)

    def _lease(self, slots: Sequence[int], step: int, policy: int, key: SigningKey) -> Lease:
        groups = tuple(
            GroupAssignment(
                slot=slot,
                problem=Problem(environment=TASK, index=slot),
                prompt_token_ids=tuple(self._tokenizer.encode_prompt(self._environment.prompt(slot))),
                seeds=tuple((self._seed << 40) + slot * ROLLOUTS + number for number in range(ROLLOUTS)),
            )
            for slot in slots
        )
        return Lease(
            run=self._run.digest,
            lease_id=digest_of(b"lease %d" % next(self._numbers)),
            worker=key.key_id,
            step=step,
            policy_version=policy,
            policy_digest=digest_of(b"policy %d" % policy),
            groups=groups,
            sampling=self._run.spec.sampling,
            issued_at_ms=0,
            expires_at_ms=10**12,
        )


async def fill(options: argparse.Namespace, out: Path, *, evaluation: int) -> None:
    """Every run that DIR does not have yet; none is begun after `--minutes`."""
    end_s = time.monotonic() + 60.0 * (math.inf if options.minutes is None else options.minutes)
    for seed in options.seeds:
        row = Row(TASK, LOSS, ASYNC_LEVEL, seed, options.steps, LR)
        missing = missing_of((Attacked(each, row) for each in Condition), out)
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench = AttackedBench(Path(folder), out, seed, evaluation=evaluation)
            await bench.teach(options.teach_steps)
            await run_each(missing, bench.run_attacked, out, end_s=end_s)
            await bench.close()


def final(runs: Sequence[dict[str, Any]], condition: Condition) -> list[float]:
    """Sampled held-out accuracy after the last step, by seed."""
    mine = sorted((run for run in runs if run["condition"] == condition), key=lambda run: run["seed"])
    return [0.0 if run["diverged"] else float(run["evaluations"][-1]["sampled"]) for run in mine]


def report(runs: Sequence[dict[str, Any]]) -> None:
    print(
        "| | sampled held-out accuracy, by seed | greedy | groups refused: cheats, honest | groups of cheats trained on |"
    )
    print("|---|---|---|---|---|")
    for condition in Condition:
        mine = sorted((run for run in runs if run["condition"] == condition), key=lambda run: run["seed"])
        if mine:
            sampled = ", ".join(f"{value:.2f}" for value in final(runs, condition))
            greedy = ", ".join(f"{run['evaluations'][-1]['greedy']:.2f}" for run in mine)
            refused = [sum(run["refused"][who] for run in mine) for who in ("cheats", "honest")]
            poisoned = sum(run["poisoned_groups"] for run in mine)
            print(f"| {condition} | {sampled} | {greedy} | {refused[0]}, {refused[1]} | {poisoned} |")


def checks(runs: Sequence[dict[str, Any]]) -> list[Check]:
    honest, checked, unchecked = (final(runs, condition) for condition in Condition)
    found = []
    if honest and len(honest) == len(checked):
        worst = max(abs(a - b) for a, b in zip(honest, checked, strict=True))
        found.append(at_most("largest difference of accuracy, checks on, from the honest run of the seed", worst, 0.05))
        poisoned = sum(run["poisoned_groups"] for run in runs if run["condition"] == Condition.CHECKED)
        found.append(at_most("groups of cheats that were trained on, checks on", poisoned, 0))
        hurt = sum(run["refused"]["honest"] for run in runs)
        found.append(at_most("groups of honest workers that were refused", hurt, 0))
    if honest and len(honest) == len(unchecked) and runs[0]["steps"] > QUICK_STEPS:
        loss = statistics.fmean(a - b for a, b in zip(honest, unchecked, strict=True))
        found.append(at_least("accuracy that the attack costs without checks, mean", loss, 0.1))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the runs; one that is there is not repeated")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--minutes", type=float, help="begin no run after this long")
    parser.add_argument("--teach-steps", type=int, default=1_000, help="supervised steps at most")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    if options.out is None and not options.quick:
        parser.error("give --out DIR, or --quick")
    output = Output(as_json=options.json)
    with tempfile.TemporaryDirectory() as scratch:
        out, evaluation = options.out or Path(scratch), 512
        if options.quick:
            options.seeds, options.steps, options.teach_steps, evaluation = (1,), QUICK_STEPS, 20, 128
        out.mkdir(parents=True, exist_ok=True)
        if not options.report:
            asyncio.run(fill(options, out, evaluation=evaluation))
        runs = [json.loads(path.read_text()) for path in sorted(out.glob("*-seed*.json"))]
    if not runs:
        sys.exit(f"no runs in {out}")
    if options.plot:
        bands(runs, options.plot, by="condition", names=[str(condition) for condition in Condition])
    report(runs)
    print()
    return output.finish(checks(runs))


if __name__ == "__main__":
    raise SystemExit(main())
