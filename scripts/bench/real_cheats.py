"""Cheats on a real model that real_model.py tries: by weights, by sampling, and by what is made of honest completions.

Each has a bar: the most tokens until it is caught. No cheat is caught before one bundle. UNSEEN lists small ones without a bar,
with what they gain. "Rescored" cheats claim the right logprobs, so only choices can show.

A completion's reward is here its number of distinct tokens: any function of the tokens does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from real_samples import Edit, Piece

from prime_node.validator.alternatives import Alternative
from prime_node.worker.cheats import INT4_GROUP, cut_completion, mapped, quantised
from prime_protocol.assignment import Lease
from prime_protocol.rollout import Completion, FinishReason, Rollouts, rollouts_for
from prime_protocol.weights import Weights, WeightTensor

SLOW = 1_000
"""Tokens of a bar that is not met within two or three bundles."""
VERY_SLOW = 10_000
CHEATS_SEED = 2
"""Seed of the cheats' prompts."""
CANDIDATES = 4
"""Candidates of best-of-n."""
STEP_SHARE = 0.005
"""Share of the weights whose last bit a training step changes at a learning rate of about 1e-6."""
HONEST = Alternative("honest")


@dataclass(frozen=True)
class Cheat:
    """A cheat and its bar: tokens until it is caught, in the median."""

    alternative: Alternative
    tokens_max: float
    is_rescored: bool = True
    """Whether it claims the right logprobs."""
    edit: Edit | None = None
    """What it makes of sampled completions; None: nothing."""
    turns: int = 1
    """Completions that it samples for each one that it sends, by other seeds than the assigned one but for the first."""
    title: str = ""
    gain: str = ""
    """What it gains, if it stays unseen."""

    @property
    def name(self) -> str:
        is_liar = self.is_rescored and self.alternative.change is not None
        name = self.title or self.alternative.name
        return f"{name}, rescored" if is_liar else name

    def piece(self, num_prompts: int) -> Piece:
        """Return its work over the first prompts."""
        parts = tuple(Piece(self.alternative, num_prompts, CHEATS_SEED, turn=turn) for turn in range(self.turns))
        if self.edit is None:
            return parts[0]
        return Piece(Alternative(self.title), num_prompts, CHEATS_SEED, parts=parts, edit=self.edit)


def rounded(levels: int, group: int | None = None) -> Callable[[Weights], Weights]:
    return lambda weights: mapped(
        weights, lambda values: quantised(values, group=group or values.shape[-1], largest=levels)
    )


def stepped_back(weights: Weights) -> Weights:
    """Return weights like those of one training step before: in some places the last bit of bf16 differs."""
    rng, found = np.random.default_rng(7), {}
    for name, tensor in weights.items():
        values = tensor.data.copy()
        values.reshape(-1)[rng.integers(0, values.size, int(STEP_SHARE * values.size))] ^= 1
        found[name] = WeightTensor(tensor.dtype, tensor.shape, values)
    return found


def without_last_layer(weights: Weights) -> Weights:
    """Return another model of the same shape: its last layer adds nothing."""
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    silent = (f"layers.{last}.self_attn.o_proj", f"layers.{last}.mlp.down_proj")
    return {
        name: replace(tensor, data=np.zeros_like(tensor.data)) if any(part in name for part in silent) else tensor
        for name, tensor in weights.items()
    }


def rewards_of(rollouts: Rollouts) -> list[float]:
    return [float(len(set(one.token_ids))) for one in rollouts.completions()]


def shaded(nats: float) -> Edit:
    """Claim so many nats too little for each token of the completions above their group's mean."""

    def edit(lease: Lease, parts: Sequence[Rollouts]) -> Rollouts:
        (rollouts,) = parts
        rewards = rewards_of(rollouts)
        is_paid_N = np.array(rewards) > np.mean(rewards)
        shift_T = np.repeat(nats * is_paid_N, rollouts.lengths_N)
        return replace(rollouts, logprobs_T=(rollouts.logprobs_T - shift_T).astype(np.float32))

    return edit


def best_of_n(lease: Lease, parts: Sequence[Rollouts]) -> Rollouts:
    """Send the completion with the best reward of each index."""
    rewards_PN = np.array([rewards_of(rollouts) for rollouts in parts])
    drawn = [rollouts.completions() for rollouts in parts]
    return rollouts_for(lease, [drawn[turn][index] for index, turn in enumerate(rewards_PN.argmax(axis=0).tolist())])


def copied(lease: Lease, parts: Sequence[Rollouts]) -> Rollouts:
    """Send for each index the completion of the next one, which another worker might have sent."""
    (rollouts,) = parts
    mine = rollouts.completions()
    return rollouts_for(lease, [*mine[1:], mine[0]])


def truncated(lease: Lease, parts: Sequence[Rollouts]) -> Rollouts:
    (rollouts,) = parts
    return rollouts_for(lease, [cut_completion(one, max(1, len(one.token_ids) // 2)) for one in rollouts.completions()])


def ended_early(lease: Lease, parts: Sequence[Rollouts]) -> Rollouts:
    """Send the first half and a stop token, as if the seed had chosen it."""
    (rollouts,), stop = parts, lease.sampling.stop_token_ids[0]
    found = []
    for one in rollouts.completions():
        half = max(1, len(one.token_ids) // 2)
        found.append(
            Completion((*one.token_ids[:half], stop), (*one.logprobs[:half], one.logprobs[half - 1]), FinishReason.STOP)
        )
    return rollouts_for(lease, found)


def temperature(value: float, tokens_max: float = math.inf, gain: str = "") -> Cheat:
    return Cheat(Alternative(f"temperature {value:g}", {"temperature": value}), tokens_max, gain=gain)


def shading(nats: float, tokens_max: float = math.inf, gain: str = "") -> Cheat:
    title = f"{nats:g} nats of shading where rewarded"
    return Cheat(HONEST, tokens_max, is_rescored=False, edit=shaded(nats), title=title, gain=gain)


CHEATS = (
    temperature(0.95, 1_500),
    temperature(0.9, 300),
    temperature(0.8, 100),
    Cheat(Alternative("top-p 0.9", {"top_p": 0.9}), 200),
    Cheat(Alternative("greedy", {"temperature": 0.0}), 100),
    Cheat(Alternative("int8 weights", change=rounded(127)), 300, is_rescored=False),
    Cheat(Alternative("int8 weights", change=rounded(127)), 1_500),
    Cheat(Alternative("int4 weights", change=rounded(7, INT4_GROUP)), 100, is_rescored=False),
    Cheat(Alternative("another model of the same shape", change=without_last_layer), 500, is_rescored=False),
    Cheat(Alternative("another model of the same shape", change=without_last_layer), 500),
    shading(0.05, 300),
    Cheat(HONEST, 500, edit=best_of_n, turns=CANDIDATES, title="best of 4"),
    Cheat(HONEST, 500, edit=truncated, title="truncated"),
    Cheat(HONEST, 500, edit=ended_early, title="truncated with a stop token"),
    Cheat(HONEST, 500, edit=copied, title="copied text"),
)
UNSEEN = (
    temperature(0.98, gain="Slightly likelier completions: at most a slightly higher reward."),
    shading(0.01, gain="Rewarded tokens weigh 1 % more in the step."),
    shading(0.005, gain="Rewarded tokens weigh 0.5 % more in the step."),
)
"""Small cheats without a bar. They take thousands of tokens to detect, or are never detected."""
SAME_BUILD_CHEATS = (
    *(each for each in CHEATS if each.edit is None),
    Cheat(Alternative("one step older", change=stepped_back), math.inf, is_rescored=False),
)
"""Cheats that a judge of the workers' build is tried on."""
