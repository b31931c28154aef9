"""From rewards to training data: advantages, length penalties, filters, and the learning-rate schedule."""

from __future__ import annotations

import inspect
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prime_node.algo.advantages import (
    ADVANTAGES,
    TOKEN_ADVANTAGES,
    AdvantageInputs,
    LengthCost,
    OverlongPenalty,
    RolloutView,
    find_advantage,
    inputs_of,
)
from prime_node.algo.filters import FILTERS, Filter, FilterInputs, find_filter, flags
from prime_node.algo.losses import LOSSES
from prime_node.algo.schedule import Damping, Decay, ParameterSchedule
from prime_node.ports.train_samples import Group
from prime_node.trainer.batch import prepare
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.credit import whitened
from prime_node.trainer.recipe import Recipe
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason

SEED_EXAMPLE = """
import statistics
import sys
from prime_node.algo.advantages import AdvantageInputs, AdvantageOutputs

def normalized_advantage(inputs: AdvantageInputs, eps: float = 1e-8) -> AdvantageOutputs:
    rewards = [r["reward"] for r in inputs.rollouts]
    mean = statistics.fmean(rewards)
    std = statistics.pstdev(rewards) if len(rewards) > 1 else 0.0
    return AdvantageOutputs(advantages=[(r - mean) / (std + eps) for r in rewards])
"""
"""The example of prime-rl's docs/algorithms.md (Apache-2.0), except for its import line."""


def rewarded(*rewards: float, lengths: tuple[int, ...] = (), turns: tuple[int, ...] = ()) -> AdvantageInputs:
    return AdvantageInputs(
        tuple(
            RolloutView(
                reward,
                completion_ids=tuple(range(lengths[index] if lengths else 3)),
                num_turns=turns[index] if turns else 1,
            )
            for index, reward in enumerate(rewards)
        )
    )


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_advantages_are_their_formulas_for_groups_of_any_size(size: int) -> None:
    """Tolerance: roundings of float64."""
    rewards = [0.1, 0.9, 0.4, 0.0, 1.0, 0.3, 0.3, 0.7][:size]
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards) if size > 1 else 0.0
    lengths = (5, 1, 2, 9, 4, 4, 3, 7)[:size]
    weighted = sum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / sum(lengths)
    expected = {
        "group_mean": [reward - mean for reward in rewards],
        "normalized": [(reward - mean) / (deviation + 1e-8) for reward in rewards],
        "leave_one_out": [
            reward - statistics.fmean([*rewards[:index], *rewards[index + 1 :]]) if size > 1 else 0.0
            for index, reward in enumerate(rewards)
        ],
    }
    expected["default"] = expected["reinforce_plus_plus_baseline"] = expected["group_mean"]
    second = sorted(rewards)[-2] if size > 1 else 0.0
    expected["grpo_passk"] = [
        (reward - second) / (deviation + 1e-6) if reward == max(rewards) and size > 1 else 0.0 for reward in rewards
    ]
    expected["gdpo"] = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
    expected["opo"] = [reward - weighted for reward in rewards]
    expected["max_rl"] = [(reward - mean) / mean for reward in rewards]
    expected["reinforce_plus_plus"] = rewards
    assert expected.keys() == ADVANTAGES.keys()
    for name, values in expected.items():
        assert find_advantage(name)(rewarded(*rewards, lengths=lengths)) == pytest.approx(values, abs=1e-12)


def test_a_deviation_is_the_samples_or_the_populations() -> None:
    for std, deviation in (("sample", 0.5**0.5), ("population", 0.5)):
        found = find_advantage("normalized", kwargs={"std": std})(rewarded(1.0, 0.0))
        assert found == pytest.approx((0.5 / deviation, -0.5 / deviation))
    with pytest.raises(LocalError, match="expected sample or population"):
        find_advantage("normalized", kwargs={"std": "none"})(rewarded(1.0, 0.0))


def test_only_a_rollout_that_is_better_than_all_others_learns_to_pass_at_k() -> None:
    plain = find_advantage("grpo_passk", kwargs={"norm_adv_by_std_in_grpo": False})
    assert plain(rewarded(0.25, 1.0, 0.75)) == (0.0, 0.25, 0.0)
    assert plain(rewarded(0.25, 1.0, 1.0)) == (0.0, 0.0, 0.0)
    assert find_advantage("grpo_passk", kwargs={"eps": 0.0})(rewarded(1.0, 0.0)) == pytest.approx((2**0.5, 0.0))


def test_max_rl_of_a_mean_that_is_not_positive_is_the_plain_difference() -> None:
    assert find_advantage("max_rl")(rewarded(-1.0, 0.0)) == (-0.5, 0.5)


def test_whitening_is_over_the_tokens_of_all_groups() -> None:
    """Values 1, 0, 0, -1, -1, -1: mean -1/3, squares 16/9 + 2/9 + 12/9 = 10/3, sample variance 2/3."""
    found = whitened([(1.0, 0.0), (-1.0,)], [(1, 2), (3,)])
    scale = math.sqrt(2 / 3 + 1e-8)
    assert found == [pytest.approx((4 / 3 / scale, 1 / 3 / scale)), pytest.approx((-2 / 3 / scale,))]
    assert whitened([(0.5, 0.5), (0.5,)], [(1, 2), (3,)]) == [(0.0, 0.0), (0.0,)]
    assert whitened([(0.5,), ()], [(1,), ()]) == [(0.0,), ()]
    assert find_advantage("reinforce_plus_plus").is_whitened
    assert find_advantage("group_mean", whiten=True).is_whitened
    assert not find_advantage("reinforce_plus_plus_baseline", whiten=False).is_whitened


def test_long_rollouts_lose_reward_within_the_buffer() -> None:
    """The longest length is 10 and the buffer 4: no penalty up to 6, half of it at 8, all of it at 10."""
    overlong = OverlongPenalty(buffer_tokens=4, penalty_factor=0.5, longest_tokens=10)
    shaped = overlong.shaped(rewarded(1.0, 1.0, 1.0, 1.0, lengths=(1, 6, 8, 10)))
    assert shaped.rewards == (1.0, 1.0, 0.75, 0.5)
    found = find_advantage("group_mean", overlong=overlong)(rewarded(1.0, 1.0, lengths=(6, 10)))
    assert found == (0.25, -0.25)


def test_the_settings_whiten_and_shape_the_batch() -> None:
    """Lengths 2: rewards 1 and 0 of one prompt, 0 and 0 of another; of eight tokens the sample variance is 3/14."""
    config = TrainerConfig.model_validate({"advantage": {"type": "reinforce_plus_plus"}, "filters": []})
    recipe = Recipe.of(config, max_steps=1, completion_tokens_max=4, vocab_size=8)
    samples = prepare([group(1.0, 0.0), group(0.0, 0.0)], recipe, step=0).samples
    scale = math.sqrt(3 / 14 + 1e-8)
    assert [sample.advantage for sample in samples] == pytest.approx([0.75 / scale, *[-0.25 / scale] * 3])
    buffer = {
        "advantage": {"type": "reinforce_plus_plus", "whiten": False, "overlong_buffer": {"len": 4}},
        "filters": [],
    }
    recipe = Recipe.of(TrainerConfig.model_validate(buffer), max_steps=1, completion_tokens_max=4, vocab_size=8)
    assert [sample.advantage for sample in prepare([group(1.0, 0.0)], recipe, step=0).samples] == [0.5, -0.5]


def test_truncated_rollouts_are_flagged() -> None:
    stopped, cut = (Completion((1,), (-0.1,), finish) for finish in (FinishReason.STOP, FinishReason.LENGTH))
    group = Group(0, (9,), (stopped, cut), (1.0, 0.0), (0, 0), "worker")
    assert list(find_filter("truncated")(FilterInputs(group, (0.5, -0.5), 8))) == [False, True]


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"reinforce_plus_plus"}))
def test_equal_rewards_give_exactly_nothing(name: str) -> None:
    advantage = find_advantage(name)
    assert advantage(rewarded(*(0.1,) * 7)) == (0.0,) * 7
    assert advantage(rewarded(0.7)) == (0.0,)
    assert advantage(rewarded()) == ()


def test_the_seeds_example_of_an_advantage_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seed_advantage.py").write_text(SEED_EXAMPLE + "def short(inputs):\n    return AdvantageOutputs([])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_advantage("custom", import_path="seed_advantage.normalized_advantage", kwargs={"eps": 1e-3})
    group = rewarded(1.0, 0.0, 0.5, 0.5)
    assert found(group) == pytest.approx(find_advantage("normalized", kwargs={"eps": 1e-3, "std": "population"})(group))
    assert found(rewarded(0.3)) == (0.0,)
    with pytest.raises(LocalError, match=r"advantage seed_advantage\.short: expected 2 finite numbers"):
        find_advantage("custom", import_path="seed_advantage.short")(rewarded(1.0, 0.0))
    with pytest.raises(LocalError, match="advantage normalized: got an unexpected keyword argument 'epsilon'"):
        find_advantage("normalized", kwargs={"epsilon": 1.0})


def test_an_own_algorithm_is_found_in_the_current_folder_of_any_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console script `prime-node trainer` has its own folder on the path, and `python -P` none."""
    (tmp_path / "own_losses.py").write_text("def mine(inputs, scale=1.0):\n    return None\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    monkeypatch.chdir(tmp_path)
    config = TrainerConfig.load({}, {"loss": {"import_path": "own_losses:mine", "kwargs": {"scale": 2.0}}})
    assert Recipe.of(config, max_steps=1, completion_tokens_max=4, vocab_size=8).loss.needs == frozenset()
    with pytest.raises(LocalError, match=r"No module named 'no_such_losses' \(current folder: "):
        find_advantage("custom", import_path="no_such_losses:mine")


def test_a_rollout_answers_by_name_and_by_attribute() -> None:
    completion = Completion((7, 8), (-0.5, -0.25), FinishReason.LENGTH)
    (view,) = inputs_of(Group(0, (9,), (completion,), (0.5,), (0,), "worker", environment="math")).rollouts
    assert (view["reward"], view["completion_len"], view["is_truncated"], view["environment"]) == (0.5, 2, True, "math")
    assert dict(view)["completion_logprobs"] == view.completion_logprobs == (-0.5, -0.25)
    assert view.get("trajectory") is None
    with pytest.raises(KeyError, match="a rollout has no 'rewards'; it has reward, "):
        view["rewards"]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_length_penalties_shape_the_rewards_before_any_advantage(name: str) -> None:
    """The two best cost 2 and 6, mean 4. The cheap one gets half as much again, the expensive one and the wrong ones nothing."""
    shaped, lengths = (1.0 * 1.5, 1.0, 0.5, 0.0), (2, 6, 1, 1)
    plain = find_advantage(name)
    tokens = find_advantage(name, length_cost=LengthCost.TOKENS)
    assert tokens(rewarded(1.0, 1.0, 0.5, 0.0, lengths=lengths)) == pytest.approx(
        plain(rewarded(*shaped, lengths=lengths))
    )
    turns = find_advantage(name, length_cost=LengthCost.TURNS)
    assert turns(rewarded(1.0, 1.0, 0.5, 0.0, turns=(2, 6, 1, 1))) == pytest.approx(plain(rewarded(*shaped)))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_linear_penalty_takes_from_every_reward_by_the_groups_success(name: str) -> None:
    """Mean 0.5: outputs 2 and 4 of 4, inputs 1 and 5 of 5 (prompt and tools), turns 1 and 2 of 2."""
    short, long = RolloutView(1.0, (7,) * 2, prompt_ids=(1,)), RolloutView(0.0, (7,) * 4, prompt_ids=(1,), num_turns=2)
    group = AdvantageInputs((short, replace(long, tool_response_len=4)))
    weights = {"num_output_tokens_weight": 0.2, "num_input_tokens_weight": 0.1, "num_turns_weight": 0.4}
    shaped = (1.0 - 0.5 * (0.2 / 2 + 0.1 / 5 + 0.4 / 2), 0.0 - 0.5 * (0.2 + 0.1 + 0.4))
    plain, linear = find_advantage(name), find_advantage(name, length_cost=LengthCost.LINEAR, length_weights=weights)
    assert linear(group) == pytest.approx(plain(group.with_rewards(shaped)))
    default = find_advantage("reinforce_plus_plus", whiten=False, length_cost=LengthCost.LINEAR)
    assert default(group) == pytest.approx((1.0 - 0.5 * (0.125 + 0.02 + 0.05), -0.5 * 0.45))
    assert linear(rewarded()) == ()
    assert linear(rewarded(0.0, 0.0, lengths=(0, 0)))[0] == 0.0


def test_being_short_never_pays_for_being_wrong() -> None:
    penalised = find_advantage("group_mean", length_cost=LengthCost.TOKENS)
    assert penalised(rewarded(0.0, 0.0, lengths=(1, 9))) == (0.0, 0.0)
    assert penalised(rewarded()) == ()


def test_an_environments_tokens_have_a_weight_of_their_own() -> None:
    group = rewarded(1.0, 1.0, lengths=(2, 2))
    first, second = group.rollouts
    talkative = AdvantageInputs((first, replace(second, tool_response_len=8)))
    free = find_advantage("default", length_cost=LengthCost.TOKENS, length_weights={"tool_response_weight": 0.0})
    counted = find_advantage("default", length_cost=LengthCost.TOKENS)
    assert free(talkative) == (0.0, 0.0)
    assert counted(talkative)[0] > 0.0 > counted(talkative)[1]


def group(*rewards: float) -> Group:
    completion = Completion((1, 2), (-0.1, -0.2), FinishReason.STOP)
    return Group(0, (9,), (completion,) * len(rewards), rewards, (0,) * len(rewards), "worker")


def of_completions(*completions: tuple[tuple[int, ...], tuple[float, ...]], vocab_size: int = 1000) -> FilterInputs:
    made = tuple(Completion(ids, logprobs, FinishReason.STOP) for ids, logprobs in completions)
    zeros = (0.0,) * len(made)
    return FilterInputs(Group(0, (9,), made, zeros, (0,) * len(made), "worker"), zeros, vocab_size)


def test_gibberish_is_a_rare_token_less_probable_than_a_guess() -> None:
    guess = -math.log(1000)
    inputs = of_completions(
        ((5, 200_000), (-0.1, guess - 2.1)),
        ((5, 200_000), (-0.1, guess - 1.9)),
        ((5, 7), (-0.1, guess - 9.0)),
    )
    assert list(find_filter("gibberish")(inputs)) == [True, False, False]
    gibberish = find_filter("gibberish", kwargs={"token_id_threshold": 6, "logprob_offset": 1.0})
    assert list(gibberish(inputs)) == [True, True, True]


def test_gibberish_by_the_mean_logprob() -> None:
    inputs = of_completions(((5, 6), (-4.0, -2.0)), ((5, 6), (-4.0, -1.0)))
    assert list(find_filter("gibberish", kwargs={"threshold": -2.8})(inputs)) == [True, False]


def test_repetition_is_a_long_streak_of_certainty() -> None:
    sure, unsure = -0.001, -0.5
    inputs = of_completions(((1,) * 9, (*(sure,) * 5, unsure, *(sure,) * 3)), ((1,) * 9, (sure, sure, unsure) * 3))
    assert list(find_filter("repetition", kwargs={"window": 4})(inputs)) == [True, False]
    assert list(find_filter("repetition", kwargs={"window": 6})(inputs)) == [False, False]
    assert list(find_filter("repetition")(inputs)) == [False, False]


def test_repetition_by_the_share_of_n_grams_seen_before() -> None:
    circles, plain = (1, 2, 3) * 4, tuple(range(12))
    inputs = of_completions(*((ids, (-1.0,) * len(ids)) for ids in (circles, plain, (1, 1))))
    strict = find_filter("repetition", kwargs={"threshold": 0.6, "ngram": 3})
    assert list(strict(inputs)) == [True, False, False]
    assert list(find_filter("repetition", kwargs={"threshold": 0.7, "ngram": 3})(inputs)) == [False, False, False]


def test_the_first_filter_that_matches_names_the_rollout() -> None:
    second_only = Filter("second_only", lambda given: [index == 1 for index in range(len(given.advantages))])
    given = FilterInputs(group(1.0, 0.0, 0.5), (0.5, 0.0, 0.0), 264)
    found = flags([second_only, find_filter("zero_advantage")], given)
    assert [None if flag is None else flag.name for flag in found] == [None, "second_only", "zero_advantage"]
    assert flags([], given) == [None, None, None]
    with pytest.raises(LocalError, match="unknown filter"):
        find_filter("zero")
    with pytest.raises(LocalError, match="filter repetition: got an unexpected keyword argument 'treshold'"):
        find_filter("repetition", kwargs={"treshold": 0.4})


def test_the_documents_list_every_algorithm_with_its_settings() -> None:
    listed = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    lines = [line for line in listed.splitlines() if line.startswith("| `")]
    rows = {
        line.split("|")[1].split("`")[1]: line for line in reversed(lines)
    }  # a later table has other frameworks' names
    functions: dict[str, Callable[..., object]] = {name: known.function for name, known in LOSSES.items()}
    functions |= {**ADVANTAGES, **FILTERS, **TOKEN_ADVANTAGES}
    del functions["default"]  # a second name
    for name, function in functions.items():
        assert name in FILTERS or name in rows, f"docs/algorithms.md has no row for {name}"
        section = listed if name in FILTERS else rows[name]
        for setting in list(inspect.signature(function).parameters)[1:]:
            assert f"`{setting}`" in section, f"docs/algorithms.md: {name} has a setting {setting}"


def test_the_schedule_rises_and_falls() -> None:
    schedule = ParameterSchedule(1.0, warmup_steps=5, total_steps=400, final_share=0.1)
    assert schedule.at(0) == pytest.approx(0.2)
    assert schedule.at(4) == pytest.approx(1 - 0.9 * 4 / 400)
    assert schedule.at(399) == pytest.approx(0.1, abs=0.003)
    assert schedule.at(10_000) == pytest.approx(0.1)
    assert ParameterSchedule(2.0, 0, 1, 1.0).at(77) == 2.0


def test_the_schedule_s_other_shapes() -> None:
    cosine, constant = (ParameterSchedule(1.0, 0, 100, 0.2, decay) for decay in (Decay.COSINE, Decay.CONSTANT))
    assert [cosine.at(step) for step in (0, 50, 100, 200)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert cosine.at(25) == pytest.approx(0.2 + 0.8 * (0.5 + 0.5 * math.cos(math.pi / 4)))
    assert [constant.at(step) for step in (0, 50, 100)] == [1.0, 1.0, 1.0]


def test_damping_falls_fast_recovers_slowly_and_has_a_floor() -> None:
    damping = Damping(0.1)
    assert damping.after(1.0, 0.2) == 0.75
    assert damping.after(0.5, 0.12) == 0.5
    assert damping.after(0.5, 0.05) == pytest.approx(0.525)
    assert damping.after(1.0, 0.0) == 1.0
    assert damping.after(0.16, 9.0) == 0.15
