"""Honest work and cheats of a real model: sampled by vLLM, judged by a forward pass, and kept on disk lease by lease.

Samples are kept by engine, and what a judge measured by engine and judge, so that another judge needs no new samples. A run
that was interrupted continues at the next lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from toploc_rule import refused_by_toploc

from prime_node.cli import wire, wire_scorers
from prime_node.ports.engine import Engine, Scorer, ScoreRequest
from prime_node.validator.alternatives import Alternative, sample_alternative
from prime_node.validator.calibrating import Errors, local_lease, measure_pair
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.noise import SEED_MAX
from prime_protocol.proof import compare_proofs
from prime_protocol.rollout import Rollouts
from prime_protocol.verify import Prefill, statistics, termination_fault
from prime_protocol.weights import Weights

GROUP, LENGTH = 8, 48
"""Completions of a lease, and their maximum length in tokens."""
SIDE_BY_SIDE, ALONE_EVERY = 8, 4
"""Leases that are sampled at once. Of every fourth such set, one after another: kernels differ with the size of a batch."""
CONTEXT = 128
TOPICS = ("rain", "a bridge", "the sea", "bread", "a clock", "winter", "the moon", "a garden", "iron", "a river")
QUESTIONS = (
    "Describe {} in one sentence.",
    "What is {} good for?",
    "Write a line of verse about {}.",
    "What is {a} + {b}?",
)
TOPLOC = "toploc"
"""Name of an array: which completions TOPLOC's rule refuses. Missing without proofs."""
FURTHER = ("apart", "rise", "stop")
"""Statistics that need no moments, kept with the others."""
FAULT = "fault"
"""Name of an array: whether the cheap checks reject the lease's bundle."""
REWARD = "reward"
"""Name of an array: how many different tokens each completion has, which is its reward here."""
Edit = Callable[[Lease, Sequence[Rollouts]], Rollouts]
"""What a cheat makes of one lease's completions, sampled once or by several seeds."""


@dataclass(frozen=True)
class Piece:
    """One kind of work, over the first prompts of a series."""

    work: Alternative
    num_prompts: int
    seed: int
    turn: int = 0
    """Added to the assigned seeds: another sample of the same leases."""
    parts: tuple[Piece, ...] = ()
    edit: Edit | None = None
    """What makes it from its parts, which are sampled. None: it is sampled itself."""

    @property
    def name(self) -> str:
        turn = f"-turn{self.turn}" if self.turn else ""
        return f"{self.work.name.replace(' ', '-')}-{self.seed}{turn}"


@dataclass(frozen=True)
class Measured:
    """What a judge measured of one piece."""

    errors: Errors
    is_refused_C: np.ndarray | None
    """Which completions TOPLOC's rule refuses; None if they carry no proofs."""
    further: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Statistics FURTHER [T], rewards [C], and faults, one for each lease."""


@dataclass(frozen=True)
class Samples:
    """Where samples are kept, and which engines sample and judge them."""

    out: Path
    model: Path
    sampler: str
    """Engine and arithmetic, for example "vllm/bf16"."""
    judge: str

    def sampled(self, piece: Piece, number: int) -> Path:
        return self.out / self.sampler.replace("/", "-") / f"{piece.name}-{number}.npz"

    def judged(self, piece: Piece, number: int) -> Path:
        name = f"{self.sampler} by {self.judge}".replace("/", "-").replace(" ", "-")
        return self.out / name / f"{piece.name}-{number}.npz"

    async def fill(self, pieces: Sequence[Piece]) -> None:
        """Sample and judge every lease that is not kept yet. Samples come first, so that one engine is in memory at a time."""
        todo = [(each, numbers) for each in _largest(pieces) if (numbers := self._missing(each, self.judged))]
        if not todo:
            return
        weights = wire.plain_weights(self.model, random_seed=None)
        plain = _largest([part for piece, _ in todo for part in piece.parts or (piece,)])
        missing = [(each, numbers) for each in plain if (numbers := self._missing(each, self.sampled))]
        if missing:
            engine = wire.plain_engine(self.sampler, self.model, threads=1, context_tokens_max=CONTEXT)
            await engine.load(weights, policy_version=0)
            for piece, numbers in missing:
                await self._sample(engine, weights, piece, numbers)
            await engine.close()
        judge = wire_scorers.plain_scorer(self.judge, self.model, threads=1, context_tokens_max=CONTEXT)
        await judge.load(weights, policy_version=0)
        for piece, numbers in todo:
            await self._judge(_Watched(judge), piece, numbers)
        await judge.close()

    def measured(self, piece: Piece) -> Measured:
        """Return what is kept of a piece."""
        errors, refused = Errors(), []
        further: dict[str, list[np.ndarray]] = {name: [] for name in (*FURTHER, REWARD, FAULT)}
        for number in range(piece.num_prompts):
            arrays = dict(np.load(self.judged(piece, number)))
            refused.append(arrays.pop(TOPLOC, None))
            for name, found in further.items():
                found.append(arrays.pop(name))
            errors.add_arrays(arrays)
        is_refused_C = None if any(each is None for each in refused) else np.concatenate(refused)
        return Measured(errors, is_refused_C, {name: np.concatenate(found) for name, found in further.items()})

    def _missing(self, piece: Piece, place: Callable[[Piece, int], Path]) -> list[int]:
        return [number for number in range(piece.num_prompts) if not place(piece, number).exists()]

    def rollouts(self, piece: Piece, number: int, lease: Lease) -> Rollouts:
        """Return one lease's bundle. Its samples are kept."""
        if piece.edit is not None:
            return piece.edit(lease, [self.rollouts(part, number, lease) for part in piece.parts])
        return Rollouts(**dict(np.load(self.sampled(piece, number))))

    async def _sample(self, engine: Engine, weights: Weights, piece: Piece, numbers: Sequence[int]) -> None:
        leases = leases_of(self.model, piece.num_prompts, piece.seed, turn=piece.turn)
        for first in range(0, len(numbers), SIDE_BY_SIDE):
            part = numbers[first : first + SIDE_BY_SIDE]
            is_alone = first // SIDE_BY_SIDE % ALONE_EVERY == ALONE_EVERY - 1
            found = await _sampled(engine, weights, [leases[n] for n in part], piece.work, is_alone=is_alone)
            for number, rollouts in zip(part, found, strict=True):
                arrays = {one.name: getattr(rollouts, one.name) for one in fields(rollouts)}
                _write(self.sampled(piece, number), {name: each for name, each in arrays.items() if each is not None})
            print(f"{piece.name}: {first + len(part)} of {len(numbers)} leases sampled", flush=True)

    async def _judge(self, judge: _Watched, piece: Piece, numbers: Sequence[int]) -> None:
        leases = leases_of(self.model, piece.num_prompts, piece.seed)
        for number in numbers:
            rollouts = self.rollouts(piece, number, leases[number])
            errors = await measure_pair(judge, [leases[number]], [rollouts])
            rewards = [len(set(one.token_ids)) for one in rollouts.completions()]
            fault = termination_fault(rollouts, leases[number].sampling)
            arrays = errors.arrays() | judge.further_of(rollouts) | {REWARD: np.array(rewards, np.float64)}
            _write(self.judged(piece, number), arrays | {FAULT: np.array([fault is not None])})
            print(f"{piece.name}, lease {number}: {errors.summary()}", flush=True)


def _largest(pieces: Sequence[Piece]) -> list[Piece]:
    """Return each kind of work once, with the most prompts that it is asked for."""
    return list({piece.name: piece for piece in sorted(pieces, key=lambda piece: piece.num_prompts)}.values())


class _Watched:
    """A scorer whose last forward pass can be looked at."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._last: Prefill | None = None

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        self._last = await self._scorer.prefill(requests, sampling)
        return self._last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def further_of(self, rollouts: Rollouts) -> dict[str, np.ndarray]:
        """Return further arrays of the last pass: statistics FURTHER, and which completions TOPLOC's rule refuses."""
        assert self._last is not None
        found = statistics(rollouts, self._last)
        further = {name: found.get(name, np.zeros_like(found["rise"])) for name in FURTHER}
        if rollouts.proofs_CB is None:
            return further
        assert self._last.hidden_TD is not None
        lengths = rollouts.lengths_N.tolist()
        is_bad_C = refused_by_toploc(compare_proofs(rollouts.proofs_CB, self._last.hidden_TD, lengths))
        owners_C = np.repeat(np.arange(len(lengths)), [-(-length // 32) for length in lengths])
        return further | {TOPLOC: np.bincount(owners_C, weights=is_bad_C) > 0}


async def _sampled(
    engine: Engine, weights: Weights, leases: Sequence[Lease], work: Alternative, *, is_alone: bool
) -> list[Rollouts]:
    if is_alone or work.change is not None:
        return await sample_alternative(engine, weights, leases, work)
    each = await asyncio.gather(*(sample_alternative(engine, weights, [lease], work) for lease in leases))
    return [rollouts for (rollouts,) in each]


def _write(path: Path, arrays: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part.npz")
    np.savez(partial, **arrays)
    partial.rename(path)


def leases_of(model: Path, num_prompts: int, seed: int, *, turn: int = 0) -> list[Lease]:
    """Return leases of one group each, over chats about sums and simple things. More prompts begin with the same ones.

    `turn` is added to the seeds of completions.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return list(_leases(tokenizer, num_prompts, np.random.default_rng(seed), turn))


def _leases(tokenizer: Any, num_prompts: int, rng: np.random.Generator, turn: int) -> Iterator[Lease]:
    for number in range(num_prompts):
        a, b = rng.integers(10, 100, 2)
        text = QUESTIONS[number % len(QUESTIONS)].format(TOPICS[rng.integers(len(TOPICS))], a=a, b=b)
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        seeds = tuple((seed + turn) & SEED_MAX for seed in rng.integers(0, SEED_MAX, GROUP, endpoint=True).tolist())
        problem = Problem(environment="chat", index=number)
        group = GroupAssignment(slot=0, problem=problem, prompt_token_ids=tuple(prompt), seeds=seeds)
        yield local_lease((group,), Sampling(completion_tokens_max=LENGTH, stop_token_ids=(tokenizer.eos_token_id,)))
