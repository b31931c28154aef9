"""`prime-node calibrate`: measure how far honest engines differ on this machine, and write the tolerances for validators."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console

from prime_node.cli.lifetime import INTERRUPTED, run_role
from prime_node.cli.options import Options, Set, StopWithParent
from prime_node.cli.say import say
from prime_node.cli.shipped import read_calibration
from prime_node.files import write_durably
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import CONFIG_FILE

if TYPE_CHECKING:
    from prime_node.cli.measuring import MeasurementPlan, MeasurementProgress
    from prime_node.validator.alternatives import Alternative
    from prime_protocol.calibration import Calibration, PairMoments
    from prime_protocol.weights import Weights

PROMPTS = 256
"""Different random prompts."""
TOKENS = 100_000
"""Honest tokens per pair, without a config."""
LINE_S = 10.0
"""Interval between lines of progress without a terminal."""
GRACE_S = 2.0
"""Time for the engines to end after a request to stop."""


def calibrate(
    output: Annotated[Path, typer.Argument(help="Calibration file to write.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Config of a run: its model, engines, sampling, prompts and [run] calibration_* replace the defaults below.",
        ),
    ] = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run directory: measure for this run, with its config and its newest policy, for `operate amend`."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder with config.json, tokenizer and safetensors; default: a small random model."),
    ] = None,
    sampler: Annotated[
        list[str],
        typer.Option(
            help="An engine that samples: transformers/fp32, transformers/bf16, vllm/fp32, vllm/bf16, vllm/bf16-fp32head; "
            "default: transformers'."
        ),
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
    judge: Annotated[
        list[str], typer.Option(help="An engine that judges; the same names; default: transformers'.")
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
    tokens: Annotated[
        int | None,
        typer.Option(min=2_000, help=f"Honest tokens per pair, by default {TOKENS:,}; fewer tokens give wider limits."),
    ] = None,
    completion_tokens: Annotated[int, typer.Option(min=1, help="Length of each completion, in tokens.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a prompt, in tokens.")] = 32,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="Sampling temperature; the calibration covers runs at this one or higher.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, sampling and the random model.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engines.")] = 1,
    extend: Annotated[
        Path | None,
        typer.Option(
            help="Calibration file, for example of another machine; its pairs that are not measured now are kept."
        ),
    ] = None,
    note: Annotated[str, typer.Option(help="Note in the file: where and how it was measured.")] = "",
    cheats: Annotated[
        bool, typer.Option("--cheats/--no-cheats", help="Also measure after how many tokens cheats would be banned.")
    ] = True,
    stop_with_parent: StopWithParent = False,
) -> None:
    """Measure honest error between engines, dtypes and sizes of batches, and write it as a calibration for [run] calibration.

    Prints after how many tokens it would ban some kinds of dishonest work. After Ctrl-C the same command continues.
    """
    from prime_node.cli.wire_measurement import measurement_of_run

    known = read_calibration(extend) if extend is not None else None
    with tempfile.TemporaryDirectory() as scratch:
        if run is not None or config is not None or assignments:
            options = Options(config, assignments) if run is None else Options.of_run(str(run), config, assignments)
            policy = None if run is None else _newest_policy(run, Path(scratch) / "policy")
            measurement = measurement_of_run(options, Path(scratch), policy=policy)
            plans = measurement.plan(samplers=sampler, judges=judge)
            temperature = measurement.run.temperature
        else:
            plans = _plans(
                Path(scratch),
                model,
                sampler=sampler,
                judge=judge,
                completion_tokens=completion_tokens,
                prompt_tokens=prompt_tokens,
                temperature=temperature,
                seed=seed,
                threads=threads,
            )
        pairs = _measured(plans, tokens=tokens, cheats=cheats, stop_with_parent=stop_with_parent)
        size = json.loads((plans[0].folder / CONFIG_FILE).read_bytes())
    made = _extended(
        pairs,
        known,
        hidden_size=size.get("hidden_size", 0),
        num_layers=size.get("num_hidden_layers", 0),
        temperature=temperature,
        note=note,
    )
    write_durably(output, made.model_dump_json(indent=1).encode() + b"\n")
    say(
        f"{output}: {len(made.pairs)} pairs of engines, for models up to {made.num_layers_max} x {made.hidden_size_max}"
    )


def _newest_policy(run: Path, folder: Path) -> Path:
    """Write a run's newest policy to `folder`, verified. Raises LocalError."""
    from prime_node.cli.api import verify_checkpoint

    found = asyncio.run(verify_checkpoint(run, export=folder))
    if not found.ok:
        raise LocalError(f"{run}: its newest policy cannot be used: `prime-node verify {run}` shows the reason")
    return folder


def _plans(
    scratch: Path,
    model: Path | None,
    *,
    sampler: list[str],
    judge: list[str],
    completion_tokens: int,
    prompt_tokens: int,
    temperature: float,
    seed: int,
    threads: int,
) -> list[MeasurementPlan]:
    """Return one plan for each sampler, over random prompts. Raises LocalError."""
    from prime_node.cli import wire
    from prime_node.cli.measuring import MeasurementPlan
    from prime_node.cli.wire_measurement import random_model
    from prime_node.validator.calibrating import LeaseSeries, random_prompts
    from prime_protocol.assignment import Sampling

    folder = model or random_model(scratch)
    weights = wire.plain_weights(folder, random_seed=None if model else seed)
    vocab_size = wire.tokenizer(folder).vocab_size
    prompts = random_prompts(PROMPTS, vocab_size=vocab_size, tokens_max=prompt_tokens, seed=seed)
    sampling = Sampling(temperature=temperature, completion_tokens_max=completion_tokens, stop_token_ids=())
    both = ["transformers/fp32", "transformers/bf16"]
    return [
        MeasurementPlan(
            folder=folder,
            weights=weights,
            series=LeaseSeries(prompts, sampling, seed=seed),
            sampler=one,
            judges=judge or both,
            tokens=TOKENS,
            threads=threads,
        )
        for one in sampler or both
    ]


def _measured(
    plans: list[MeasurementPlan], *, tokens: int | None, cheats: bool, stop_with_parent: bool
) -> list[PairMoments]:
    """Measure all plans, with progress on the screen. Raises LocalError; ends the command if it is interrupted."""
    from dataclasses import replace

    from prime_node.cli.measuring import Measurement, calibrations_folder
    from prime_node.patience import unless

    pairs: list[PairMoments] = []

    async def interrupted(stop: asyncio.Event, screen: _Screen) -> None:
        await stop.wait()
        screen.close()  # an engine that cannot be interrupted may end the process before the caller does
        say("", f"interrupted: what was measured is kept in {calibrations_folder()}; the same command continues")

    async def measure(stop: asyncio.Event) -> int:
        for plan in plans:
            sampling = plan.series.sampling
            wanted = replace(
                plan,
                tokens=tokens or plan.tokens,
                alternatives=_alternatives(sampling.temperature, sampling.top_p) if cheats else (),
            )
            with _Screen(f"{plan.sampler} judged by {', '.join(plan.judges)}") as screen:
                measurement = Measurement(wanted, on_progress=screen.show)
                found = await unless(interrupted(stop, screen), measurement.measure())
            if found is None:
                return INTERRUPTED
            for pair, lines in found:
                pairs.append(pair)
                say(*lines.split("\n"))
        return 0

    if code := run_role(measure, stop_with_parent=stop_with_parent, grace_s=GRACE_S):
        raise typer.Exit(code)
    return pairs


class _Screen:
    """Progress of one measurement: a status line on a terminal, else a line now and then."""

    def __init__(self, what: str) -> None:
        self._what, self._console, self._said_s = what, Console(), 0.0
        self._status = self._console.status(f"{what}: starting the engines") if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        if self._status is not None:
            self._status.stop()

    def show(self, progress: MeasurementProgress) -> None:
        """Show the measured tokens and the time left."""
        left_s = progress.seconds_left
        left = "" if left_s is None else f", {left_s / 60:.1f} minutes left"
        line = f"{self._what}: {progress.num_tokens:,} of {progress.tokens:,} tokens{left}"
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() >= self._said_s + LINE_S or progress.num_tokens >= progress.tokens:
            say(line)
            self._said_s = time.monotonic()


def _extended(
    pairs: list[PairMoments],
    known: Calibration | None,
    *,
    hidden_size: int,
    num_layers: int,
    temperature: float,
    note: str,
) -> Calibration:
    """Return a calibration of the measured pairs and of those known ones that were not measured."""
    from prime_protocol.calibration import Calibration

    measured = {(pair.worker, pair.validator) for pair in pairs}
    kept = [pair for pair in known.pairs if (pair.worker, pair.validator) not in measured] if known else []
    return Calibration(
        pairs=(*pairs, *kept),
        hidden_size_max=min(hidden_size, known.hidden_size_max) if known else hidden_size,
        num_layers_max=min(num_layers, known.num_layers_max) if known else num_layers,
        temperature_min=max(temperature, known.temperature_min) if known else temperature,
        note=note or (known.note if known else ""),
    )


def _alternatives(temperature: float, top_p: float) -> list[Alternative]:
    """Return the dishonest work that each pair is tried on."""
    from prime_node.validator.alternatives import Alternative
    from prime_node.worker.cheats import mapped, quantised

    def int8(weights: Weights) -> Weights:
        return mapped(weights, lambda values: quantised(values, group=values.shape[-1], largest=127))

    return [
        Alternative("temperature x 0.95", {"temperature": 0.95 * temperature}),
        Alternative("temperature x 0.9", {"temperature": 0.9 * temperature}),
        Alternative("top-p 0.9" if top_p == 1.0 else "top-p x 0.9", {"top_p": 0.9 * top_p}),
        Alternative("int8 weights", change=int8),
    ]
