"""Measurement of pairs of engines for a calibration: lease by lease, kept in a cache, so that it resumes after an interruption.

One engine samples a lease, and each judging engine scores it, before the next lease begins. So the progress is that of finished
tokens, and all engines of a measurement are in memory at the same time. Engines start only if the cache lacks something.

The cache holds what was measured of a pair of engines, in pieces.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_node.cli import wire, wire_scorers
from prime_node.cli.wire_classes import class_of_kind, device_name, engine_builds
from prime_node.config import user_cache
from prime_node.files import write_durably
from prime_node.ports.engine import Engine, EngineMismatch, Scorer
from prime_node.validator.alternatives import Alternative, in_words, sample_alternative, tokens_until_ban
from prime_node.validator.calibrating import (
    Errors,
    LeaseSeries,
    choice_moments,
    measure_pair,
    raised_choices,
    sample_honestly,
)
from prime_protocol.assignment import Lease
from prime_protocol.calibration import PairMoments
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.evidence import Moments
from prime_protocol.rollout import Rollouts
from prime_protocol.weights import Weights, root_of

KEY_FILE = "key.json"
DIGEST_BYTES = 32
"""Digest at the end of a piece, where a zip file may have a comment: the format's own sums do not cover all of it."""


def calibrations_folder() -> Path:
    """Return the folder of all measurements of this user."""
    return user_cache() / "calibrations"


class MeasuredPieces:
    """Pieces of one measurement. Other engines, weights, prompts or settings are another measurement."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        """Open the measurement that `key` describes, a JSON object. Nothing is written yet."""
        text = json.dumps(key, indent=1, sort_keys=True)
        self._key = text
        self.folder = calibrations_folder() / digest_of(text.encode())[:32]

    def read(self, name: str) -> dict[str, npt.NDArray[Any]] | None:
        """Return the arrays of a piece; None if it is missing or damaged."""
        try:
            stored = (self.folder / f"{name}.npz").read_bytes()
        except OSError:
            return None
        if digest_of(data := stored[:-DIGEST_BYTES]) != stored[-DIGEST_BYTES:].hex():
            return None
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            return {key: found[key] for key in found.files}

    def write(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep a piece, durably. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / KEY_FILE).exists():
            write_durably(self.folder / KEY_FILE, self._key.encode())
        data = io.BytesIO()
        named: dict[str, Any] = dict(arrays)
        np.savez(data, **named)
        written = data.getvalue()
        write_durably(self.folder / f"{name}.npz", written + bytes.fromhex(digest_of(written)))


TOKENS_MIN = 2_000
"""Tokens of a pair below which nothing is calibrated."""
ALTERNATIVES_SHARE, ALTERNATIVE_TOKENS = 20, 1_000
"""Each alternative is measured on a twentieth of the honest tokens, but on at least this many."""
PIECES_FORMAT = 2
"""Part of a measurement's key. Increase it when a piece has other arrays, or they mean something else."""
SECONDS, CHOICES = "seconds", "choices."
"""Names of arrays of a piece: the time that it took, and the prefix of what unseeded engines need."""
VLLM_SHARE = 0.9
"""Share of a GPU's memory that the engines of a measurement divide among them."""

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class MeasurementPlan:
    """What to measure: one engine that samples, and one or more that judge."""

    folder: Path
    """Configuration and tokenizer of the model."""
    weights: Weights
    series: LeaseSeries
    sampler: str
    """Engine and arithmetic, for example "vllm/bf16"."""
    judges: Sequence[str]
    tokens: int
    """Honest tokens to measure."""
    seconds_max: float = float("inf")
    """Measured time after which no further lease begins, without the start of engines."""
    threads: int = 1
    cpu_cache_gib: float = 1.0
    """Memory for vLLM's key-value cache on a CPU."""
    with_choices: bool = True
    """Whether to measure what unseeded engines need, which takes each judge a second forward pass."""
    alternatives: Sequence[Alternative] = ()
    """Dishonest work to try the calibration on."""


@dataclass(frozen=True)
class MeasurementProgress:
    """State of a measurement, after each lease."""

    num_tokens: int
    tokens: int
    seconds: float
    seconds_max: float

    @property
    def seconds_left(self) -> float | None:
        """Time left in seconds; None before the first lease."""
        if not self.num_tokens:
            return None
        by_rate = (self.tokens - self.num_tokens) * self.seconds / self.num_tokens
        return max(0.0, min(by_rate, self.seconds_max - self.seconds))


@dataclass
class MeasuredPair:
    """What was measured of one judge."""

    judge: str
    pieces: MeasuredPieces
    errors: Errors = field(default_factory=Errors)
    choices: Errors = field(default_factory=Errors)

    def add(self, arrays: Arrays) -> None:
        """Add a piece of honest work."""
        own = {name: values for name, values in arrays.items() if not name.startswith(CHOICES) and name != SECONDS}
        self.errors.add_arrays(own)
        choices = {name.removeprefix(CHOICES): arrays[name] for name in arrays if name.startswith(CHOICES)}
        if choices:
            self.choices.add_arrays(choices | {"lengths": arrays["lengths"]})

    def moments(self) -> dict[str, Moments]:
        """Return the moments of all statistics."""
        return self.errors.moments() | choice_moments(self.choices)


class Measurement:
    """One measurement. Its pieces survive this process; the same plan continues it."""

    def __init__(self, plan: MeasurementPlan, *, on_progress: Callable[[MeasurementProgress], None]) -> None:
        self._plan, self._on_progress = plan, on_progress
        root = root_of(plan.weights)
        self._pairs = [MeasuredPair(judge, MeasuredPieces(self._key(root, judge))) for judge in plan.judges]
        self._engine: Engine | None = None
        self._scorers: list[Scorer] = []

    async def measure(self) -> list[tuple[PairMoments, str]]:
        """Return the moments of each pair, and in words what was measured.

        Raises LocalError if an engine does not work or the time was too short. A cancelled call keeps the finished leases.
        """
        try:
            await self._measure_honest()
            cheats = [await self._measure_cheat(number) for number in range(len(self._plan.alternatives))]
        except EngineMismatch as error:
            raise LocalError(str(error)) from None
        finally:
            await self._close()
        found = []
        for place, pair in enumerate(self._pairs):
            moments = pair.moments()
            made = PairMoments(
                worker=class_of_kind(self._plan.sampler), validator=class_of_kind(pair.judge), moments=moments
            )
            lines = f"{self._plan.sampler} judged by {pair.judge}: {pair.errors.summary()}"
            if cheats:
                lines += f"\n  banned: {self._needed([cheat[place] for cheat in cheats], moments)}"
            found.append((made, lines))
        return found

    async def _measure_honest(self) -> None:
        """Measure leases until there are enough tokens, or no time is left."""
        plan, number, seconds = self._plan, 0, 0.0
        while True:
            num_tokens = self._pairs[0].errors.num_tokens
            self._on_progress(MeasurementProgress(num_tokens, plan.tokens, seconds, plan.seconds_max))
            if num_tokens >= plan.tokens:
                return
            if seconds >= plan.seconds_max:
                break
            lease = plan.series.lease(number)
            pieces = self._read(f"honest-{number}")
            if pieces is None:
                engine, _ = await self._started()
                began = time.monotonic()
                pieces = await self._judged([lease], await sample_honestly(engine, [lease]))
                taken = {SECONDS: np.array(time.monotonic() - began)}
                pieces = [{**arrays, **taken} for arrays in pieces]
                self._write(f"honest-{number}", pieces)
            for pair, arrays in zip(self._pairs, pieces, strict=True):
                pair.add(arrays)
            seconds += max(float(arrays[SECONDS]) for arrays in pieces)
            number += 1
        if num_tokens < TOKENS_MIN:
            raise LocalError(
                f"only {num_tokens:,} tokens of {plan.sampler} were measured in {seconds / 60:.0f} minutes, and a calibration "
                f"needs {TOKENS_MIN:,}: allow more minutes; what was measured is kept"
            )

    async def _measure_cheat(self, number: int) -> list[Errors]:
        """Return the errors of one alternative under each judge."""
        plan, alternative = self._plan, self._plan.alternatives[number]
        wanted = max(plan.tokens // ALTERNATIVES_SHARE, ALTERNATIVE_TOKENS)
        name = f"cheat-{number}-{wanted}"
        pieces = self._read(name)
        if pieces is None:
            engine, _ = await self._started()
            leases = plan.series.first(wanted)
            sampled = await sample_alternative(engine, plan.weights, leases, alternative)
            pieces = await self._judged(leases, sampled, with_choices=False)
            self._write(name, pieces)
        found = [Errors() for _ in pieces]
        for errors, arrays in zip(found, pieces, strict=True):
            errors.add_arrays(arrays)
        return found

    async def _judged(
        self, leases: Sequence[Lease], sampled: Sequence[Rollouts], *, with_choices: bool = True
    ) -> list[Arrays]:
        _, scorers = await self._started()
        found: list[Arrays] = []
        for scorer in scorers:
            arrays = (await measure_pair(scorer, leases, sampled)).arrays()
            if with_choices and self._plan.with_choices:
                raised = (await raised_choices(scorer, leases, sampled)).values
                arrays |= {f"{CHOICES}{name}": np.concatenate(parts) for name, parts in raised.items()}
            found.append(arrays)
        return found

    def _needed(self, cheats: Sequence[Errors], moments: Mapping[str, Moments]) -> str:
        """Return in words after how many tokens each alternative would be banned by these moments."""
        needed = {}
        for alternative, errors in zip(self._plan.alternatives, cheats, strict=True):
            by_choices = tokens_until_ban(errors, moments, is_rescored=True)
            if alternative.change is None:
                needed[alternative.name] = by_choices
            else:
                needed[alternative.name] = tokens_until_ban(errors, moments, is_rescored=False)
                needed[f"{alternative.name} that claim the right logprobs"] = by_choices
        return in_words(needed)

    def _read(self, name: str) -> list[Arrays] | None:
        found = [pair.pieces.read(name) for pair in self._pairs]
        known: list[Arrays] = [arrays for arrays in found if arrays is not None]
        return known if len(known) == len(found) else None

    def _write(self, name: str, pieces: Sequence[Arrays]) -> None:
        for pair, arrays in zip(self._pairs, pieces, strict=True):
            pair.pieces.write(name, arrays)

    def _key(self, root: str, judge: str) -> dict[str, Any]:
        plan = self._plan
        return {
            "format": PIECES_FORMAT,
            "model": root,
            "worker": class_of_kind(plan.sampler),
            "validator": class_of_kind(judge),
            "builds": engine_builds(),
            "device": device_name(),
            "temperature": plan.series.sampling.temperature,
            "leases": plan.series.digest,
            "choices": plan.with_choices,
        }

    async def _started(self) -> tuple[Engine, list[Scorer]]:
        """Return the engines, started and loaded at the first call. Raises LocalError, EngineMismatch."""
        plan = self._plan
        if self._engine is None:
            context = plan.series.context_tokens_max
            share = VLLM_SHARE / (1 + len(plan.judges))
            self._engine = wire.plain_engine(
                plan.sampler,
                plan.folder,
                threads=plan.threads,
                context_tokens_max=context,
                cpu_cache_gib=plan.cpu_cache_gib,
                gpu_memory_share=share,
            )
            await self._engine.load(plan.weights, policy_version=0)
            for judge in plan.judges:
                scorer = wire_scorers.plain_scorer(
                    judge, plan.folder, threads=plan.threads, context_tokens_max=context, gpu_memory_share=share
                )
                self._scorers.append(scorer)
                await scorer.load(plan.weights, policy_version=0)
            found = [engine.info.calibration_class for engine in self._running()]
            expected = [class_of_kind(kind) for kind in (plan.sampler, *plan.judges)]
            if found != expected:
                raise LocalError(f"engines of the classes {', '.join(expected)} started as {', '.join(found)}")
        return self._engine, self._scorers

    async def _close(self) -> None:
        for engine in self._running():
            await engine.close()

    def _running(self) -> list[Engine | Scorer]:
        return [*([] if self._engine is None else [self._engine]), *self._scorers]
