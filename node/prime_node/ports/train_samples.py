"""What the trainer trains on: groups as the feed delivers them, and samples as the train backend takes them.

Letters: N completion tokens, of one sequence or of many sequences concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from prime_protocol.rollout import Completion
from prime_protocol.turns import Turn


@dataclass(frozen=True, slots=True)
class Group:
    """The accepted rollouts of one prompt, as the feed delivers them: verified, with a validator's rewards.

    Example: Group(17, (72, 105), (completion, other), (1.0, 0.0), policy_versions=(3, 3), worker="12D3...").
    """

    slot: int
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    """Rewards, one for each completion."""
    policy_versions: tuple[int, ...]
    """Policy from which each completion's staleness counts: the leased one, unless the schedule says otherwise."""
    worker: str
    """Key id of the worker that sampled them."""
    environment: str = ""
    """Name, in the RunSpec, of the prompt's environment."""
    masked: tuple[bool, ...] = ()
    """Completions that are too old to train on; empty if none is. They count in the advantages."""
    turns: tuple[tuple[Turn, ...], ...] = ()
    """Turns of each rollout, whose completion is then the concatenation of its answers. Empty: each rollout is one
    answer to the prompt."""
    claimed: bool = False
    """Whether the logprobs are the worker's claim; otherwise a validator computed them."""
    problem_index: int | None = None
    """Number of the problem in its environment, if it is known."""
    greedy_reward: float | None = None
    """Reward of the trainer's own greedy completion of the prompt, for an advantage that needs it."""
    reward_parts: tuple[Mapping[str, float], ...] = ()
    """Further rewards of each completion by name, for an advantage that asks for them; empty: none was asked for."""
    policies_spanned: tuple[int, ...] = ()
    """Policy versions between each completion's first and last token, 0 if one sampled it; empty if none spans any."""


class TrainingMode(StrEnum):
    """Training signal of a sample. One batch may mix modes."""

    RL = "rl"
    """Reinforcement learning: the advantage, by the loss that the settings name."""
    OPD = "opd"
    """On-policy distillation: a teacher's logprobs of the student's own tokens."""
    OPSD = "opsd"
    """On-policy self-distillation: the teacher is the policy itself, which sees the problem's answer as well."""
    SFT = "sft"
    """Supervised fine-tuning: a reference to imitate."""


class DistillationKind(StrEnum):
    """Direction of the divergence between a teacher and the policy, its student."""

    FORWARD = "forward"
    """KL(teacher || student): the student covers what the teacher may say."""
    REVERSE = "reverse"
    """KL(student || teacher): the student says only what the teacher may say."""
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The likeliest tokens at each of N places. Letters: K tokens at most; a place with fewer is filled with -inf."""

    token_ids_NK: npt.NDArray[np.int64]
    logprobs_NK: npt.NDArray[np.float32]
    """Logprobs in nats."""

    def __getitem__(self, places: slice) -> TopLogprobs:
        return TopLogprobs(self.token_ids_NK[places], self.logprobs_NK[places])

    def __len__(self) -> int:
        return len(self.token_ids_NK)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to train on. Example: TrainSample((1, 2), (3, 4), (-0.1, -0.2), advantage=0.5).

    Per-token fields may be empty if the sample does not use them.
    """

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    inference_logprobs: tuple[float, ...]
    """Logprobs (nats) of each completion token under the policy that sampled it; zeros if the mode needs none (sft)."""
    advantage: float
    """Advantage of every token, unless `advantages` are given."""
    mode: TrainingMode = TrainingMode.RL
    loss_mask: tuple[bool, ...] = ()
    """Mask, False on completion tokens that are not trained, such as an environment's text between two turns. Empty:
    all are trained."""
    teacher_logprobs: tuple[float, ...] = ()
    """Logprobs (nats) under the teacher; mode `opd` needs them."""
    teacher_top: TopLogprobs | None = None
    """The teacher's likeliest tokens at each completion token, if it is asked for a distribution."""
    teacher_prompt_token_ids: tuple[int, ...] = ()
    """Prompt under which the policy teaches itself; mode `opsd` needs it."""
    prox_logprobs: tuple[float, ...] = ()
    """Logprobs (nats) under the proximal policy. Empty: that is the policy at the start of the step."""
    reference_logprobs: tuple[float, ...] = ()
    """Logprobs (nats) under the reference policy, for a loss that needs them."""
    values: tuple[float, ...] = ()
    """The critic's values before each completion token, before the step."""
    returns: tuple[float, ...] = ()
    """What the critic learns: the return from each completion token on."""
    selected: tuple[bool, ...] = ()
    """Tokens that the loss chose, for a loss that needs them."""
    advantages: tuple[float, ...] = ()
    """Advantage of each completion token. Empty: `advantage` is that of all."""
    loss_weight: float = 1.0
    """Factor of its loss in the aggregation. For prompt_mean: trainable tokens of the batch / (its prompts x this prompt's)."""
    weight_mean: float = 1.0
    """Mean importance weight of the optimizer step, by which a loss that normalises them divides."""
    claim_nats_max: float = math.inf
    """Distance (nats) of `inference_logprobs` from the trainer's beyond which a token is not trained. Infinite unless
    they are a worker's claim."""

    @property
    def num_trained(self) -> int:
        """Return the number of trainable tokens."""
        return sum(self.loss_mask) if self.loss_mask else len(self.completion_token_ids)
