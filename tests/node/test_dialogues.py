"""Rollouts of several turns, from the worker to the trainer: played, bundled, judged, replayed, and trained on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builder import build_lease
from tests.node.table_engine import TableEngine
from tests.node.validator_world import judge_bundle
from tests.node.worker_world import COORDINATOR, WORKER, make_run
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.algo.advantages import inputs_of
from prime_node.cli.wire_environments import build_environments
from prime_node.envs import episodes
from prime_node.envs.episodes import bounds_of
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import Ask, EnvironmentGone, TurnEnvironment
from prime_node.trainer.batch import prepare
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.evaluate import Evaluator, HeldOutPrompt, HeldOutSets, held_out
from prime_node.trainer.recipe import Recipe
from prime_node.training_data.bundles import groups_of, open_batch, open_trained_bundle
from prime_node.validator import judge
from prime_node.worker.generating import Generated, NothingSampled, Sample, bundle_for, generate, play_lease
from prime_node.worker.loaded_policy import LoadedPolicy
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.replies import BatchGroup, TrainBatch
from prime_protocol.rollout import Completion, EngineInfo, FinishReason, Rollouts
from prime_protocol.run_spec import EnvironmentSpec, Option, PinnedRun
from prime_protocol.schedule import SwapPolicy
from prime_protocol.turns import Turn, rollouts_of_turns, turn_seed
from prime_protocol.verdict import RejectReason
from prime_protocol.weights import Weights

WORDS: dict[str, Option] = {"task": "spell_backward", "min_word_len": 3, "max_word_len": 4}
ENVIRONMENTS = (
    EnvironmentSpec(name="again", id="reasoning_gym", options={**WORDS, "partner": "retry"}, turns_max=3),
    EnvironmentSpec(name="words", id="reasoning_gym", options={**WORDS}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64
    )


@pytest.fixture(scope="module")
def run(model: Path) -> PinnedRun:
    stop = HfTokenizer(model).stop_token_id
    sampling = Sampling(completion_tokens_max=24, stop_token_ids=(stop, *range(97, 117)))  # it stops early and often
    return make_run(vocab_size=264, environments=ENVIRONMENTS, sampling=sampling, groups_per_step=2)


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(model)
    await made.load(initial_weights(model, 0), policy_version=0)
    yield made
    await made.close()


def worlds_of(run: PinnedRun, model: Path) -> dict[str, TurnEnvironment]:
    made = build_environments(run.spec.environments, model)
    return {name: world for name, world in made.items() if isinstance(world, TurnEnvironment)}


def lease_of(run: PinnedRun, model: Path) -> Lease:
    tokenizer, worlds = HfTokenizer(model), build_environments(run.spec.environments, model)
    groups = [
        GroupAssignment(
            slot=slot,
            problem=Problem(environment=name, index=slot),
            prompt_token_ids=tuple(tokenizer.encode_prompt(worlds[name].prompt(slot))),
            seeds=tuple(range(100 * slot, 100 * slot + 4)),
        )
        for slot, name in enumerate(("again", "words"))
    ]
    return build_lease(run, WORKER, groups)


async def never(version: int) -> tuple[int, dict[str, object]]:
    await asyncio.Event().wait()
    raise AssertionError


async def made_by_a_worker(engine: TransformersEngine, run: PinnedRun, model: Path, lease: Lease) -> Rollouts:
    worlds = worlds_of(run, model)
    generated = await generate(
        engine,
        lease,
        SwapPolicy.DRAIN,
        loaded=LoadedPolicy(0),
        wait_newer=never,  # type: ignore[arg-type]
        play=lambda lease, sample: play_lease(lease, run.spec, worlds, sample),
    )
    assert generated.rollouts is not None
    return generated.rollouts


async def judged(
    engine: TransformersEngine, run: PinnedRun, model: Path, lease: Lease, rollouts: Rollouts
) -> tuple[judge.Judgement, bytes]:
    info = EngineInfo(name="transformers", version="1", dtype="fp32", device="cpu")
    digest = digest_of(lease.model_dump_json().encode())
    parcel = bundle_for(lease, rollouts, key=WORKER, engine=info, created_at_ms=0, lease_digest=digest)
    opened = judge.open_bundle(parcel, lease, run)
    if not isinstance(opened, judge.OpenedBundle):
        return opened, parcel
    worlds = build_environments(run.spec.environments, model)
    return await judge_bundle(opened, engine, run=run, environments=worlds, tokenizer=HfTokenizer(model)), parcel


async def test_text_between_two_answers_is_sent_and_checked_and_not_trained(
    engine: TransformersEngine, run: PinnedRun, model: Path
) -> None:
    lease = lease_of(run, model)
    rollouts = await made_by_a_worker(engine, run, model, lease)
    assert rollouts.num_rollouts == 8
    turns = np.bincount(rollouts.rollout_numbers)
    assert turns[:4].max() == 3, "it tried again"
    assert (turns[4:] == 1).all(), "the other environment has one turn"
    judgement, parcel = await judged(engine, run, model, lease, rollouts)
    assert judgement.verdict.accepted, judgement
    assert judgement.measured["seed_flips_share"] == 0.0
    assert len(judgement.rewards) == 8

    batch = TrainBatch(
        run=run.digest,
        step=0,
        groups=tuple(
            BatchGroup(
                slot=group.slot,
                worker=WORKER.key_id,
                bundle=digest_of(parcel),
                first=4 * place,
                policy_version=0,
                problem=group.problem,
                prompt_token_ids=group.prompt_token_ids,
                rewards=judgement.rewards[4 * place : 4 * place + 4],
            )
            for place, group in enumerate(lease.groups)
        ),
    )
    opened = open_batch(seal(batch, PayloadType.BATCH, COORDINATOR), run, step=0)
    bundle = open_trained_bundle(parcel, digest=digest_of(parcel), worker=WORKER.key_id, run=run)
    first, second = groups_of(opened, {digest_of(parcel): bundle}, run)
    views = inputs_of(first).rollouts
    assert [view.num_turns for view in views] == turns[:4].tolist()
    reply_ids = HfTokenizer(model).encode("No. Try again.")
    assert all((view.tool_response_len > len(reply_ids)) == (view.num_turns > 1) for view in views)
    assert [view.num_turns for view in inputs_of(second).rollouts] == [1] * 4

    config = TrainerConfig(filters=())
    recipe = Recipe.of(config, max_steps=1, completion_tokens_max=24, vocab_size=264)
    prepared = prepare([first, second], recipe, step=0)
    assert len(prepared.samples) == 8, "the tiny model's template is extended, so each rollout is one sample"
    assert sum(sample.num_trained for sample in prepared.samples) == rollouts.num_tokens
    assert prepared.metrics["turns_max"] == 3
    long = prepared.samples[int(turns.argmax())]
    assert bytes(reply_ids).decode() in bytes(token for token in long.completion_token_ids if token < 256).decode(
        errors="replace"
    )


def spoil(change: Callable[[list[Turn]], list[Turn]]) -> Callable[[list[list[Turn]]], list[list[Turn]]]:
    return lambda episodes: [change(turns) if len(turns) == 3 else turns for turns in episodes]


def other_words(turns: list[Turn]) -> list[Turn]:
    return [*turns[:-1], replace(turns[-1], prompt_token_ids=(*turns[-1].prompt_token_ids[:-1], 1))]


def one_of_each(episodes: list[list[Turn]]) -> list[list[Turn]]:
    """The first of three turns is cut short, the next one has other words."""
    first, second, *_ = (number for number, turns in enumerate(episodes) if len(turns) == 3)
    changes = {first: episodes[first][:-1], second: other_words(episodes[second])}
    return [changes.get(number, turns) for number, turns in enumerate(episodes)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "OTHERS_S_MAX", 0.01)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (spoil(lambda turns: turns[:-1]), RejectReason.INCOMPLETE),  # it claims that its worker's environment failed
        (one_of_each, RejectReason.WRONG_CONTEXT),  # which hides nothing else
        (spoil(other_words), RejectReason.WRONG_CONTEXT),
        (
            spoil(lambda turns: [turns[0], *turns[:-1]]),
            RejectReason.WRONG_CONTEXT,
        ),  # it sampled twice, and kept the better one
    ],
)
async def test_turns_that_the_environment_does_not_ask_for_are_refused(
    engine: TransformersEngine,
    run: PinnedRun,
    model: Path,
    tamper: Callable[[list[list[Turn]]], list[list[Turn]]],
    reason: RejectReason,
) -> None:
    lease = lease_of(run, model)
    honest: list[list[Turn]] = await play_lease(
        lease, run.spec, worlds_of(run, model), lambda requests: engine.generate(requests, lease.sampling)
    )
    rollouts = rollouts_of_turns(lease, tamper(honest))
    digest = digest_of(lease.model_dump_json().encode())
    parcel = bundle_for(lease, rollouts, key=WORKER, engine=engine.info, created_at_ms=0, lease_digest=digest)
    opened = judge.open_bundle(parcel, lease, run)
    assert isinstance(opened, judge.OpenedBundle)
    worlds = build_environments(run.spec.environments, model)
    judgement = await judge.reward_bundle(opened, run=run, environments=worlds, tokenizer=HfTokenizer(model))
    assert judgement.verdict.reason is reason


async def test_an_environment_that_asks_for_nothing_hands_the_lease_back(run: PinnedRun, model: Path) -> None:
    class Silent:
        async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
            raise ZeroDivisionError("not today")

    async def sample(requests: list[GenerateRequest]) -> list[Completion]:
        return [Completion((1,), (-0.5,), FinishReason.STOP) for _ in requests]

    lease = lease_of(run, model)
    with pytest.raises(NothingSampled):
        await play_lease(lease, run.spec, {"again": Silent()}, sample)  # type: ignore[dict-item]

    async def play(lease: Lease, _: Sample) -> list[list[Turn]]:
        return await play_lease(lease, run.spec, {"again": Silent()}, sample)  # type: ignore[dict-item]

    async def newer(policy_version: int) -> tuple[int, Weights]:
        raise AssertionError("nobody swaps here")

    assert await generate(
        TableEngine(), lease, SwapPolicy.DRAIN, loaded=LoadedPolicy(0), wait_newer=newer, play=play
    ) == Generated(None, failed=True)


async def test_an_episode_whose_process_ends_is_played_again_by_itself(run: PinnedRun, model: Path) -> None:
    lease = lease_of(run, model)
    to_blame = turn_seed(lease.groups[0].seeds[1], 0) % 100
    began: list[int] = []

    class Dying:
        """Four concurrent episodes fail together; replayed one at a time, only the faulty one fails."""

        async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
            number = len(began)
            began.append(number)
            completion = await ask(prompt_token_ids)
            assert completion is not None
            assert number < 4 or len(began) == number + 1, "nobody else plays meanwhile"
            if number < 4 or completion.token_ids[0] == to_blame:
                raise EnvironmentGone("it ran out of memory")
            await ask((*prompt_token_ids, 1))
            return 1.0

    async def sample(requests: list[GenerateRequest]) -> list[Completion]:
        return [Completion((request.seed % 100,), (-0.5,), FinishReason.STOP) for request in requests]

    turns = await play_lease(lease, run.spec, {"again": Dying()}, sample)  # type: ignore[dict-item]
    assert [len(each) for each in turns] == [2, 1, 2, 2, 1, 1, 1, 1]


async def test_held_out_problems_are_played_too(engine: TransformersEngine, run: PinnedRun, model: Path) -> None:
    tokenizer, weights = HfTokenizer(model), initial_weights(model, 0)
    questions = held_out(build_environments(run.spec.environments, model), tokenizer, evaluation=3, stopping=1)
    sizes: list[int] = []

    class Counted(TransformersEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            sizes.append(len(requests))
            return await super().generate(requests, sampling)

    evaluator = Evaluator(
        Counted(model), tokenizer, questions, run.spec.sampling, seed=1, samples=2, bounds=bounds_of(run.spec)
    )
    marks = await evaluator.evaluate(weights, 0)
    assert marks == await evaluator.evaluate(weights, 0)
    assert {"eval_sampled/again", "eval_sampled/words"} <= marks.keys()
    assert len(sizes) > 2 * 4, "further turns were asked for"
    await evaluator.close()


async def test_a_held_out_problem_whose_environment_fails_is_not_right(run: PinnedRun, model: Path) -> None:
    class Broken:
        prompt = "?"

        async def play(self, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
            raise EnvironmentGone("it ran out of memory")

        def is_correct(self, completion: str, *, finished: bool) -> bool:
            raise ZeroDivisionError

        score = is_correct

    problem: Any = Broken()
    questions = HeldOutSets(
        tuple(HeldOutPrompt(name, (1,), problem, name == "again") for name in ("again", "words")), ()
    )
    made = Evaluator(
        TransformersEngine(model), HfTokenizer(model), questions, run.spec.sampling, seed=1, bounds=bounds_of(run.spec)
    )
    figures = await made.evaluate(initial_weights(model, 0), 0)
    assert not {"eval_greedy", "eval_sampled", "eval_reward"} & figures.keys()
    assert figures["eval_failed"] == 4.0
    await made.close()


async def test_a_held_out_episode_that_blocks_costs_the_others_nothing(run: PinnedRun, model: Path) -> None:
    began: list[int] = []

    class Dying:
        """Three concurrent episodes fail together; replayed one at a time, only the faulty one fails."""

        prompt = "?"

        def __init__(self, number: int) -> None:
            self.number = number

        async def play(self, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
            began.append(self.number)
            is_together = len(began) <= 3
            assert await ask(prompt_token_ids) is not None
            if is_together or self.number == 1:
                raise EnvironmentGone("it had to be ended")
            return 1.0

    problems: list[Any] = [Dying(number) for number in range(3)]
    questions = HeldOutSets((), tuple(HeldOutPrompt("again", (1,), problem, answers=True) for problem in problems))
    made = Evaluator(
        TransformersEngine(model), HfTokenizer(model), questions, run.spec.sampling, seed=1, bounds=bounds_of(run.spec)
    )
    assert await made.stopping_accuracy(initial_weights(model, 0), 0) == 1.0  # the one that fails is no wrong answer
    assert sorted(began) == [0, 0, 1, 1, 2, 2]
    await made.close()
