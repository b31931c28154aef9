"""`prime-node calibrate`: measure how far honest engines differ on this machine, and write the tolerances for validators."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console

from prime_node.cli.say import say
from prime_node.cli.shipped import read_calibration
from prime_node.files import write_durably
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prime_node.ports.engine import Scorer
    from prime_node.validator.alternatives import Alternative
    from prime_protocol.assignment import Lease
    from prime_protocol.calibration import PairMoments
    from prime_protocol.evidence import Moments
    from prime_protocol.rollout import Rollouts
    from prime_protocol.weights import Weights

ALTERNATIVES_SHARE, ALTERNATIVE_TOKENS = 20, 1_000
"""Each alternative is measured on a twentieth of the honest tokens, but on at least this many."""
RANDOM_MODEL_SPREAD = 0.15
"""Standard deviation of a random model's weights: it spreads the logits as widely as a trained model's."""


def calibrate(
    output: Annotated[Path, typer.Argument(help="Calibration file to write.")],
    model: Annotated[
        Path | None,
        typer.Option(help="Folder with config.json, tokenizer and safetensors; default: a small random model."),
    ] = None,
    sampler: Annotated[
        list[str],
        typer.Option(
            help="An engine that samples: transformers/fp32, transformers/bf16, vllm/fp32, vllm/bf16, vllm/bf16-fp32head."
        ),
    ] = ["transformers/fp32", "transformers/bf16"],  # noqa: B006 - typer reads it, nothing changes it
    judge: Annotated[list[str], typer.Option(help="An engine that judges; the same names.")] = [  # noqa: B006
        "transformers/fp32",
        "transformers/bf16",
    ],
    tokens: Annotated[
        int,
        typer.Option(min=10_000, help="Honest tokens per pair; fewer tokens give wider limits."),
    ] = 100_000,
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
) -> None:
    """Measure honest error between engines, dtypes and sizes of batches, and write it as a calibration for [run] calibration.

    Prints after how many tokens it would ban some kinds of dishonest work.
    """
    from prime_node.ports.engine import EngineMismatch
    from prime_protocol.calibration import Calibration

    known = read_calibration(extend) if extend is not None else None
    with tempfile.TemporaryDirectory() as scratch:
        folder = model or random_model(Path(scratch))
        lengths = {"num_tokens": tokens, "completion_tokens_max": completion_tokens, "prompt_tokens_max": prompt_tokens}
        is_random = model is None
        measuring = _measure(
            folder, sampler, judge, seed=seed, threads=threads, is_random=is_random, temperature=temperature, **lengths
        )
        try:
            pairs = asyncio.run(measuring)
        except EngineMismatch as error:
            raise LocalError(str(error)) from None
        size = json.loads((folder / CONFIG_FILE).read_bytes())
    measured = {(pair.worker, pair.validator) for pair in pairs}
    kept = [pair for pair in known.pairs if (pair.worker, pair.validator) not in measured] if known else []
    hidden_size, num_layers = size.get("hidden_size", 0), size.get("num_hidden_layers", 0)
    made = Calibration(
        pairs=(*pairs, *kept),
        hidden_size_max=min(hidden_size, known.hidden_size_max) if known else hidden_size,
        num_layers_max=min(num_layers, known.num_layers_max) if known else num_layers,
        temperature_min=max(temperature, known.temperature_min) if known else temperature,
        note=note or (known.note if known else ""),
    )
    write_durably(output, made.model_dump_json(indent=1).encode() + b"\n")
    say(
        f"{output}: {len(made.pairs)} pairs of engines, for models up to {made.num_layers_max} x {made.hidden_size_max}"
    )


def random_model(folder: Path) -> Path:
    """Write the configuration and tokenizer of a small model whose random weights make logits like a trained one's."""
    from prime_node.cli import wire_new
    from prime_node.coordinator.new_run import TinyModel

    wire_new.make_model_files(TinyModel(), folder)
    config = json.loads((folder / CONFIG_FILE).read_bytes()) | {"initializer_range": RANDOM_MODEL_SPREAD}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def _alternatives(temperature: float) -> list[Alternative]:
    """Return the dishonest work that each pair is tried on."""
    from prime_node.validator.alternatives import Alternative
    from prime_node.worker.cheats import mapped, quantised

    def int8(weights: Weights) -> Weights:
        return mapped(weights, lambda values: quantised(values, group=values.shape[-1], largest=127))

    return [
        Alternative("temperature x 0.95", {"temperature": 0.95 * temperature}),
        Alternative("temperature x 0.9", {"temperature": 0.9 * temperature}),
        Alternative("top-p 0.9", {"top_p": 0.9}),
        Alternative("int8 weights", change=int8),
    ]


async def _needed(
    scorer: Scorer,
    leases: Sequence[Lease],
    cheats: Sequence[tuple[Alternative, Sequence[Rollouts]]],
    moments: Mapping[str, Moments],
) -> str:
    """Return in words after how many tokens each alternative would be banned by these moments."""
    from prime_node.validator.alternatives import in_words, tokens_until_ban
    from prime_node.validator.calibrating import measure_pair

    needed = {}
    for alternative, sampled in cheats:
        errors = await measure_pair(scorer, leases, sampled)
        by_choices = tokens_until_ban(errors, moments, is_rescored=True)
        if alternative.change is None:
            needed[alternative.name] = by_choices
        else:
            needed[alternative.name] = tokens_until_ban(errors, moments, is_rescored=False)
            needed[f"{alternative.name} that claim the right logprobs"] = by_choices
    return in_words(needed)


async def _measure(
    folder: Path,
    samplers: list[str],
    judges: list[str],
    *,
    seed: int,
    threads: int,
    is_random: bool,
    temperature: float,
    num_tokens: int,
    completion_tokens_max: int,
    prompt_tokens_max: int,
) -> list[PairMoments]:
    """Return the moments of the error for each pair of a sampler and a judge. Raises LocalError."""
    from prime_node.cli import wire, wire_scorers
    from prime_node.validator.alternatives import sample_alternative
    from prime_node.validator.calibrating import choice_moments, make_leases, measure_pair, pair_of, sample_honestly

    console, pairs = Console(), []
    alternatives = _alternatives(temperature)
    weights = wire.plain_weights(folder, random_seed=seed if is_random else None)
    context = prompt_tokens_max + completion_tokens_max
    leases = make_leases(
        np.random.default_rng(seed),
        num_tokens=num_tokens,
        vocab_size=wire.tokenizer(folder).vocab_size,
        prompt_tokens_max=prompt_tokens_max,
        completion_tokens_max=completion_tokens_max,
        temperature=temperature,
    )
    others = leases[: max(1, len(leases) * max(num_tokens // ALTERNATIVES_SHARE, ALTERNATIVE_TOKENS) // num_tokens)]
    for sampler in samplers:
        engine = wire.plain_engine(sampler, folder, threads=threads, context_tokens_max=context)
        await engine.load(weights, policy_version=0)
        sampled = await sample_honestly(engine, leases)
        cheats = [(one, await sample_alternative(engine, weights, others, one)) for one in alternatives]
        await engine.close()
        for judge in judges:
            scorer = wire_scorers.plain_scorer(judge, folder, threads=threads, context_tokens_max=context)
            await scorer.load(weights, policy_version=0)
            errors = await measure_pair(scorer, leases, sampled)
            moments = errors.moments()
            choices = await choice_moments(scorer, leases, sampled)
            needed = await _needed(scorer, others, cheats, moments)
            await scorer.close()
            pairs.append(pair_of(engine, scorer, moments | choices))
            say(f"{sampler} judged by {judge}: {errors.summary()}", f"  banned: {needed}", console=console)
    return pairs
