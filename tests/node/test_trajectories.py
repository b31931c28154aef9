"""Interleaving: turns become samples, and no sampled token is lost, doubled or moved to another context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prime_node.algo.trajectories import Interleaved, interleave
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.turns import Turn


def turn(prompt: str, answer: str) -> Turn:
    logprobs = tuple(-0.5 - index for index in range(len(answer)))
    return Turn(tuple(map(ord, prompt)), Completion(tuple(map(ord, answer)), logprobs, FinishReason.STOP))


def text(sample: Interleaved) -> str:
    """Return the prompt, then sampled tokens in upper case and others in lower case."""
    marked = zip(sample.completion_token_ids, sample.loss_mask, strict=True)
    answers = "".join(chr(token).upper() if trained else chr(token).lower() for token, trained in marked)
    return "".join(map(chr, sample.prompt_token_ids)) + "|" + answers


def test_turns_that_extend_one_another_are_one_sample_with_the_environment_masked() -> None:
    (sample,) = interleave([turn("u1", "ab"), turn("u1abu2", "cd"), turn("u1abu2cdu3", "e")])
    assert text(sample) == "u1|ABu2CDu3E"
    assert sample.logprobs == (-0.5, -1.5, 0.0, 0.0, -0.5, -1.5, 0.0, 0.0, -0.5)
    assert sample.turns == (0, 1, 2)


def test_five_steps_with_a_break_at_the_fourth_are_two_samples() -> None:
    samples = interleave(
        [
            turn("u1", "(t)ab"),
            turn("u1(t)abu2", "(s)cd"),
            turn("u1(t)abu2(s)cdu3", "(r)ef"),
            turn("u1abu2cdu3efu4", "gh"),  # the thinking is stripped from the history
            turn("u1abu2cdu3efu4ghu5", "ij"),
        ]
    )
    assert [sample.turns for sample in samples] == [(0, 1, 2), (3, 4)]
    assert text(samples[1]) == "u1abu2cdu3efu4|GHu5IJ"


def test_a_sub_agent_has_its_own_sample_and_the_main_one_continues() -> None:
    samples = interleave(
        [turn("main", "ab"), turn("sub", "x"), turn("subxmore", "y"), turn("mainabdone", "cd")],
    )
    assert [text(sample) for sample in samples] == ["main|ABdoneCD", "sub|XmoreY"]


def test_two_answers_to_one_prompt_are_two_samples() -> None:
    assert [text(sample) for sample in interleave([turn("u", "a"), turn("u", "b")])] == ["u|A", "u|B"]


def test_the_longest_of_several_prefixes_is_continued() -> None:
    samples = interleave([turn("u", "a"), turn("ua", "b"), turn("u", "abc"), turn("uabcd", "e")])
    assert [sample.turns for sample in samples] == [(0, 1), (2, 3)]
    assert [text(sample) for sample in samples] == ["u|AB", "u|ABCdE"]


def test_a_turn_without_an_answer_teaches_nothing() -> None:
    assert interleave([turn("u", "")]) == []
    assert [sample.turns for sample in interleave([turn("u", ""), turn("u", "a")])] == [(1,)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),  # which earlier turn to continue; the later ones restart
            st.booleans(),  # cut the last token of that history, as a stripped one is
            st.text("ab", max_size=3),
            st.text("ab", max_size=3),
        ),
        max_size=8,
    )
)
def test_every_sampled_token_is_trained_once_and_in_its_own_context(moves: list[tuple[int, bool, str, str]]) -> None:
    turns: list[Turn] = []
    histories: list[str] = []
    for earlier, stripped, environment, answer in moves:
        history = histories[earlier] if earlier < len(histories) else ""
        prompt = (history[:-1] if stripped else history) + environment
        turns.append(turn(prompt, answer))
        histories.append(prompt + answer)
    trained = []
    for sample in interleave(turns):
        tokens = sample.prompt_token_ids + sample.completion_token_ids
        first = len(sample.prompt_token_ids)
        trained += [
            (tokens[: first + place], tokens[first + place], sample.logprobs[place])
            for place, is_trained in enumerate(sample.loss_mask)
            if is_trained
        ]
    sampled = [
        (one.prompt_token_ids + one.completion.token_ids[:place], token, one.completion.logprobs[place])
        for one in turns
        for place, token in enumerate(one.completion.token_ids)
    ]
    assert sorted(trained) == sorted(sampled)
