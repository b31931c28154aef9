"""The shipped calibration on data that it was not made from: honest workers stay far from a ban, each kind of cheat is near."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from tests.node import calibrating_world
from tests.node.calibrating_world import CALIBRATION, LENGTH, Judged, bundle_of, completions_of, leases_of, rescored
from typer.testing import CliRunner

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.cli.main import app
from prime_node.cli.shipped import read_calibration
from prime_node.coordinator.new_run import covers
from prime_node.validator.alternatives import in_words, tokens_until_ban
from prime_node.validator.calibrating import Errors, sample_honestly
from prime_node.worker.cheats import mapped
from prime_protocol.calibration import evidence_of
from prime_protocol.check_policy import EVIDENCE_MAX
from prime_protocol.errors import LocalError
from prime_protocol.evidence import folded, log_evidence
from prime_protocol.verify import Statistics

folder, judged = calibrating_world.folder, calibrating_world.judged


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def log_evidence_of(bundles: list[Statistics], judge: str = "transformers/fp32/cpu") -> list[float]:
    """After each bundle."""
    wealth, logs = folded({}, {}, statistics=CALIBRATION.statistics), []
    for bundle in bundles:
        sums = evidence_of(bundle, CALIBRATION, worker="transformers/fp32/cpu", validator=judge).sums
        assert sums
        wealth = folded(wealth, sums, statistics=CALIBRATION.statistics)
        logs.append(log_evidence(wealth))
    return logs


@pytest.mark.slow  # 2,400 bundles a class
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_honest_workers_of_a_model_that_was_not_measured_are_not_suspected(
    judged: Judged, folder: Path, dtype: str
) -> None:
    """Many workers with bundles in different orders, checked after every bundle: Ville's inequality holds with a margin."""
    judge = TransformersEngine(folder, dtype=dtype, threads=1)
    await judge.load(judged.weights, policy_version=0)
    parts = completions_of(await judged.statistics(await sample_honestly(judged.engine, judged.leases), judge))
    await judge.close()
    rng, highest = np.random.default_rng(0), []
    for _ in range(60):
        drawn = [bundle_of([parts[i] for i in rng.integers(0, len(parts), 8)]) for _ in range(40)]
        highest.append(max(log_evidence_of(drawn, f"transformers/{dtype}/cpu")))
    assert np.mean(np.array(highest) >= math.log(10)) <= 0.1
    assert max(highest) < math.log(100)


def tokens_needed(errors: Errors) -> float:
    """Tokens until the ban, by completions; infinite where it never comes."""
    logs = log_evidence_of(list(completions_of(errors)))
    return next((LENGTH * (n + 1) for n, log_m in enumerate(logs) if log_m >= math.log(EVIDENCE_MAX)), math.inf)


async def test_altered_weights_are_banned_by_their_logprobs_and_rescored_ones_by_their_flips(judged: Judged) -> None:
    rng = np.random.default_rng(1)
    other = mapped(judged.weights, lambda values: values + rng.normal(0.0, 0.02 * values.std(), values.shape))
    judged = judged.first(1_000)
    sampled = await judged.cheating(other)
    assert tokens_needed(await judged.statistics(sampled)) <= 64
    assert tokens_needed(await judged.statistics(await rescored(judged, sampled))) <= 1_000


@pytest.mark.parametrize(("temperature", "tokens_max"), [(0.8, 128), (0.95, 512), (0.0, 32)])
async def test_another_temperature_is_banned_though_its_logprobs_are_the_right_ones(
    judged: Judged, temperature: float, tokens_max: int
) -> None:
    judged = judged.first(tokens_max)
    colder = [
        lease.model_copy(update={"sampling": lease.sampling.model_copy(update={"temperature": temperature})})
        for lease in judged.leases
    ]
    sampled = await rescored(judged, await sample_honestly(judged.engine, colder))
    assert tokens_needed(await judged.statistics(sampled)) <= tokens_max


async def test_forged_seeds_are_banned_at_once(judged: Judged) -> None:
    judged = judged.first(LENGTH)
    forged = leases_of(seed=6)[: len(judged.leases)]
    forged = [
        lease.model_copy(
            update={
                "groups": tuple(
                    mine.model_copy(update={"seeds": other.seeds})
                    for mine, other in zip(lease.groups, theirs.groups, strict=True)
                )
            }
        )
        for lease, theirs in zip(judged.leases, forged, strict=True)
    ]
    assert tokens_needed(await judged.statistics(await sample_honestly(judged.engine, forged))) <= LENGTH


@pytest.mark.slow
def test_what_calibrate_writes_can_be_used_and_extended(tmp_path: Path) -> None:
    """The command itself, on the smallest sample that it takes."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    fast = ["--tokens", "2000", "--judge", "transformers/fp32"]
    made = CliRunner().invoke(app, ["calibrate", str(first), *fast, "--sampler", "transformers/fp32"])
    assert made.exit_code == 0, made.output
    said = " ".join(made.output.split())
    assert re.search(r"banned: .*int8 weights: after [\d,]+ tokens", said), "judged in the same arithmetic, they show"
    assert "temperature x 0.95: after" in said
    more = [*fast, "--sampler", "transformers/bf16", "--extend", str(first)]
    assert CliRunner().invoke(app, ["calibrate", str(second), *more]).exit_code == 0
    pairs = read_calibration(second).pairs
    assert {(pair.worker, pair.validator) for pair in pairs} == {
        ("transformers/bf16/cpu", "transformers/fp32/cpu"),
        ("transformers/fp32/cpu", "transformers/fp32/cpu"),
    }
    assert pairs[1] == read_calibration(first).pairs[0]
    assert set(pairs[0].moments) >= {"margin", "flip", "square", "cooler", "looser"}
    assert "stop" not in pairs[0].moments, "it was measured without stop tokens"


def test_what_a_calibration_cannot_tell_apart_is_said() -> None:
    assert in_words({"a": 1234.0, "b": math.inf, "c": 80.0}) == (
        "c: after 80 tokens; a: after 1,200 tokens; not seen in 200,000: b"
    )
    rng = np.random.default_rng(2)
    honest, lying = Errors(), Errors()
    for errors, scale in ((honest, 1.0), (lying, 10.0)):
        values = np.abs(rng.normal(0.0, 0.05 * scale, 32_000)).astype(np.float32)
        errors.add({"square": values**2, "margin": np.zeros_like(values)}, np.full(1_000, 32, np.int32))
    moments = honest.moments()
    assert tokens_until_ban(lying, moments, is_rescored=False) <= 512
    assert tokens_until_ban(lying, moments, is_rescored=True) == math.inf, "its choices are the honest ones"
    assert tokens_until_ban(honest, moments, is_rescored=False) == math.inf
    for nats, bundles in ((0.0, math.inf), (2.0, 1)):
        others = {"shading": np.full((1_000, 3), nats)}
        found = tokens_until_ban(honest, moments, is_rescored=False, others=others)
        assert found == bundles * 8 * 32, "eight completions of 2 nats each are above ln(3 * 2 * 1e5)"


def test_an_unknown_engine_is_reported(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "c.json"), "--sampler", "abacus/fp32"])
    assert isinstance(result.exception, LocalError)
    assert "known are transformers and vllm" in str(result.exception)


def test_the_shipped_calibration_covers_the_demo_and_nothing_larger() -> None:
    assert covers(CALIBRATION, tiny_model_files()["config.json"])
    assert not covers(CALIBRATION, tiny_model_files(hidden_size=256)["config.json"])
    assert not covers(CALIBRATION, tiny_model_files(num_layers=3)["config.json"])
    assert not covers(CALIBRATION, b'{"model_type": "other"}')
