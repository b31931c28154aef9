"""Environments in a separate process: same answers, no access to keys, and crashes that the role survives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.time_world import until

from prime_node.adapters.environments.child import EnvironmentFailed, Start
from prime_node.adapters.environments.process import (
    EnvironmentProcess,
    ProcessEnvironment,
    ProcessTurnEnvironment,
)
from prime_node.adapters.environments.restrictions import ProcessRestrictions, order
from prime_node.adapters.environments.variables import passed_on
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.cli.environment_service import LEFT_BEHIND_MAX
from prime_node.cli.wire_environments import build_environments, start_environments
from prime_node.envs.settings import EnvironmentSettings
from prime_node.ports.environment import EnvironmentGone, EnvironmentSilent, TurnEnvironment, TurnProblem
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import EnvironmentSpec, Option


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[EnvironmentSpec]:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(f'{{"question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(50)))
    options: dict[str, Option] = {"path": str(path), "digest": digest_of(path.read_bytes())}
    return [
        EnvironmentSpec(name="sums", id="jsonl", options=options),
        EnvironmentSpec(name="again", id="jsonl", options={**options, "partner": "retry"}, turns_max=2),
    ]


@pytest.fixture(scope="module")
def grants(specs: list[EnvironmentSpec]) -> EnvironmentSettings:
    return EnvironmentSettings(data_folder=Path(str(specs[0].options["path"])).parent)


@pytest.fixture(scope="module")
def started(
    specs: list[EnvironmentSpec], model: Path, grants: EnvironmentSettings
) -> Iterator[dict[str, ProcessEnvironment]]:
    made = start_environments(specs, model, hidden=[], settings=grants)
    yield made
    made["sums"].process.close()


def test_a_process_answers_as_the_environment_itself(
    started: dict[str, ProcessEnvironment], specs: list[EnvironmentSpec], model: Path
) -> None:
    here, there = build_environments(specs, model)["sums"], started["sums"]
    assert not isinstance(there, TurnEnvironment)
    for index in range(10):
        assert there.prompt(index) == here.prompt(index)
        assert there.answer(index) == here.answer(index)
        assert there.score(index, here.answer(index), finished=True) == 1.0
        assert there.score(index, "x", finished=True) == 0.0
    ours, theirs = here.held_out(3), there.held_out(3)
    assert [problem.prompt for problem in theirs] == [problem.prompt for problem in ours]
    assert [problem.is_correct("0", finished=True) for problem in theirs] == [
        problem.is_correct("0", finished=True) for problem in ours
    ]


def test_processes_agree_on_problems_whatever_order_their_sets_have(model: Path) -> None:
    """These tasks iterate over sets of strings, which Python orders by hashes that differ from process to process."""
    tasks = ["isomorphic_strings", "polynomial_multiplication", "ransom_note"]
    specs = [
        EnvironmentSpec(name=task, id="reasoning_gym", options={"task": task, "compare": "text"}) for task in tasks
    ]
    prompts = []
    for _ in range(2):
        made = start_environments(specs, model, hidden=[], settings=EnvironmentSettings())
        prompts.append([made[task].prompt(index) for task in tasks for index in range(10)])
        made[tasks[0]].process.close()
    assert prompts[0] == prompts[1]


async def test_an_episode_is_played_across_the_pipe(started: dict[str, ProcessEnvironment], model: Path) -> None:
    world, tokenizer = started["again"], HfTokenizer(model)
    assert isinstance(world, TurnEnvironment)
    prompts: list[str] = []

    async def ask(prompt: tuple[int, ...]) -> Completion | None:
        prompts.append(tokenizer.decode(list(prompt)))
        answer_ids = [*tokenizer.encode(world.answer(1) if len(prompts) == 2 else "no"), tokenizer.stop_token_id]
        return Completion(tuple(answer_ids), (-0.5,) * len(answer_ids), FinishReason.STOP)

    assert await world.play(1, tuple(tokenizer.encode_prompt(world.prompt(1))), ask) == 1.0
    assert prompts[1].endswith("No. Try again.")
    (problem,) = world.held_out(1)
    assert isinstance(problem, TurnProblem)

    async def silence(prompt: tuple[int, ...]) -> Completion | None:
        return None

    assert await problem.play(tuple(tokenizer.encode_prompt(problem.prompt)), silence) == 0.0


async def test_an_episode_whose_process_ends_says_so(
    specs: list[EnvironmentSpec], model: Path, grants: EnvironmentSettings
) -> None:
    world = start_environments(specs[1:], model, hidden=[], settings=grants)["again"]
    assert isinstance(world, TurnEnvironment)

    async def ask(prompt: tuple[int, ...]) -> Completion | None:
        os.kill(world.process.pid, 9)
        await until(lambda: world.process.child.is_gone)  # its namespace ends a moment later
        return None

    with pytest.raises(EnvironmentGone):
        await world.play(1, tuple(HfTokenizer(model).encode_prompt(world.prompt(1))), ask)
    world.process.close()


async def test_an_error_in_the_model_ends_its_episode_with_that_error(
    started: dict[str, ProcessEnvironment], model: Path
) -> None:
    """And no other: the process keeps playing."""
    world, tokenizer = started["again"], HfTokenizer(model)
    assert isinstance(world, TurnEnvironment)
    prompt = tuple(tokenizer.encode_prompt(world.prompt(1)))

    async def fail(prompt: tuple[int, ...]) -> Completion | None:
        raise KeyError("a bug")

    async def silence(prompt: tuple[int, ...]) -> Completion | None:
        return None

    async with asyncio.timeout(20.0):
        other = asyncio.ensure_future(world.play(1, prompt, silence))
        with pytest.raises(KeyError, match="a bug"):
            await world.play(1, prompt, fail)
        assert await other == 0.0
        assert await world.play(1, prompt, silence) == 0.0


HANGS = """
import asyncio, concurrent.futures, contextlib, threading, time
from prime_node.adapters.environments.separate_grading import SeparateGrading
from prime_node.cli import environment_process

GATE = threading.Event()

class World:
    prompt = answer = held_out = len

    def score(self, index, completion, *, finished):
        return SeparateGrading(self, seconds_max=0.2).grade(None, completion)

    def grade(self, problem, answer):
        time.sleep(1_000 * (answer == "hang"))
        return 1.0

    async def play(self, index, prompt_token_ids, ask):
        if index == 0:
            await asyncio.Event().wait()
        if index == 1:
            time.sleep(1_000)
        if index == 5:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await asyncio.to_thread(time.sleep, 1_000)
            return 1.0
        if index == 6:
            await asyncio.to_thread(time.sleep, 1_000)
        if index == 7:
            return float(await asyncio.to_thread(sum, [1]))
        if index == 8:
            await ask(prompt_token_ids)
            await asyncio.gather(*[asyncio.to_thread(GATE.wait) for _ in range(100)])
        if index == 9:
            GATE.set()
        if index == 10:
            try:
                await ask(prompt_token_ids)
            finally:
                self.is_over = True
        if index == 11:
            return float(self.is_over)
        if index in (3, 4):
            if not hasattr(self, "threads"):
                self.threads = concurrent.futures.ThreadPoolExecutor(2)
                asyncio.get_running_loop().set_default_executor(self.threads)
            await asyncio.to_thread(time.sleep, 1_000 * (index == 3))
        return float((await ask(prompt_token_ids)) is not None)

confine = environment_process.confined

def confined(hello):
    missing = confine(hello)
    from prime_node.cli import environment_service
    environment_service.build_environments = lambda specs, model, **_: {"world": World()}
    return missing

environment_process.confined = confined
environment_process.run_environment_process()
"""


def restrictions(model: Path) -> ProcessRestrictions:
    return ProcessRestrictions(
        read=(str(model),),
        hidden=(),
        network=False,
        loopback=False,
        memory_bytes_max=2**33,
        processes_max=2_048,
        file_bytes_max=2**30,
        open_files_max=1_024,
        tmp_bytes_max=2**30,
    )


@pytest.fixture
def hanging(model: Path) -> Iterator[EnvironmentProcess]:
    def start(folder: Path) -> Start:
        return Start([sys.executable, "-c", HANGS, order(restrictions(model), folder)], passed_on(folder))

    process = EnvironmentProcess(start, {"environments": [], "model": {}}, silence_s_max=0.5)
    yield process
    process.close()


async def yes(_: tuple[int, ...]) -> Completion | None:
    return Completion((1,), (-0.5,), FinishReason.STOP)


async def test_an_episode_that_hangs_fails_alone_and_its_process_ends_with_the_last_one(
    hanging: EnvironmentProcess,
) -> None:
    world, first = ProcessTurnEnvironment(hanging, "world"), os.pidfd_open(hanging.pid)
    begun, hung = asyncio.Event(), asyncio.Event()

    async def wait(_: tuple[int, ...]) -> Completion | None:
        begun.set()
        await hung.wait()
        return await yes(_)

    other = asyncio.create_task(world.play(2, (1,), wait))
    await begun.wait()
    with pytest.raises(EnvironmentSilent):
        await world.play(0, (1,), wait)
    hanging.silence_s_max = 60.0
    assert await world.play(2, (1,), yes) == 1.0
    assert not select.select([first], [], [], 0)[0], "it is waited for"
    hung.set()
    assert await other == 1.0
    assert (await asyncio.to_thread(select.select, [first], [], [], 60))[0], "it has ended"
    os.close(first)


@pytest.mark.parametrize("error", [KeyError("a bug"), TimeoutError("of the model")])
async def test_an_error_in_the_model_ends_its_episode_in_the_process_too(
    hanging: EnvironmentProcess, error: Exception
) -> None:
    world, first = ProcessTurnEnvironment(hanging, "world"), hanging.pid
    hanging.silence_s_max = 60.0

    async def fail(_: tuple[int, ...]) -> Completion | None:
        raise error

    with pytest.raises(type(error)):
        await world.play(10, (1,), fail)
    assert await world.play(11, (1,), yes) == 1.0
    assert hanging.pid == first


async def test_threads_that_hang_keep_no_honest_episode_waiting(hanging: EnvironmentProcess) -> None:
    world = ProcessTurnEnvironment(hanging, "world")
    silent = await asyncio.gather(*(world.play(3, (1,), yes) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(each, EnvironmentSilent) for each in silent), "more of them than threads"
    hanging.silence_s_max = 60.0
    assert await world.play(4, (1,), yes) == 1.0


async def test_many_graders_that_hang_at_once_lose_no_honest_episode_of_their_process(
    hanging: EnvironmentProcess,
) -> None:
    world = ProcessTurnEnvironment(hanging, "world")
    hanging.silence_s_max = 2.0
    hung = [world.play(6, (1,), yes) for _ in range(40)]
    *silent, honest = await asyncio.gather(*hung, world.play(7, (1,), yes), return_exceptions=True)
    assert all(isinstance(each, EnvironmentSilent) for each in silent)
    assert honest == 1.0


def test_an_answer_that_hangs_its_scorer_is_told_from_one_that_breaks_it(hanging: EnvironmentProcess) -> None:
    world, first = ProcessTurnEnvironment(hanging, "world"), hanging.pid
    with pytest.raises(EnvironmentSilent, match="not graded within"):
        world.score(0, "hang", finished=True)
    assert world.score(0, "right", finished=True) == 1.0
    assert hanging.pid == first


async def test_graders_that_leave_their_threads_behind_wear_a_process_out(hanging: EnvironmentProcess) -> None:
    world, first = ProcessTurnEnvironment(hanging, "world"), hanging.pid
    hanging.silence_s_max = 60.0
    for _ in range(LEFT_BEHIND_MAX):
        assert await world.play(5, (1,), yes) == 1.0
        assert hanging.pid == first
    await world.play(5, (1,), yes)
    assert hanging.pid != first
    assert await world.play(7, (1,), yes) == 1.0


async def test_an_episode_with_many_threads_of_its_own_wears_nothing_out(hanging: EnvironmentProcess) -> None:
    world, first, begun = ProcessTurnEnvironment(hanging, "world"), hanging.pid, asyncio.Event()
    hanging.silence_s_max = 60.0

    async def ask(_: tuple[int, ...]) -> Completion | None:
        begun.set()
        return await yes(_)

    parallel = asyncio.create_task(world.play(8, (1,), ask))
    await begun.wait()
    for index in (7, 7, 9):
        assert await world.play(index, (1,), yes) == 1.0
    assert await parallel == 1.0
    assert hanging.pid == first


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_process_ends_with_its_host_whatever_hangs_in_its_threads(
    model: Path, tmp_path: Path, is_broken: bool
) -> None:
    command = [sys.executable, "-c", HANGS, order(restrictions(model), tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    hello: dict[str, object] = {"id": 0, "environments": [], "model": {}}
    played = {"method": "play", "environment": "world", "prompt": [1]}
    process.stdin.write(json.dumps(hello).encode() + b"\n")
    process.stdin.flush()
    assert process.stdout.readline()
    if is_broken:  # it is killed before it gets an answer
        process.stdout.close()
    for message in ({"id": 1, "index": 6, **played}, {"id": 2, "index": 5, **played}, {"id": 3, "method": "ping"}):
        process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    if not is_broken:
        process.stdin.close()
    try:
        assert process.wait(30) == int(is_broken)
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()


async def test_an_episode_that_blocks_ends_its_process(hanging: EnvironmentProcess) -> None:
    world, first = ProcessTurnEnvironment(hanging, "world"), hanging.pid
    with pytest.raises(EnvironmentGone, match="did not answer"):
        await world.play(1, (1,), yes)
    hanging.silence_s_max = 60.0
    assert await world.play(2, (1,), yes) == 1.0
    assert hanging.pid != first


def test_an_environment_that_takes_its_process_with_it_is_started_again(
    specs: list[EnvironmentSpec], model: Path, grants: EnvironmentSettings
) -> None:
    made = start_environments(specs[:1], model, hidden=[], settings=grants)
    world = made["sums"]
    question, (_, problem) = world.prompt(0), world.held_out(2)
    right = problem.is_correct("0", finished=True)
    with pytest.raises(EnvironmentFailed, match="KeyError"):
        world.process.ask("prompt", "another", index=0)
    first = world.process.pid
    os.kill(first, 9)
    with contextlib.suppress(EnvironmentFailed):  # a request before the end is noticed fails
        while world.process.pid == first:
            world.process.ask("prompt", "sums", index=0)
    assert world.process.ask("prompt", "sums", index=0) == question
    assert problem.is_correct("0", finished=True) == right
    world.process.close()


def test_an_environments_process_reports_its_faults(model: Path) -> None:
    with pytest.raises(LocalError, match="no implementation 'chess'"):
        start_environments([EnvironmentSpec(name="a", id="chess")], model, hidden=[], settings=EnvironmentSettings())
