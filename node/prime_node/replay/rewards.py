"""Prompts and rewards of a batch's groups, computed again from their problems and tokens. Without torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prime_node.envs.episodes import WrongContext, bounds_of, scored
from prime_node.envs.prompts import prompt_of
from prime_node.ports.environment import Environment, Tokenizer, TurnEnvironment
from prime_node.ports.train_samples import Group
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import EnvironmentSpec, RunSpec


def repeatable(spec: RunSpec) -> frozenset[str]:
    """Return the environments whose rewards are the same each time."""
    return frozenset(one.name for one in spec.environments if one.is_deterministic and one.scorings == 1)


async def reward_faults(
    groups: Sequence[Group],
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    spec: RunSpec,
    on_group: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, list[str]]:
    """Return how many rewards were computed again, and the prompts and rewards that are others in the batch, as text for people.

    A group whose prompt is not that of its problem is not scored: its completions answer another question. `on_group` gets the
    number of groups that are done, and of all.
    """
    known = {one.name: one for one in spec.environments}
    checked, faults = 0, []
    for place, group in enumerate(groups):
        on_group(place, len(groups))
        if group.environment not in repeatable(spec) or group.problem_index is None:
            continue
        environment = environments[group.environment]
        if fault := await asyncio.to_thread(_prompt_fault, group, group.problem_index, environment, tokenizer):
            faults.append(f"slot {group.slot}: {fault}")
            continue
        rewards = await _rewards_of(group, group.problem_index, environment, tokenizer, known[group.environment], spec)
        for number, (found, stated) in enumerate(zip(rewards, group.rewards, strict=True)):
            checked += 1
            if found != stated:
                said = found if isinstance(found, str) else f"{found:g} here"
                faults.append(f"slot {group.slot}, completion {number}: its reward is {stated:g} in the batch, {said}")
    on_group(len(groups), len(groups))
    return checked, faults


def _prompt_fault(group: Group, index: int, environment: Environment, tokenizer: Tokenizer) -> str:
    """Return why the prompt is not that of the group's problem; empty if it is."""
    try:
        due = prompt_of(environment, index, tokenizer)
    except Exception as error:  # noqa: BLE001 - third-party code
        return f"the environment renders no prompt here: {type(error).__name__}: {error}"
    return "" if due == group.prompt_token_ids else f"its prompt is not that of problem {index}"


async def _rewards_of(
    group: Group, index: int, environment: Environment, tokenizer: Tokenizer, its: EnvironmentSpec, spec: RunSpec
) -> list[float | str]:
    """Return each completion's reward, or why there is none."""
    if its.turns_max == 1 or not isinstance(environment, TurnEnvironment):
        return await asyncio.to_thread(_scores_of, group.completions, index, environment, tokenizer)
    found: list[float | str] = []
    play = partial(environment.play, index, group.prompt_token_ids)
    for number in range(len(group.completions)):
        try:
            found += await scored(play, group.turns[number], bounds_of(spec)[its.name], exact=True, scorings=1)
        except WrongContext as error:
            found.append(f"and here its turns are not the environment's: {error}")
        except Exception as error:  # noqa: BLE001 - third-party code
            found.append(_failure(error))
    return found


def _scores_of(
    completions: Sequence[Completion], index: int, environment: Environment, tokenizer: Tokenizer
) -> list[float | str]:
    """Return the rewards of completions of one turn. Equal ones are scored once: the environment is another process."""
    scores: dict[tuple[tuple[int, ...], bool], float | str] = {}
    keys = [(one.token_ids, one.finish is FinishReason.STOP) for one in completions]
    for token_ids, finished in dict.fromkeys(keys):
        try:
            text = tokenizer.decode(list(token_ids))
            scores[token_ids, finished] = float(environment.score(index, text, finished=finished))
        except Exception as error:  # noqa: BLE001 - third-party code
            scores[token_ids, finished] = _failure(error)
    return [scores[key] for key in keys]


def _failure(error: Exception) -> str:
    return f"and the environment fails here: {type(error).__name__}: {error}"
