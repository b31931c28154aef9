"""The measurement that a config's run needs: its model, the engines of its workers and validators, its prompts and sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prime_node.adapters.environments.child import EnvironmentFailed
from prime_node.cli import wire, wire_environments, wire_new
from prime_node.cli.measuring import MeasurementPlan
from prime_node.cli.options import Options
from prime_node.cli.place import HOME
from prime_node.cli.wire_classes import worker_kind
from prime_node.coordinator.new_run import PretrainedModel, RunConfig, TinyModel
from prime_node.envs.settings import EnvironmentSettings
from prime_node.envs.source import is_leasable, prompt_of
from prime_node.trainer.config import TrainerConfig
from prime_node.validator.calibrating import LeaseSeries
from prime_node.validator.config import ValidatorConfig
from prime_node.worker.config import WorkerConfig
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.limits import Limits
from prime_protocol.run_spec import CONFIG_FILE
from prime_protocol.weights import Weights

if TYPE_CHECKING:
    from prime_node.ports.environment import Environment, Tokenizer

PROMPTS, DRAWS_MAX = 256, 1_024
"""Different prompts of a measurement, and problems that are drawn at most for them: some prompts may be too long."""
INDEX_MAX = 2**32
"""Indices of the drawn problems are below this."""
SHORT_TOKENS, LONG_TOKENS = 64, 512
"""Length limits of completions, where the run's own is larger: in most leases, and in every fourth one."""
RANDOM_MODEL_SPREAD = 0.15
"""Standard deviation of a random model's weights: it spreads the logits as widely as a trained model's."""


@dataclass(frozen=True)
class RunMeasurement:
    """What a run's own calibration is measured with."""

    folder: Path
    """Configuration and tokenizer of the model."""
    weights: Weights
    series: LeaseSeries
    run: RunConfig
    worker: WorkerConfig
    validator: ValidatorConfig

    def plan(self, *, samplers: Sequence[str], judges: Sequence[str]) -> list[MeasurementPlan]:
        """Return one plan for each sampling engine; by default, for those of workers and validators on this machine."""
        return [
            MeasurementPlan(
                folder=self.folder,
                weights=self.weights,
                series=self.series,
                sampler=sampler,
                judges=judges or [self.validator.kind],
                tokens=self.run.calibration_tokens,
                seconds_max=60 * self.run.calibration_minutes,
                threads=self.worker.threads,
                cpu_cache_gib=self.worker.cpu_cache_gib,
                with_choices=self.run.checks.unseeded,
            )
            for sampler in samplers or [worker_kind(self.worker)]
        ]


def measurement_of_run(options: Options, scratch: Path, *, policy: Path | None = None) -> RunMeasurement:
    """Return the measurement for a config's run; `scratch` receives the model's files. Raises LocalError.

    `policy` is a folder with the weights to measure with; None: the run's first ones.
    """
    grants = options.load(EnvironmentSettings)
    run = wire_new.pin_datasets(options.load(RunConfig), grants)
    folder = scratch / "model"
    model = wire_new.make_model_files(run.model, folder)
    made = wire_environments.start_environments(run.environments, folder, hidden=(HOME,), settings=grants)
    try:
        prompts = _prompts(
            made,
            {one.name: one.weight for one in run.environments},
            wire.tokenizer(folder),
            run.limits,
        )
    except EnvironmentFailed as error:
        raise LocalError(f"an environment gives no prompts to measure with: {error}") from None
    finally:
        wire_environments.end_environments(made)
    sampling = Sampling(
        temperature=run.temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        min_p=run.min_p,
        completion_tokens_max=min(run.completion_tokens_max, SHORT_TOKENS),
        stop_token_ids=model.stop_token_ids,
    )
    return RunMeasurement(
        folder=folder,
        weights=_weights(run.model, options.load(TrainerConfig).initial_weights, folder)
        if policy is None
        else wire.plain_weights(policy, random_seed=None),
        series=LeaseSeries(prompts, sampling, long_tokens_max=min(run.completion_tokens_max, LONG_TOKENS)),
        run=run,
        worker=options.load(WorkerConfig),
        validator=options.load(ValidatorConfig),
    )


def random_model(folder: Path) -> Path:
    """Write the configuration and tokenizer of a small model whose random weights make logits like a trained one's."""
    wire_new.make_model_files(TinyModel(), folder)
    return write_spread_config(folder, folder)


def write_spread_config(model: Path, folder: Path) -> Path:
    """Write a model's configuration to `folder`, changed so that random weights make logits like a trained model's."""
    config = json.loads((model / CONFIG_FILE).read_bytes()) | {"initializer_range": RANDOM_MODEL_SPREAD}
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def _weights(model: TinyModel | PretrainedModel, initial_weights: str | None, folder: Path) -> Weights:
    """Return the weights of a pretrained model. For a random one return weights as sharp as those of a trained one."""
    if isinstance(model, PretrainedModel):
        return wire.plain_weights(Path(initial_weights or model.name_or_path), random_seed=None)
    return wire.plain_weights(write_spread_config(folder, folder.parent / "spread"), random_seed=0)


def _prompts(
    environments: Mapping[str, Environment], weights: Mapping[str, float], tokenizer: Tokenizer, limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """Return prompts of the run's problems, by the environments' weights. Raises LocalError if all are too long."""
    rng, names = np.random.default_rng(0), list(environments)
    shares = np.array([weights[name] for name in names]) / sum(weights.values())
    prompts: list[tuple[int, ...]] = []
    for _ in range(DRAWS_MAX):
        name = names[rng.choice(len(names), p=shares)]
        prompt = prompt_of(environments[name], int(rng.integers(INDEX_MAX)), tokenizer)
        if is_leasable(prompt, limits):
            prompts.append(prompt)
        if len(prompts) == PROMPTS:
            break
    if not prompts:
        raise LocalError(
            f"no prompt of 1 to {limits.prompt_tokens_max} tokens in {DRAWS_MAX} problems; check the environments' options and "
            "prompt_tokens_max"
        )
    return tuple(prompts)
