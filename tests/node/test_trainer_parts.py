"""Components of the trainer's loop: the step's samples and numbers, the lessons, the held-out evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.batch_coordinator import STOP_TOKEN, write_model
from tests.node.trainer_world import EchoEnvironment

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.ports.train_backend import AggregationKind
from prime_node.ports.train_samples import Group, TrainingMode, TrainSample
from prime_node.trainer.batch import Prepared, prepare
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.evaluate import Evaluator, held_out
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.recipe import Recipe
from prime_node.trainer.step import Trained
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason

SHORT = Completion((7, 8), (-0.5, -0.25), FinishReason.STOP)
LONG = Completion((7, 8, 9, 9), (-0.5,) * 4, FinishReason.LENGTH)


def prepared(*groups: Group, **settings: object) -> Prepared:
    config = TrainerConfig.load({"trainer": {"filters": ["zero_advantage"]} | settings})
    return prepare(groups, Recipe.of(config, max_steps=9, completion_tokens_max=4, vocab_size=264), step=5)


MIXED = Group(0, (1, 2), (SHORT, LONG, SHORT), (1.0, 0.0, 0.5), (4, 3, 3), "anna")
FLAT = Group(1, (1, 3), (SHORT, SHORT), (0.5, 0.5), (5, 5), "bert")


def test_samples_carry_prompt_tokens_logprobs_and_advantage() -> None:
    first, second = prepared(MIXED, FLAT).samples
    assert (first.prompt_token_ids, first.completion_token_ids) == ((1, 2), (7, 8))
    assert (first.inference_logprobs, first.advantage) == ((-0.5, -0.25), 0.5)
    assert (second.completion_token_ids, second.advantage) == ((7, 8, 9, 9), -0.5)


def test_filtered_rollouts_stay_in_the_metrics() -> None:
    metrics = prepared(MIXED, FLAT).metrics
    assert metrics == {
        "num_groups": 2,
        "num_rollouts": 5,
        "num_workers": 2,
        "num_flat_groups": 1,
        "reward_mean": 0.5,
        "reward_std": pytest.approx(0.1**0.5),
        "completion_tokens_mean": 12 / 5,
        "completion_tokens_max": 4,
        "finished_share": 0.8,
        "lag_mean": 1.0,
        "lag_max": 2,
        "lag/0": 2,
        "lag/1": 1,
        "lag/2": 2,
        "num_stale_groups": 1,
        "num_stale_rollouts": 3,
        "fully_async/partial/total_partial_num": 0,
        "fully_async/partial/partial_ratio": 0.0,
        "fully_async/partial/max_partial_span": 0,
        "filtered_zero_advantage": 3,
    }


def test_completions_of_several_policies_are_counted_as_verl_counts_them() -> None:
    metrics = prepared(replace(MIXED, policies_spanned=(0, 2, 1)), FLAT).metrics
    assert metrics["fully_async/partial/total_partial_num"] == 2
    assert metrics["fully_async/partial/partial_ratio"] == 2 / 5
    assert metrics["fully_async/partial/max_partial_span"] == 2


def test_over_the_batches_of_a_step_counts_are_added_up_and_the_widest_span_is_kept() -> None:
    trained = Trained("", 1.0)
    for span in (1, 3):
        row = {"lag/1": 2.0, "fully_async/partial/total_partial_num": 1.0, "fully_async/partial/max_partial_span": span}
        trained.rows.append((4.0, row | {"fully_async/partial/partial_ratio": 0.1 * span}))
    assert trained.metrics == {
        "lag/1": 4.0,
        "fully_async/partial/total_partial_num": 2.0,
        "fully_async/partial/max_partial_span": 3,
        "fully_async/partial/partial_ratio": pytest.approx(0.2),
    }


def test_without_filters_everything_is_trained() -> None:
    assert [sample.advantage for sample in prepared(MIXED, FLAT, filters=[]).samples] == [0.5, -0.5, 0.0, 0.0, 0.0]


def test_a_monitor_counts_and_takes_nothing_out() -> None:
    absurd = {"type": "gibberish", "threshold": -0.3, "enforce": False}
    metrics = prepared(MIXED, filters=[absurd, "zero_advantage"]).metrics
    assert (metrics["flagged_gibberish"], metrics["filtered_zero_advantage"]) == (3, 0)
    strict = prepared(MIXED, filters=[absurd | {"enforce": True}])
    assert (strict.metrics["filtered_gibberish"], strict.samples) == (3, ())
    assert strict.metrics["num_rollouts"] == 3


def test_rollouts_are_stamped_with_the_mode_of_their_environment() -> None:
    rollout = replace(FLAT, environment="stories")
    teacher = {"url": "http://127.0.0.1:1", "model": "teacher"}
    samples = prepared(MIXED, rollout, mode="rl", environment_modes={"stories": "opd"}, teacher=teacher).samples
    assert [(sample.mode, sample.advantage) for sample in samples] == [
        (TrainingMode.RL, 0.5),
        (TrainingMode.RL, -0.5),
        (TrainingMode.OPD, 1.0),
        (TrainingMode.OPD, 1.0),
    ]


def test_the_default_filters_watch_for_gibberish_and_repetition_and_take_out_what_teaches_nothing() -> None:
    default = TrainerConfig().filters
    assert [(each.type, each.enforce) for each in default] == [
        ("gibberish", False),
        ("repetition", False),
        ("zero_advantage", True),
    ]


def test_nothing_is_learnt_from_what_is_too_old_though_it_counts_in_the_advantages() -> None:
    found = prepared(replace(MIXED, masked=(True, False, False)), filters=[])
    assert [sample.advantage for sample in found.samples] == [-0.5, 0.0]
    assert found.metrics["filtered_stale"] == 1


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def lessons(model: Path, *, seed: int = 1, shares: dict[str, float] | None = None) -> Lessons:
    shares = shares or {"a": 1.0, "b": 3.0}
    environments = dict.fromkeys(shares, EchoEnvironment())
    return Lessons(environments, shares, HfTokenizer(model), seed=seed, problems=21, batch_size=400)


def test_lessons_are_a_function_of_seed_and_step(model: Path) -> None:
    one = lessons(model)
    later = one.batch(9)
    assert lessons(model).batch(9) == later
    assert one.batch(10) != later
    assert lessons(model, seed=2).batch(9) != later


def test_a_lesson_is_the_prompt_with_its_answer_and_the_stop_token(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    for sample in lessons(model).batch(0):
        letter = tokenizer.decode(list(sample.completion_token_ids))
        assert letter in EchoEnvironment.TRAINED
        assert sample.prompt_token_ids == tuple(tokenizer.encode_prompt(letter))
        assert sample.completion_token_ids[-1] == STOP_TOKEN


def test_environments_are_drawn_by_their_shares(model: Path) -> None:
    class Shouting(EchoEnvironment):
        TRAINED = EchoEnvironment.TRAINED.upper()

    drawn = Lessons(
        {"quiet": EchoEnvironment(), "loud": Shouting()},
        {"quiet": 1.0, "loud": 3.0},
        HfTokenizer(model),
        seed=1,
        problems=21,
        batch_size=400,
    ).batch(0)
    loud = sum(chr(sample.completion_token_ids[0]).isupper() for sample in drawn)
    assert 270 < loud < 330


def test_the_stopping_rule_and_the_evaluation_see_different_problems(model: Path) -> None:
    questions = held_out({"echo": EchoEnvironment()}, HfTokenizer(model), evaluation=3, stopping=2)
    assert [question.problem.prompt for question in questions.evaluation] == ["a", "e", "i"]
    assert [question.problem.prompt for question in questions.stopping] == ["o", "u"]


async def test_the_evaluation_is_repeatable_and_reported_by_environment(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    environments = {"first": EchoEnvironment(), "second": EchoEnvironment()}
    evaluator = Evaluator(
        TransformersEngine(model, threads=1),
        tokenizer,
        held_out(environments, tokenizer, evaluation=4, stopping=1),
        Sampling(completion_tokens_max=2, stop_token_ids=(STOP_TOKEN,)),
        seed=1,
        samples=3,
        pass_at=(1, 3),
    )
    weights = initial_weights(model, 0)
    marks = await evaluator.evaluate(weights, 0)
    assert marks == await evaluator.evaluate(weights, 0)
    figures = [f"eval_{name}" for name in ("greedy", "sampled", "reward", "pass_at_1", "pass_at_3")]
    bounded = [f"{figure}{bound}" for figure in figures for bound in ("", "_low", "_high")]
    assert marks.pop("eval_failed") == 0.0
    assert marks.keys() == {*bounded, *(f"{name}/{environment}" for name in bounded for environment in environments)}
    assert all(0.0 <= mark <= 1.0 for mark in marks.values())
    assert all(marks[f"{figure}_low"] <= marks[figure] <= marks[f"{figure}_high"] for figure in figures)
    assert marks["eval_pass_at_1"] == pytest.approx(marks["eval_sampled"])
    assert marks["eval_pass_at_1"] <= marks["eval_pass_at_3"]
    assert 0.0 <= await evaluator.stopping_accuracy(weights, 1) <= 1.0
    await evaluator.close()


async def test_a_model_that_knows_the_answers_is_marked_as_knowing_them(model: Path) -> None:
    tokenizer, backend = HfTokenizer(model), TorchBackend(model, seed=0, threads=1)
    known = "aei"
    answers = [(*tokenizer.encode(letter), STOP_TOKEN) for letter in known]
    samples = [
        TrainSample(tuple(tokenizer.encode_prompt(letter)), answer, (0.0, 0.0), advantage=1.0)
        for letter, answer in zip(known, answers, strict=True)
    ]
    for _ in range(60):
        backend.train_step(samples, find_loss("sft"), lr=2e-2)
    questions = held_out({"echo": EchoEnvironment()}, tokenizer, evaluation=3, stopping=2)
    sampling = Sampling(completion_tokens_max=2, stop_token_ids=(STOP_TOKEN,))
    evaluator = Evaluator(TransformersEngine(model, threads=1), tokenizer, questions, sampling, seed=1)
    marks = await evaluator.evaluate(backend.snapshot(), 1)
    assert [marks[f"eval_{name}"] for name in ("greedy", "sampled", "reward")] == [1.0, 1.0, 1.0]
    assert marks["eval_greedy_low"] < 0.5  # three problems are a small sample
    assert await evaluator.stopping_accuracy(backend.snapshot(), 2) < 1.0
    await evaluator.close()


def test_settings_reach_their_places_from_a_file_and_are_checked() -> None:
    config = TrainerConfig.load(
        {"trainer": {"optimizer": {"lr": 1e-4, "beta2": 0.95}, "loss": {"type": "aipo", "kwargs": {"delta": 4.0}}}},
        {"sft": {"steps_max": 7}},
    )
    assert config.optimizer.settings().betas == (0.9, 0.95)
    assert (config.optimizer.lr, config.sft.steps_max, config.loss.kwargs) == (1e-4, 7, {"delta": 4.0})
    assert config.sft.optimizer.lr == 2e-3
    seeds_way = TrainerConfig.load(
        {"trainer": {"loss": {"type": "dppo_kl", "kl_tau": 0.01, "aggregation": "token-mean"}}}
    )
    named = TrainerConfig.load({"trainer": {"advantage": {"type": "normalized", "eps": 1e-6}}}, {"loss": "gspo"})
    assert (named.advantage.type, named.advantage.kwargs, named.loss.type) == ("normalized", {"eps": 1e-6}, "gspo")
    assert (seeds_way.loss.kwargs, seeds_way.loss.aggregation) == ({"kl_tau": 0.01}, AggregationKind.TOKEN_MEAN)
    with pytest.raises(LocalError, match=r"\[trainer\] optimizer.lr"):
        TrainerConfig.load({"trainer": {"optimizer": {"lr": 0.0}}})
