"""A hostile environment package: its host gets errors, in bounded time and memory, and believes no forged answer."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from pathlib import Path

import pytest
from tests.security.hostile_world import BOUNDS, hostile, model, package, running, tried

from prime_node.adapters.environments import child, process
from prime_node.adapters.environments.child import EnvironmentFailed
from prime_node.adapters.environments.frames import (
    Answered,
    Asked,
    as_flag,
    as_parts,
    as_reward,
    as_text,
    as_texts,
    read_message_frame,
)
from prime_node.cli.wire_environments import start_environments
from prime_protocol import limits
from prime_protocol.errors import LocalError, TransientFault

pytestmark = pytest.mark.timeout(120)


def alive(argument: str) -> list[int]:
    """Return this machine's processes with that argument."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (each / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in arguments:
            found.append(int(each.name))
    return found


def test_nothing_outlives_the_process(tmp_path: Path) -> None:
    with running(tmp_path) as world:
        assert tried(world, "survive", "123456") == "did: started"
        assert alive("123456")
    assert not alive("123456")


def test_a_process_that_stops_itself_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_S_MAX", 2.0)
    with running(tmp_path, isolated=False) as world:
        first = world.process.pid
        with pytest.raises(EnvironmentFailed, match="took longer"):
            world.score(0, "stop", finished=True)
        assert world.score(0, "right", finished=True) == 1.0
        assert world.process.pid != first


@pytest.mark.parametrize("probe", ["hang", "end_group", "exit_now"])
def test_a_process_that_hangs_or_ends_is_replaced(tmp_path: Path, probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_S_MAX", 5.0)
    with running(tmp_path, isolated=False) as world:
        with pytest.raises(EnvironmentFailed):
            world.score(0, probe, finished=True)
        assert world.score(0, "right", finished=True) == 1.0


@pytest.mark.parametrize("probe", ["say 10000000", "recurse"])
def test_an_error_of_any_length_comes_as_one_short_line(tmp_path: Path, probe: str) -> None:
    with running(tmp_path, isolated=False) as world:
        with pytest.raises(EnvironmentFailed) as failed:
            world.score(0, probe, finished=True)
        assert len(str(failed.value)) <= limits.TEXT_CHARS_MAX
        assert world.score(0, "right", finished=True) == 1.0


@pytest.mark.parametrize("task", ["raise", "exit"])
def test_a_package_that_fails_when_it_is_loaded_is_a_local_error(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(package(tmp_path / "package")))
    with pytest.raises(LocalError) as refused:
        start_environments([hostile(task)], model(tmp_path / "model"), hidden=[], settings=BOUNDS)
    assert len(str(refused.value)) < 1_000


def test_a_package_that_does_not_load_in_time_is_a_fault_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "START_S_MAX", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(package(tmp_path / "package")))
    with pytest.raises(TransientFault, match="did not start"):
        start_environments([hostile("hang")], model(tmp_path / "model"), hidden=[], settings=BOUNDS)


FORGED = [
    json.dumps({"id": 1, "result": 1.0}),
    json.dumps({"id": 1, "result": 1.0, "worn": True}),
    json.dumps({"ask": 1, "id": 1}),
    json.dumps({"ask": 1, "id": 1, "prompt": ["a"]}),
    json.dumps({"x": 1}),
    json.dumps([1]),
    json.dumps({"id": True, "result": 1}),
    json.dumps({"id": 1}),
    json.dumps({"id": 1, "result": 1, "error": "both"}),
    "[" * 100_000,
    "no json",
    '{"id": 1, "result": ' + "9" * 10_000 + "}",
    "",
]


@pytest.mark.slow
def test_an_answer_to_no_question_ends_the_process_and_nobody_believes_it(tmp_path: Path) -> None:
    with running(tmp_path, isolated=False) as world:
        for line in FORGED:
            first = world.process.pid
            with pytest.raises(EnvironmentFailed):
                world.score(0, f"forge {line}", finished=True)
            assert world.process.pid != first, line
        assert world.score(0, "right", finished=True) == 1.0


def test_a_line_without_an_end_is_read_no_further_than_its_bound(tmp_path: Path) -> None:
    with running(tmp_path, isolated=False) as world:
        assert world.score(0, "right", finished=True) == 1.0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(EnvironmentFailed):
            world.score(0, f"endless_line {2**30}", finished=True)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1_024
        assert grown < 4 * limits.ENVIRONMENT_LINE_BYTES_MAX
        assert world.score(0, "right", finished=True) == 1.0


def test_a_reward_is_a_number_of_a_bounded_size(tmp_path: Path) -> None:
    with running(tmp_path, isolated=False, task="patch") as world:
        for odd in ("nan", "infinity", "huge", "negative", "text", "none", "dict", "object", "big"):
            with pytest.raises(EnvironmentFailed):
                world.score(0, odd, finished=True)


def test_a_prompt_is_a_text_of_a_bounded_length_that_can_be_encoded(tmp_path: Path) -> None:
    with running(tmp_path, isolated=False, task="patch") as world:
        for index in range(5):
            with pytest.raises(EnvironmentFailed):
                world.prompt(index)
        with pytest.raises(EnvironmentFailed, match="at most 3 texts"):
            world.held_out(3)


def test_frames_have_their_declared_form() -> None:
    assert read_message_frame(b'{"id": 3, "result": 1.0}') == Answered(3, 1.0, None, False)
    assert read_message_frame(b'{"ask": 1, "id": 2, "prompt": [5, 6]}') == Asked(1, 2, (5, 6))
    message = read_message_frame(json.dumps({"id": 1, "error": "\x1b[2J\u202e" * 1_000}).encode())
    assert isinstance(message, Answered)
    assert message.error is not None
    assert message.error.isprintable()
    assert len(message.error) <= limits.TEXT_CHARS_MAX
    for bad in (
        b'{"ask": 1, "id": 1, "prompt": [-1]}',
        b'{"ask": 1, "id": 1, "prompt": [true]}',
        b'{"ask": 1, "id": 1, "prompt": [2147483648]}',
        b'{"ask": 1, "id": 1, "prompt": "text"}',
        b'{"ask": "1", "id": 1, "prompt": []}',
        b'{"id": -1, "result": 1}',
        b'{"id": 1.0, "result": 1}',
        b"\xff",
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - any kind of it ends the process
            read_message_frame(bad)


def nested(depth: int) -> object:
    """Return lists in lists. A child's may be as deep as the JSON parser takes, which can be too deep to show."""
    found: object = 1.0
    for _ in range(depth):
        found = [found]
    return found


def test_answers_are_of_the_kind_that_was_asked_for() -> None:
    assert (as_reward(1), as_reward(True), as_reward(-0.5)) == (1.0, 1.0, -0.5)
    assert (as_text("é"), as_texts(["a"], 1), as_flag(False)) == ("é", ["a"], False)
    for check, value in (
        (as_reward, float("nan")),
        (as_reward, 2e6),
        (as_text, b"bytes"),
        (as_flag, 1),
        (lambda found: as_texts(found, 1), ["a", "b"]),
        (lambda found: as_texts(found, 1), [1]),
        (as_reward, nested(5_000)),
        (as_parts, {"a": nested(5_000)}),
    ):
        with pytest.raises(ValueError, match=r"it (returned|did not give)"):
            check(value)


async def test_an_episode_that_asks_without_end_ends_its_process(tmp_path: Path) -> None:
    """The package's own code writes the requests, as if it were the episode."""
    with running(tmp_path, isolated=False) as world:
        asked = 0

        async def ask(_: tuple[int, ...]) -> None:
            nonlocal asked
            asked += 1

        made = world.process.child
        made.asks[7] = (asyncio.get_running_loop(), ask)
        line = json.dumps({"ask": 1, "id": 7, "prompt": [1]})
        begun = time.monotonic()
        result = await asyncio.to_thread(tried, world, "forge_often", f"{limits.ENVIRONMENT_ASKS_MAX + 10} {line}")
        assert result == "the environment process ended"
        await asyncio.sleep(0)
        assert asked <= limits.ENVIRONMENT_ASKS_MAX
        assert made.is_gone
        assert time.monotonic() - begun < 60
